"""Files of a server on this host: parts of them, trying again, and what is told where that is no use."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from flame.errors import InputError, UsageError
from flame.preprocess import remote
from flame.preprocess.inputs import find_inputs
from flame.preprocess.plan import InputFile, cut_file
from flame.preprocess.readers.columns import Columns
from flame.preprocess.readers.formats import read_piece
from flame.preprocess.rejects import Rejects
from flame.preprocess.scan import scan_inputs
from tests.builds import PROJECT, environment
from tests.loopback import FileServer, GcsServer, S3Server

pytest.importorskip("aiohttp")
TEXTS = [f"{i} " + "words " * (i % 90) for i in range(3000)]
FEW = TEXTS[:300]
TEXT = Columns(text="text", kept=pa.schema([]))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0)
    monkeypatch.setattr(remote, "READ_AHEAD_BYTES", 2**16)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with FileServer(tmp_path) as found:
        yield found


def write(folder: Path, name: str, texts: Sequence[str] = TEXTS) -> Path:
    table = pa.table({"text": texts, "other": ["unrelated " * 100] * len(texts)})
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if name.endswith(".parquet"):
        pq.write_table(table, folder / name, row_group_size=1000, compression="none", use_dictionary=False)
    elif name.endswith((".arrow", ".feather")):
        feather.write_feather(table, folder / name, chunksize=1000, compression="uncompressed")
    else:
        (folder / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    return folder / name


def scan(*datasets: str, on_error: str = "fail") -> tuple[tuple[InputFile, ...], Columns]:
    return scan_inputs(
        find_inputs(datasets, data_dir=None, data_files=()),
        text_columns=("text",),
        keep_columns=(),
        limit_documents=None,
        limit_bytes=None,
        on_error=on_error,
    )


def read(*datasets: str) -> list[str]:
    files, columns = scan(*datasets)
    batches = (
        batch
        for file in files
        for piece in cut_file(file, 100_000)
        for batch in read_piece(piece, columns, Rejects(on_error="fail"))
    )
    return [text for batch in batches for text in batch.texts.to_pylist()]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl", "a.jsonl.gz"])
def test_a_file_is_read_by_parts(server: FileServer, name: str) -> None:
    size = write(server.folder, name).stat().st_size
    assert read(f"{server.url}/{name}?download=true") == TEXTS
    parts = [part for method, _, part in server.requests if method == "GET"]
    assert all(parts)
    if name.endswith("parquet"):
        ranges = [tuple(map(int, part.removeprefix("bytes=").split("-"))) for part in parts if part]
        assert sum(last - first + 1 for first, last in ranges) < size / 2  # the other column stays where it is


def test_a_remote_file_reads_as_a_local_one(server: FileServer) -> None:
    data = bytes(range(256)) * 100
    (server.folder / "a.bin").write_bytes(data)
    file = remote.RemoteFile(f"{server.url}/a.bin", len(data))
    for seek, size in (((0,), 10), ((-7, io.SEEK_END), 100), ((25_000,), -1), ((30_000,), 5)):
        local = io.BytesIO(data)
        assert file.seek(*seek) == local.seek(*seek)
        assert file.read(size) == local.read(size)
        assert file.tell() == local.tell()


@pytest.mark.parametrize("fault", ["failures", "cuts"])
def test_a_server_that_errs_a_few_times_is_asked_again_and_told(
    server: FileServer, capfd: pytest.CaptureFixture[str], fault: str
) -> None:
    write(server.folder, "a.jsonl.gz")
    getattr(server, fault)["a.jsonl.gz"] = 3
    assert read(f"{server.url}/a.jsonl.gz") == TEXTS
    told = [line for line in capfd.readouterr().err.splitlines() if "trying again" in line]
    assert len(told) == 3
    assert "a.jsonl.gz, bytes 0 to" in told[0]
    assert ("503" in told[0]) == (fault == "failures")


def test_a_server_that_keeps_erring_is_named(server: FileServer) -> None:
    write(server.folder, "a.parquet")
    server.failures["a.parquet"] = 1000
    for on_error in ("fail", "skip"):
        with pytest.raises(InputError, match=r"remote file cannot be read.*a\.parquet, bytes.*503.*6 times"):
            scan(f"{server.url}/a.parquet", on_error=on_error)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_a_remote_file_that_changes_is_named(server: FileServer, name: str) -> None:
    path = write(server.folder, name)
    ((file,), _) = scan(f"{server.url}/{name}")
    assert file.etag
    documents = read_piece(cut_file(file, 2**30)[0], TEXT, Rejects(on_error="skip"))
    next(documents)
    other = path.read_bytes().replace(b"words", b"Words")
    path.write_bytes(other)
    with pytest.raises(InputError, match=rf"changed after the build was planned.*{name}.*etag {file.etag}"):
        list(documents)
    with pytest.raises(InputError, match="changed after"):
        read_piece(cut_file(file, 2**30)[0], TEXT, Rejects(on_error="skip"))
    path.unlink()
    with pytest.raises(InputError, match=rf"is gone.*{name}"):
        read_piece(cut_file(file, 2**30)[0], TEXT, Rejects(on_error="skip"))


def test_what_is_absent_or_has_no_parts_is_refused(server: FileServer) -> None:
    with pytest.raises(UsageError, match=r"no such remote file.*absent\.parquet"):
        read(f"{server.url}/absent.parquet")
    write(server.folder, "a.parquet")
    server.ranges = False
    with pytest.raises(InputError, match="no parts of files"):
        read(f"{server.url}/a.parquet")
    (server.folder / "list.txt").write_text(f"{server.url}/a.parquet\n")
    with pytest.raises(InputError, match="no parts of files"):
        read(f"@{server.folder}/list.txt")


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    write(tmp_path, "a b.jsonl")
    (found,) = find_inputs([f"file://{tmp_path}/a%20b.jsonl"], data_dir=None, data_files=())
    assert found.path == str(tmp_path / "a b.jsonl")


def test_a_list_of_addresses_keeps_its_order_and_names_the_absent(server: FileServer) -> None:
    names = [f"part-{number}.jsonl" for number in (10, 2, 7, 1, 30, 4)]
    for name in names:
        (server.folder / name).write_text(f'{{"text": "{name}"}}\n')
    listed = server.folder / "list.txt"
    listed.write_text("".join(f"{server.url}/{name}\n" for name in names))
    assert read(f"@{listed}") == names
    found = find_inputs(["json"], data_dir=None, data_files=(f"{server.url}/part-1.jsonl",))
    assert [file.path for file in found] == [f"{server.url}/part-1.jsonl"]
    listed.write_text(f"{server.url}/part-1.jsonl\n{server.url}/part-3.jsonl\n{server.url}/part-2.jsonl\n")
    with pytest.raises(UsageError, match=r"no such remote file.*part-3\.jsonl"):
        read(f"@{listed}")
    with pytest.raises(UsageError, match=r"--dataset_split test: these files have no splits"):
        find_inputs([f"{server.url}/part-1.jsonl"], data_dir=None, data_files=(), split="test")


def test_the_process_that_forks_workers_imports_no_store(tmp_path: Path) -> None:
    code = (
        "import sys, threading, flame.preprocess.task; "
        "assert not {'fsspec', 'aiohttp', 'huggingface_hub', 'datasets'} & set(sys.modules); "
        "assert threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment())


# ---- buckets


@pytest.fixture(params=["s3", "gs"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """A server of the store whose `scheme` it has, and this process as one that has credentials for it."""
    kind, package = {"s3": (S3Server, "s3fs"), "gs": (GcsServer, "gcsfs")}[request.param]
    pytest.importorskip(package)
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in {"KEY": "ACCESS_KEY_ID", "SECRET": "SECRET_ACCESS_KEY", "us-east-1": "DEFAULT_REGION"}.items():
        monkeypatch.setenv(f"AWS_{value}", name)
    with kind(tmp_path) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        fsspec.get_filesystem_class(server.scheme).clear_instance_cache()  # which remembers another test's server
        yield server


def test_a_bucket_is_read_by_folders_and_patterns(bucket: FileServer, capfd: pytest.CaptureFixture[str]) -> None:
    names = ["raw/part-10.jsonl", "raw/part-2.parquet", "raw/sub/a.feather", "raw/_SUCCESS", "raw/.x/b.jsonl"]
    for name in names:
        path = bucket.folder / "bucket" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path.parent, path.name, FEW) if "_SUCCESS" not in name else path.touch()
    root = f"{bucket.scheme}://bucket"
    found = find_inputs([f"{root}/raw"], data_dir=None, data_files=())
    assert [file.path for file in found] == [
        f"{root}/raw/{name}" for name in ("part-2.parquet", "part-10.jsonl", "sub/a.feather")
    ]
    assert "passed over 2 notes and hidden files" in capfd.readouterr().err
    assert read(f"{root}/raw") == FEW * 3
    assert read(f"{root}/raw/*.jsonl", f"{root}/raw/part-2.parquet") == FEW * 2
    for absent in ("none", "none/*.jsonl"):
        with pytest.raises(UsageError, match=rf"no (such )?remote file.*{root}/none"):
            read(f"{root}/{absent}")
    (bucket.folder / "bucket/raw/notes.docx").touch()
    with pytest.raises(UsageError, match=r"1 file that no reader knows.*notes\.docx"):
        read(f"{root}/raw")


def test_a_bucket_that_fails_twice_or_cuts_a_body_is_asked_again(bucket: FileServer) -> None:
    (bucket.folder / "bucket").mkdir()
    write(bucket.folder / "bucket", "a.jsonl.gz", FEW)
    bucket.failures["bucket/a.jsonl.gz"], bucket.cuts["bucket/a.jsonl.gz"] = 2, 1
    assert read(f"{bucket.scheme}://bucket/a.jsonl.gz") == FEW
    assert bucket.failures["bucket/a.jsonl.gz"] == bucket.cuts["bucket/a.jsonl.gz"] == 0


def test_a_store_that_gives_no_access_is_told_as_that_at_once(
    bucket: FileServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for status in {"s3": (403,), "gs": (401, 403)}[bucket.scheme]:
        bucket.denied = status
        with pytest.raises(InputError, match=r"gives no access.*bucket/a\.jsonl.*for a public bucket FSSPEC_") as told:
            read(f"{bucket.scheme}://bucket/a.jsonl")
        assert {"s3": "AWS_ACCESS_KEY_ID", "gs": "gcloud auth"}[bucket.scheme] in str(told.value)
    assert "trying again" not in capfd.readouterr().err


def test_missing_credentials_are_told_as_that(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    s3fs = pytest.importorskip("s3fs")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(InputError, match=r"gives no access.*NoCredentialsError.*Set AWS_ACCESS_KEY_ID"):
        read("s3://bucket/a.jsonl")


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("https", "aiohttp")])
def test_a_package_that_is_absent_is_named_with_the_line_that_installs_it(
    tmp_path: Path, scheme: str, package: str
) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ImportError('no module named {package}')")
    code = f"from flame.preprocess import remote; remote.find('{scheme}://bucket/a.jsonl')"
    env = environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{PROJECT}")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    told = done.stderr.splitlines()[-1]
    assert f"UsageError: reading {scheme}:// needs a package that is not installed" in told and package in told
    assert told.endswith("pip install 'flame[remote]'.")
