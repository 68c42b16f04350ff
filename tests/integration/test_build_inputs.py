"""Builds of every kind of input: the same corpus whatever holds the texts, and however many workers read them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zstandard
from datasets import Dataset, DatasetDict

from flame.errors import FlameError, InputError
from flame.preprocess import hub
from flame.preprocess.inputs import find_inputs
from tests.builds import build_here, environment, files_of, rows_of, run_build, same_corpus, some_texts, texts_of
from tests.loopback import FileServer, HubServer

TEXTS = [text.replace("\n", " / ") for text in some_texts(300)]
TABLE = pa.table({"id": range(300), "text": TEXTS, "score": [i / 10 for i in range(300)]})


def csv_bytes(delimiter: str) -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter).writerows([TABLE.column_names, *(row.values() for row in TABLE.to_pylist())])
    return out.getvalue().encode()


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write_ipc(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_stream(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table, max_chunksize=70)


def two_frames(data: bytes) -> bytes:
    return zstandard.compress(data[: len(data) // 2]) + zstandard.compress(data[len(data) // 2 :])


WRITERS: dict[str, Any] = {
    "a.parquet": lambda path: pq.write_table(TABLE, path, row_group_size=90),
    "a.feather": lambda path: feather.write_feather(TABLE, path, chunksize=80),
    "a.arrow": lambda path: write_ipc(path, TABLE),
    "saved": lambda path: Dataset(TABLE).save_to_disk(path, num_shards=1),
    "several": lambda path: DatasetDict({"train": Dataset(TABLE), "test": Dataset(TABLE)}).save_to_disk(path),
    "a.csv": lambda path: path.write_bytes(csv_bytes(",")),
    "a.tsv.zst": lambda path: path.write_bytes(two_frames(csv_bytes("\t"))),
    "a.jsonl": lambda path: path.write_bytes(lines(TABLE.to_pylist())),
    "a.jsonl.gz": lambda path: path.write_bytes(two_members()),
    "a.txt": lambda path: path.write_bytes("".join(f"{text}\n" for text in TEXTS).encode()),
}


def two_members() -> bytes:
    rows = TABLE.to_pylist()
    return gzip.compress(lines(rows[:100])) + gzip.compress(lines(rows[100:]))


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_input_is_the_same_corpus(tmp_path: Path, tiny_tokenizer: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    split = {"dataset_split": "train"} if name == "several" else {}
    keep = {} if name == "a.txt" else {"keep_columns": ("score",)}
    build_here(tmp_path / name, tmp_path / "out", tiny_tokenizer, no_shuffle=True, **split, **keep)
    assert texts_of(tmp_path / "out") == TEXTS
    (rows,) = rows_of(tmp_path / "out").values()
    assert {Path(row["source_file"]).name for row in rows} == {
        {"saved": "data-00000-of-00001.arrow", "several": "data-00000-of-00001.arrow"}.get(name, name)
    }
    if "jsonl" not in name and not name.endswith("txt"):
        assert [row["row"] for row in rows] == list(range(300))
    if name != "a.txt":
        assert [float(row["score"]) for row in rows] == TABLE["score"].to_pylist()
    plan = json.loads((tmp_path / "out/build/plan.json").read_bytes())
    assert len(plan["inputs"]) == 1


def test_a_folder_of_many_kinds_with_one_worker_and_with_two(tmp_path: Path, tiny_tokenizer: Path) -> None:
    raw = tmp_path / "raw"
    for name, writer in WRITERS.items():
        if name != "several":
            (raw / name).parent.mkdir(exist_ok=True)
            writer(raw / name)
    (raw / "README.md").touch()
    runs = [
        run_build(raw, tmp_path / f"out{n}", tiny_tokenizer, num_workers=n, engine="hf", shuffle_block_tokens=500)
        for n in (1, 2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert all(run.stderr.count("passed over 1 note or hidden file") == 1 for run in runs)
    assert same_corpus(tmp_path / "out1", tmp_path / "out2")
    assert sorted(texts_of(tmp_path / "out1")) == sorted(TEXTS * (len(WRITERS) - 1))


DAMAGE: dict[str, tuple[Any, str, int, str]] = {
    "a.parquet": (lambda data: data[:-100], "no readable parquet", 0, "corrupt"),
    "a.arrow": (lambda data: data[:-100], "no readable Arrow file", 0, "corrupt"),
    "a.csv": (lambda data: data + b'1,"open', r"row 300 \(line 302\)", 300, "malformed_csv"),
    "a.tsv.zst": (lambda data: data[:-40], "the zstd stream ends", 150, "truncated"),
    "a.jsonl.gz": (lambda data: data[:-40], "the gzip stream ends", 100, "truncated"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_or_counted_under_the_users_policy(tmp_path: Path, tiny_tokenizer: Path, name: str) -> None:
    damage, message, at_least, reason = DAMAGE[name]
    raw = tmp_path / "raw"
    raw.mkdir()
    WRITERS["a.txt"](raw / "b.txt")
    WRITERS[name](raw / name)
    (raw / name).write_bytes(damage((raw / name).read_bytes()))
    with pytest.raises(InputError, match=message) as caught:
        build_here(raw, tmp_path / "out", tiny_tokenizer)
    assert name in str(caught.value)
    manifest = build_here(raw, tmp_path / "skipped", tiny_tokenizer, on_error="skip")
    assert manifest.rejects == {reason: 1}
    assert 300 + at_least <= manifest.splits["train"].num_documents <= 600
    (samples,) = (path.read_text() for path in (tmp_path / "skipped/rejects").iterdir())
    assert name in samples


def test_a_server_and_a_disk_give_the_same_corpus(tmp_path: Path, tiny_tokenizer: Path) -> None:
    """In real processes: the threads of a store's client and the forking of workers stay out of each other's way."""
    pytest.importorskip("aiohttp")
    names = ["a.parquet", "a.feather", "a.jsonl.gz", "a.csv"]
    for name in names:
        (tmp_path / "raw").mkdir(exist_ok=True)
        WRITERS[name](tmp_path / "raw" / name)
    with FileServer(tmp_path / "raw") as server:
        (tmp_path / "list").write_text("".join(f"{server.url}/{name}\n" for name in names))
        options = {"engine": "hf", "val_fraction": 0.1}
        run = run_build(f"@{tmp_path}/list", tmp_path / "far", tiny_tokenizer, env=environment(NO_PROXY="*"), **options)
        assert run.returncode == 0, run.stderr
        (tmp_path / "list").write_text("".join(f"{tmp_path}/raw/{name}\n" for name in names))
        build_here(f"@{tmp_path}/list", tmp_path / "near", tiny_tokenizer, **options)
        assert files_of(tmp_path / "far") == files_of(tmp_path / "near")
        plan = json.loads((tmp_path / "far/build/plan.json").read_bytes())
        assert all(entry["etag"] and entry["path"].startswith(server.url) for entry in plan["inputs"])
        again = run_build(f"@{tmp_path}/list", tmp_path / "far", tiny_tokenizer, **options)
        assert "other options or inputs" in again.stderr


CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: sample/*/*.parquet
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*.parquet
---
"""


