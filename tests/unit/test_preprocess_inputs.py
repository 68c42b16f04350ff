"""Which files a build reads, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from flame.errors import InputError, UsageError
from flame.preprocess.file_kinds import FoundFile, natural_key
from flame.preprocess.inputs import find_inputs
from flame.preprocess.storage import FileState

NAMES = ["part-10.jsonl", "part-2.jsonl", "sub/part-1.jsonl.gz", "sub/part-1.parquet", "a.txt.zst", "part-2b.json"]
ORDERED = ["a.txt.zst", "part-2.jsonl", "part-2b.json", "part-10.jsonl", "sub/part-1.jsonl.gz", "sub/part-1.parquet"]


def touch(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def find(*datasets: object, data_dir: str | None = None, data_files: tuple[str, ...] = (), **options: str) -> list[str]:
    found = find_inputs([str(dataset) for dataset in datasets], data_dir=data_dir, data_files=data_files, **options)
    return [file.path for file in found]


@pytest.mark.parametrize("names", [NAMES, NAMES[::-1], sorted(NAMES)])
def test_a_folder_is_read_in_natural_order_however_it_was_filled(tmp_path: Path, names: list[str]) -> None:
    assert find(touch(tmp_path, names)) == [str(tmp_path / name) for name in ORDERED]


def test_formats_and_compressions_are_told_by_name(tmp_path: Path) -> None:
    found = find_inputs([str(touch(tmp_path, NAMES))], data_dir=None, data_files=())
    assert [(file.format, file.compression) for file in found] == [
        ("txt", "zstd"),
        ("jsonl", None),
        ("jsonl", None),
        ("jsonl", None),
        ("jsonl", "gzip"),
        ("parquet", None),
    ]
    state = (tmp_path / "a.txt.zst").stat()
    assert found[0] == FoundFile(
        path=str(tmp_path / "a.txt.zst"),
        format="txt",
        compression="zstd",
        state=FileState(size_bytes=0, mtime_ns=state.st_mtime_ns),
    )


def test_arguments_keep_their_order_and_commas_separate(tmp_path: Path) -> None:
    touch(tmp_path, ["b.jsonl", "a.jsonl", "c,d.jsonl"])
    b, a = tmp_path / "b.jsonl", tmp_path / "a.jsonl"
    assert find(b, a) == find(f"{b},{a}") == [str(b), str(a)]
    assert find(tmp_path / "c,d.jsonl") == [str(tmp_path / "c,d.jsonl")]


def test_patterns(tmp_path: Path) -> None:
    touch(tmp_path, [*NAMES, "notes.docx"])
    assert find(tmp_path / "part-*.jsonl") == [str(tmp_path / "part-2.jsonl"), str(tmp_path / "part-10.jsonl")]
    assert find(f"{tmp_path}/**/*.parquet") == [str(tmp_path / "sub/part-1.parquet")]
    assert find(tmp_path, data_dir="sub", data_files=("*.gz",)) == [str(tmp_path / "sub/part-1.jsonl.gz")]
    assert find("json", data_files=(f"{tmp_path}/part-1*",)) == [str(tmp_path / "part-10.jsonl")]


def test_hidden_files_and_notes_are_passed_over_and_others_are_named(tmp_path: Path) -> None:
    touch(
        tmp_path,
        [
            "a.jsonl",
            "_SUCCESS",
            ".a.jsonl.crc",
            "README.md",
            "LICENSE",
            "dataset_infos.json",
            "_temporary/b.jsonl",
            ".git/x",
        ],
    )
    assert find(tmp_path) == [str(tmp_path / "a.jsonl")]
    touch(tmp_path, ["a.idx"])
    with pytest.raises(UsageError, match=r"a\.idx"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("absent", "no such file"),
        ("absent*.jsonl", "no file matches"),
        ("absent/a.jsonl", "no such file"),
        ("nosuch://bucket/x.parquet", "nothing is known that reads nosuch://"),
        ("x.jsonl.xz", "xz files is not available yet"),
        ("x.parquet.gz", "no reader knows"),
        ("x.arrow.zst", "no reader knows"),
        ("broken.jsonl", "leads to no file"),
        ("links", "leads to no file"),
        ("empty", "no file to read"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: str, message: str
) -> None:
    touch(tmp_path, ["x.jsonl.xz", "x.parquet.gz", "x.arrow.zst", "empty/_SUCCESS", "links/a.jsonl"])
    for name in ("broken.jsonl", "links/broken.jsonl"):
        (tmp_path / name).symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        find(dataset)


def test_a_file_named_twice_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, ["a.jsonl"])
    with pytest.raises(UsageError, match="twice"):
        find(tmp_path, tmp_path / "a.jsonl")


def test_natural_order_compares_folders_before_names() -> None:
    paths = ["x/2/b", "x/10/a", "x/2/a10", "x/2/a9", "x-1/z"]
    assert sorted(paths, key=natural_key) == ["x/2/a9", "x/2/a10", "x/2/b", "x/10/a", "x-1/z"]


# ---- lists of files, notes, folders that `datasets` saved


def test_a_list_names_files_folders_and_patterns_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, ["b.jsonl", "a.jsonl", "sub/part-10.txt", "sub/part-2.txt", "with, comma.jsonl"])
    (tmp_path / "files.txt").write_text("\ufeff# first\r\n\nsub\n  b.jsonl\nwith, comma.jsonl\na*.jsonl\n")
    monkeypatch.chdir(tmp_path)
    ordered = ["sub/part-2.txt", "sub/part-10.txt", "b.jsonl", "with, comma.jsonl", "a.jsonl"]
    assert find("@files.txt") == find(f"@{tmp_path}/files.txt") == ordered
    (tmp_path / "files.txt").write_text("# none\n")
    with pytest.raises(UsageError, match="empty"):
        find("@files.txt")
    with pytest.raises(UsageError, match=r"list of files cannot be read.*absent\.txt.*No such file"):
        find("@absent.txt")


def test_what_is_passed_over_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["_SUCCESS", "README.md", "dataset_infos.json", "x/a.jsonl.lock", ".cache/deep/file", "SHA256SUMS"]
    touch(tmp_path, ["x/a.jsonl", *names])
    assert find(tmp_path) == [str(tmp_path / "x/a.jsonl")]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: passed over 6 notes and hidden files: ")
    assert find(f"{tmp_path}/*") == [str(tmp_path / "x/a.jsonl")]
    assert "5 notes" in capsys.readouterr().err  # a pattern's * matches no hidden name


def test_a_saved_dataset_is_its_own_files_and_not_what_was_cached_beside_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = Dataset.from_dict({"text": ["one", "two", "three"]})
    rows.save_to_disk(tmp_path / "saved", num_shards=2)
    (tmp_path / "saved" / "cache-0123.arrow").touch()
    files = [str(tmp_path / f"saved/data-0000{i}-of-00002.arrow") for i in (0, 1)]
    assert find(tmp_path / "saved") == find(tmp_path) == files
    assert "cache-0123.arrow" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--dataset_split test: these files have no splits"):
        find(tmp_path / "saved", split="test")
    Path(files[1]).unlink()
    with pytest.raises(InputError, match=r"absent.*data-00001-of-00002\.arrow"):
        find(tmp_path / "saved")


def test_of_a_saved_dict_of_datasets_a_split_is_named(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"text": ["one"]})
    DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "both")
    DatasetDict({"only": rows}).save_to_disk(tmp_path / "single")
    file = "data-00000-of-00001.arrow"
    assert find(tmp_path / "both", split="test") == [str(tmp_path / "both/test" / file)]
    assert find(tmp_path / "single") == [str(tmp_path / "single/only" / file)]
    assert find(tmp_path / "both/train") == [str(tmp_path / "both/train" / file)]
    with pytest.raises(InputError, match=r"several splits.*train, test.*--dataset_split train"):
        find(tmp_path / "both")
    with pytest.raises(InputError, match=r"no such split.*got val.*train or test"):
        find(tmp_path / "both", split="val")
    with pytest.raises(UsageError, match=r"several splits.*both.*train, test"):
        find(tmp_path)


def test_a_name_and_a_revision_belong_to_the_hub(tmp_path: Path) -> None:
    touch(tmp_path, ["a.jsonl"])
    for chosen in ({"name": "x"}, {"revision": "main"}):
        with pytest.raises(UsageError, match=r"hub dataset.*these are files"):
            find(tmp_path, **chosen)
