"""What a build learns of its inputs before it plans: columns, types, limits."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flame.errors import InputError
from flame.preprocess.inputs import find_inputs
from flame.preprocess.plan import InputFile
from flame.preprocess.readers.columns import Columns
from flame.preprocess.scan import scan_inputs
from tests.builds import write_jsonl, write_parquet


def scan(folder: Path, **options: Any) -> tuple[tuple[InputFile, ...], Columns]:
    chosen = {
        "text_columns": ("text", "content"),
        "keep_columns": (),
        "limit_documents": None,
        "limit_bytes": None,
        "on_error": "fail",
        **options,
    }
    return scan_inputs(find_inputs([str(folder)], data_dir=None, data_files=()), **chosen)


def test_files_are_described(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["x" * 100] * 25, rows_a_group=10)
    write_jsonl(tmp_path / "b.jsonl", ["x"])
    (parquet, jsonl), columns = scan(tmp_path)
    assert columns.text == "text"
    assert [rows for rows, _ in parquet.groups] == [10, 10, 5]
    assert (parquet.num_rows, jsonl.num_rows) == (25, None)
    assert jsonl.text_bytes == jsonl.size_bytes == (tmp_path / "b.jsonl").stat().st_size


def test_content_is_the_second_choice(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "x"}\n{"content": "x", "text": "y"}\n')
    assert scan(tmp_path)[1].text == "text"
    (tmp_path / "a.jsonl").write_text('\nno json\n{"content": "x"}\n')
    assert scan(tmp_path)[1].text == "content"
    pq.write_table(pa.table({"content": ["x"]}), tmp_path / "b.parquet")
    assert scan(tmp_path)[1].text == "content"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_an_absent_column_is_told_with_those_there_are(tmp_path: Path, name: str) -> None:
    if name.endswith("parquet"):
        pq.write_table(pa.table({"body": ["x"], "url": ["y"]}), tmp_path / name)
    else:
        data = b'{"body": "x", "url": "y"}\n'
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    with pytest.raises(InputError, match=r"'text' or 'content'.*a\.\w+.*body, url.*--text_column"):
        scan(tmp_path)
    with pytest.raises(InputError, match=r"'body.text'"):
        scan(tmp_path, text_columns=("body.text",))
    assert scan(tmp_path, text_columns=("body",))[1].text == "body"


def test_every_parquet_file_must_have_the_column_as_text(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["x"])
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"b\.parquet"):
        scan(tmp_path)
    pq.write_table(pa.table({"text": [1]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"holds no text.*int64"):
        scan(tmp_path)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match=r"no readable parquet.*b\.parquet"):
        scan(tmp_path)


def test_missing_in_one_of_many_lines_is_no_absent_column(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"other": 1}\n')
    write_jsonl(tmp_path / "b.jsonl", ["x"])
    assert scan(tmp_path)[1].text == "text"


def test_kept_columns_get_one_type(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["x"], score=pa.array([1], pa.int32()), url=["u"])
    write_parquet(tmp_path / "b.parquet", ["x"], score=pa.array([1.5], pa.float64()))
    kept = scan(tmp_path, keep_columns=("score", "url"))[1].kept
    assert kept == pa.schema([("score", pa.float64()), ("url", pa.string())])
    with pytest.raises(InputError, match=r"'absent'.*--keep_columns"):
        scan(tmp_path, keep_columns=("absent",))
    write_parquet(tmp_path / "c.parquet", ["x"], score=["high"])
    with pytest.raises(InputError, match=r"disagree.*'score'"):
        scan(tmp_path, keep_columns=("score",))
    (tmp_path / "c.parquet").unlink()
    write_jsonl(tmp_path / "c.jsonl", ["x"])
    assert scan(tmp_path, keep_columns=("score",))[1].kept == pa.schema([("score", pa.string())])


def stops(folder: Path, **limits: int) -> list[tuple[str, int | None, int | None]]:
    return [(Path(file.path).name, file.num_rows, file.stop) for file in scan(folder, **limits)[0]]


def test_a_limit_takes_the_first_of_the_input(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [f"{i:010}" for i in range(25)], rows_a_group=10)
    line = json.dumps({"text": "y" * 20}).encode() + b"\n"
    (tmp_path / "b.jsonl").write_bytes(b"\n" + line * 5)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(line * 5))
    assert stops(tmp_path, limit_documents=13) == [("a.parquet", 13, 13)]
    assert stops(tmp_path, limit_documents=25) == [("a.parquet", 25, 25)]
    assert stops(tmp_path, limit_documents=27)[1:] == [("b.jsonl", None, 1 + 2 * len(line))]
    assert stops(tmp_path, limit_documents=33)[2:] == [("c.jsonl.gz", None, 3 * len(line))]
    assert [stop for _, _, stop in stops(tmp_path, limit_documents=99)] == [None, None, None]
    assert stops(tmp_path, limit_bytes=95) == [("a.parquet", 10, 10)]
    assert stops(tmp_path, limit_bytes=5) == [("a.parquet", 1, 1)]
    (tmp_path / "a.parquet").unlink()
    assert stops(tmp_path, limit_bytes=2 * len(line) - 2) == [("b.jsonl", None, 1 + 2 * len(line))]