def test_a_hub_dataset_is_read_where_it_lies(tmp_path: Path, tiny_tokenizer: Path) -> None:
    repo = tmp_path / "repo"
    for name in ("sample/10BT/part-2", "sample/10BT/part-10", "sample/100BT/part-1"):
        path = repo / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": [f"{name} {text}" for text in TEXTS]}), path, row_group_size=50)
    (repo / "README.md").write_text(CARD)
    with HubServer(repo, "Org/web-edu") as server:
        env = environment(HF_ENDPOINT=server.url, HF_HOME=str(tmp_path / "home"), NO_PROXY="*", HF_HUB_OFFLINE="0")
        options = {"dataset_name": "sample-10BT", "dataset_split": "train", "engine": "hf", "no_shuffle": True}
        source = f"/datasets/Org/web-edu/resolve/{server.commit}/sample/10BT/part-2.parquet"
        server.failures[source] = 2
        run = run_build("Org/web-edu", tmp_path / "out", tiny_tokenizer, env=env, **options)
        assert run.returncode == 0, run.stderr
        assert server.failures[source] == 0
        asked = [(path, part) for method, path, part in server.requests if method == "GET" and "parquet" in path]
        assert asked
        assert all(part for _, part in asked)
        assert texts_of(tmp_path / "out") == [f"sample/10BT/part-{n} {text}" for n in (2, 10) for text in TEXTS]
        sources = {row["source_file"] for rows in rows_of(tmp_path / "out").values() for row in rows}
        assert sources == {f"hf://datasets/Org/web-edu@{server.commit}/sample/10BT/part-{n}.parquet" for n in (2, 10)}
        assert not list(tmp_path.rglob("*.arrow"))
        told = subprocess.run(
            [sys.executable, "-c", FIND], env=env, capture_output=True, text=True, timeout=120
        ).stdout.splitlines()
    assert [line.split()[0] for line in told] == ["InputError", "InputError", "UsageError", "3"]
    assert "'sample-1T' not found" in told[0]
    assert "no such split" in told[1]
    assert "got test; expected train" in told[1]
    assert "no hub dataset of that name" in told[2]


