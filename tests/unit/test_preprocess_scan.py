"""What a build learns of its inputs before it plans: columns, types, limits."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from flame.errors import InputError
from flame.preprocess.inputs import find_inputs
from flame.preprocess.plan import InputFile
from flame.preprocess.readers.columns import Columns
from flame.preprocess.scan import scan_inputs
from flame.preprocess.where_parse import parse_where
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
    (tmp_path / "d.parquet").write_bytes(b"not looked at")
    assert stops(tmp_path, limit_documents=13) == [("a.parquet", 13, 13)]
    (tmp_path / "d.parquet").unlink()
    (tmp_path / "a.parquet").unlink()
    assert stops(tmp_path, limit_bytes=2 * len(line) - 2) == [("b.jsonl", None, 1 + 2 * len(line))]


# ---- arrow, csv, lists


def test_columns_of_every_format_are_found_and_told(tmp_path: Path) -> None:
    table = pa.table({"meta": [{"id": 1, "words": ["x"]}], "body": ["x"], "tags": [["a", "b"]]})
    for name in ("a.parquet", "a.arrow", "a.feather"):
        path = tmp_path / name
        if name == "a.parquet":
            pq.write_table(table, path)
        else:
            feather.write_feather(table, path)
        with pytest.raises(InputError, match=r"'text' or 'content'.*got the columns meta\.id, meta\.words, body, tags"):
            scan(path)
        with pytest.raises(InputError, match=r"'meta\.id' holds no text.*int64; the columns meta\.id, meta\.words"):
            scan(path, text_columns=("meta.id",))
        for column in ("tags", "meta.words", "body"):
            (file,), columns = scan(path, text_columns=(column,))
            assert (columns.text, file.num_rows) == (column, 1)
    (tmp_path / "a.csv").write_text("body,url\nx,u\n")
    with pytest.raises(InputError, match=r"'text' or 'content'.*a\.csv; got the columns body, url"):
        scan(tmp_path / "a.csv")
    assert scan(tmp_path / "a.csv", text_columns=("body",))[1].text == "body"
    (tmp_path / "a.csv").write_text("body,body\nx,u\n")
    with pytest.raises(InputError, match=r"several columns are called 'body'"):
        scan(tmp_path / "a.csv", text_columns=("body",))


def test_a_name_that_several_columns_have_is_refused_where_it_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table([["x"], [1], [2]], names=["text", "n", "n"]), tmp_path / "a.parquet")
    assert scan(tmp_path / "a.parquet")[1].text == "text"
    with pytest.raises(InputError, match=r"several columns are called 'n'.*a\.parquet"):
        scan(tmp_path / "a.parquet", keep_columns=("n",))
    with pytest.raises(InputError, match=r"several columns are called 'n'.*a\.parquet"):
        scan(tmp_path / "a.parquet", where=parse_where("n > 0"))


def test_lists_of_numbers_and_of_lists_are_no_text(tmp_path: Path) -> None:
    for value in ([1], [["a"]]):
        pq.write_table(pa.table({"text": [value]}), tmp_path / "a.parquet")
        with pytest.raises(InputError, match=r"'text' holds no text.*type list<.*strings, or lists of strings"):
            scan(tmp_path)


def test_kept_columns_have_types_that_parquet_has(tmp_path: Path) -> None:
    columns = {
        "text": ["x"],
        "url": pa.array(["u"], pa.string_view()),
        "site": pa.array(["s"]).dictionary_encode(),
        "tags": [["a"]],
    }
    feather.write_feather(pa.table(columns), tmp_path / "a.arrow")
    kept = scan(tmp_path, keep_columns=("url", "site", "tags"))[1].kept
    assert kept == pa.schema([("url", pa.string()), ("site", pa.string()), ("tags", pa.list_(pa.string()))])
    (tmp_path / "b.csv").write_text("text,url\nx,u\n")
    assert scan(tmp_path, keep_columns=("url",))[1].kept == pa.schema([("url", pa.string())])
    with pytest.raises(InputError, match=r"disagree on the type of 'tags'.*list<"):
        scan(tmp_path, keep_columns=("tags",))
    with pytest.raises(InputError, match=r"no file has the column 'absent'.*text, url, site, tags"):
        scan(tmp_path, keep_columns=("absent",))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_json_document_is_refused_with_the_command_to_run(tmp_path: Path, suffix: str) -> None:
    contents = {
        b'\n [{"text": "a"},\n{"text": "b"}]\n': (r"one array", r"jq -c '\.\[\]' > NEW\.jsonl"),
        b'{\n  "text": "a"\n}\n': (r"objects over several lines", r"jq -c \. > NEW\.jsonl"),
    }
    path = tmp_path / f"a.json{suffix}"
    for content, (what, fix) in contents.items():
        path.write_bytes(gzip.compress(content) if suffix else content)
        with pytest.raises(InputError, match=rf"{what}.*a\.json.*{'gzip -dc' if suffix else 'cat'} .*{fix}"):
            scan(tmp_path)
    path.write_bytes(gzip.compress(b'{"text": "a"}\n') if suffix else b'{"text": "a"}\n')
    assert scan(tmp_path)[1].text == "text"


def test_damaged_files_of_every_format_are_told_or_left_to_the_reader(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(b"ARROW1\0\0 no")
    (tmp_path / "b.csv.gz").write_bytes(b"no gzip")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no")
    for name, what in (("a.arrow", "no readable Arrow"), ("b.csv.gz", "no readable csv"), ("c.parquet", "parquet")):
        with pytest.raises(InputError, match=rf"{what}.*{name}"):
            scan(tmp_path / name)
    assert [file.damaged for file in scan(tmp_path, on_error="skip")[0]] == [True] * 3


def test_a_limit_takes_the_first_rows_of_arrow_and_csv(tmp_path: Path) -> None:
    table = pa.table({"text": [f"{i:010}" for i in range(25)], "other": ["x" * 1000] * 25})
    feather.write_feather(table, tmp_path / "a.arrow", chunksize=10, compression="uncompressed")
    (tmp_path / "b.csv").write_text('id,text\n1,"yy\nyy"\n2,zz\n3,\n')
    assert stops(tmp_path, limit_documents=13) == [("a.arrow", 13, 13)]
    assert stops(tmp_path, limit_bytes=125) == [("a.arrow", 13, 13)]
    assert stops(tmp_path, limit_bytes=255) == [("a.arrow", 25, None), ("b.csv", None, 18)]
    assert stops(tmp_path, limit_documents=27)[1:] == [("b.csv", None, 23)]
    assert stops(tmp_path, limit_documents=99)[1:] == [("b.csv", None, None)]
