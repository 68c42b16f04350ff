"""Which files a build reads, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest

from flame.errors import UsageError
from flame.preprocess.inputs import FoundFile, find_inputs, natural_key

NAMES = ["part-10.jsonl", "part-2.jsonl", "sub/part-1.jsonl.gz", "sub/part-1.parquet", "a.txt.zst", "part-2b.json"]
ORDERED = ["a.txt.zst", "part-2.jsonl", "part-2b.json", "part-10.jsonl", "sub/part-1.jsonl.gz", "sub/part-1.parquet"]


def touch(folder: Path, names: list[str]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def find(*datasets: object, data_dir: str | None = None, data_files: tuple[str, ...] = ()) -> list[str]:
    return [file.path for file in find_inputs([str(d) for d in datasets], data_dir=data_dir, data_files=data_files)]


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
    assert found[0] == FoundFile(path=str(tmp_path / "a.txt.zst"), format="txt", compression="zstd")


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
        ("HuggingFaceFW/fineweb-edu", "hub dataset"),
        ("s3://bucket/x.parquet", "not available yet"),
        ("x.arrow", "arrow files is not available yet"),
        ("x.parquet.gz", "no reader knows"),
        ("empty", "no file to read"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: str, message: str
) -> None:
    touch(tmp_path, ["x.arrow", "x.parquet.gz", "empty/_SUCCESS"])
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