FIND = """
from flame.preprocess.inputs import find_inputs
for dataset, options in (
    ("Org/web-edu", {"name": "sample-1T"}),
    ("Org/web-edu", {"split": "test"}),
    ("Org/none", {}),
    ("hf://datasets/Org/web-edu/sample/**/*.parquet", {}),
):
    try:
        print(len(find_inputs([dataset], data_dir=None, data_files=(), **options)))
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_offline_no_hub_is_asked_and_a_path_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for options in ({}, {"name": "sample-10BT"}):
        with pytest.raises(InputError, match=r"no file or folder Org/web.*HF_HUB_OFFLINE"):
            find_inputs(["Org/web"], data_dir=None, data_files=(), **options)
    path = tmp_path / "Org/web/a.jsonl"
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.setattr(hub, "hub_files", pytest.fail)
    assert [file.path for file in find_inputs(["Org/web"], data_dir=None, data_files=())] == ["Org/web/a.jsonl"]


# ---- large ones

READ = """
import json, resource, sys
import pyarrow as pa
from flame.preprocess.inputs import find_inputs
from flame.preprocess.plan import cut_file
from flame.preprocess.readers.formats import read_piece
from flame.preprocess.rejects import Rejects
from flame.preprocess.scan import scan_inputs

options = {"text_columns": ("text",), "keep_columns": (), "limit_documents": None, "limit_bytes": None}
(file,), columns = scan_inputs(
    find_inputs(sys.argv[1:], data_dir=None, data_files=()), on_error="fail", **options
)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows, sizes = [], []
for piece in cut_file(file, 2**25):
    for documents in read_piece(piece, columns, Rejects(on_error="fail")):
        rows += documents.rows.tolist()
        sizes += documents.num_bytes.tolist()
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"rows": rows, "sizes": sizes, "grown_bytes": 1024 * grown}))
"""


def read_apart(path: Path) -> Any:
    run = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, timeout=120, env=environment()
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_a_row_group_beyond_2_gib_is_read_in_bounded_memory(tmp_path: Path, kind: pa.DataType) -> None:
    part = pa.array(["x" * 2**20 + str(i) for i in range(50)], kind)
    table = pa.table({"text": pa.chunked_array([part] * 42)})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema, use_dictionary=False, compression="zstd") as writer:
        writer.write_table(table, row_group_size=2**20)
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 1
    found = read_apart(tmp_path / "a.parquet")
    assert found["rows"] == list(range(2100))
    assert sum(found["sizes"]) == 42 * sum(len(text) for text in part.to_pylist()) > 2**31
    assert found["grown_bytes"] < 2**28


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.txt"])
def test_a_line_of_100_mb_is_read_among_small_ones(tmp_path: Path, name: str) -> None:
    long = b"long " * (20 * 2**20)
    lines = {
        "jsonl": (b'{"text": "%b"}\n', b""),
        "csv": (b'"%b"\n', b"text\n"),
        "txt": (b"%b\n", b""),
    }
    line, head = lines[name.removesuffix(".gz").partition(".")[2]]
    data = head + b"".join(line % text for text in (b"one", long, b"two", b"three"))
    (tmp_path / name).write_bytes(gzip.compress(data, 1) if name.endswith(".gz") else data)
    found = read_apart(tmp_path / name)
    assert found["sizes"] == [3, len(long), 3, 5]
    assert found["grown_bytes"] < 6 * len(long)


def test_files_that_differ_in_all_but_the_text(tmp_path: Path, tiny_tokenizer: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    pq.write_table(pa.table({"text": ["one"], "score": [1]}), raw / "1.parquet")
    pq.write_table(pa.table({"score": ["high"], "text": pa.array(["two"], pa.large_string())}), raw / "2.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), raw / "3.parquet")
    feather.write_feather(pa.table({"n": [[1]], "text": pa.array(["three"], pa.string_view())}), raw / "4.arrow")
    feather.write_feather(pa.table({"text": pa.array([], pa.large_string())}), raw / "5.feather")
    (raw / "6.csv").write_text("url,text\n")
    (raw / "7.csv").write_text("")
    (raw / "8.csv").write_text("text,url\nfour,u\n")
    (raw / "9.jsonl").write_text("\n")
    with pa.ipc.new_stream(raw / "10.arrow", pa.schema([("text", pa.string())])):
        pass
    pq.ParquetWriter(raw / "11.parquet", pa.schema([("text", pa.string())])).close()
    build_here(raw, tmp_path / "out", tiny_tokenizer, no_shuffle=True)
    assert texts_of(tmp_path / "out") == ["one", "two", "three", "four"]
    for path in ("1.parquet", "2.parquet", "4.arrow", "8.csv"):
        (raw / path).unlink()
    with pytest.raises(FlameError, match="no document"):
        build_here(raw, tmp_path / "empty", tiny_tokenizer)
