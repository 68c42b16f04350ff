"""Readers of tables, which are parquet, arrow and csv: every row once and in order, damage told or counted."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import zstandard
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from flame.errors import InputError
from flame.preprocess.plan import COMPRESSION_RATIO, Piece
from flame.preprocess.readers import stream
from flame.preprocess.readers.arrow import read_layout
from flame.preprocess.readers.columns import Columns
from flame.preprocess.readers.formats import read_piece
from flame.preprocess.readers.parquet import open_parquet
from flame.preprocess.rejects import Rejects
from tests.reading import input_file, pieces_of, read

# ---- parquet


def test_nested_columns_of_parquet(tmp_path: Path) -> None:
    docs = pa.array([{"text": "one", "n": 1}, None, {"text": None, "n": 2}, {"text": "two", "n": 3}])
    pq.write_table(pa.table({"other": [1, 2, 3, 4], "doc": docs}), tmp_path / "a.parquet")
    status = (tmp_path / "a.parquet").stat()
    piece = Piece(
        path=str(tmp_path / "a.parquet"),
        format="parquet",
        compression=None,
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        start=0,
        stop=1,
        num_bytes=1,
    )
    columns = Columns(text="doc.text", kept=pa.schema([("doc.n", pa.int64()), ("absent", pa.string())]))
    rejects = Rejects(on_error="fail")
    (batch,) = read_piece(piece, columns, rejects)
    assert batch.texts.to_pylist() == ["one", "two"]
    assert batch.kept.to_pylist() == [{"doc.n": 1, "absent": None}, {"doc.n": 3, "absent": None}]
    assert rejects.counts == {"null": 2}


@given(rows=st.lists(st.integers(0, 9), max_size=8), piece_bytes=st.integers(1, 400))
def test_row_groups_of_any_size_keep_rows_and_order(
    tmp_path_factory: pytest.TempPathFactory, rows: list[int], piece_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("groups") / "a.parquet"
    texts = [f"text {i}" for i in range(sum(rows))]
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())])) as writer:
        for start, count in zip(itertools.accumulate([0, *rows]), rows, strict=False):
            writer.write_table(pa.table({"text": pa.array(texts[start : start + count], pa.string())}))
    found, numbers, _ = read(path, piece_bytes=piece_bytes)
    assert found == texts
    assert numbers == list(range(len(texts)))


def test_a_damaged_page_is_told_or_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"{i} " + "".join(chr(97 + (i * j * j) % 26) for j in range(100)) for i in range(400)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=100, use_dictionary=False, write_page_checksum=True)
    offset = open_parquet(str(path)).metadata.row_group(2).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[offset + 300 : offset + 330] = bytes(30)
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"a\.parquet, in or after row 200"):
        read(path)
    found, _, rejects = read(path, on_error="skip")
    assert found == texts[:200] + texts[300:]
    assert rejects.counts == {"corrupt": 100}


# ---- arrow


def write_arrow(path: Path, table: pa.Table, *, stream: bool, compression: str | None = None, rows: int = 100) -> Path:
    options = pa.ipc.IpcWriteOptions(compression=compression, emit_dictionary_deltas=stream)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(path, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "file"])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_arrow_in_every_spelling(tmp_path: Path, stream: bool, compression: str | None) -> None:
    texts = [f"{i} text" if i % 7 else None for i in range(250)]
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int16(), pa.string())):
        table = pa.table({"n": range(250), "text": pa.array(texts, pa.string()).cast(kind), "list": [["x"]] * 250})
        path = write_arrow(tmp_path / "a.arrow", table, stream=stream, compression=compression)
        assert [rows for rows, _ in input_file(path).groups] == [100, 100, 50]
        for piece_bytes in (1, 2**25):
            found, numbers, rejects = read(path, piece_bytes=piece_bytes)
            assert found == [text for text in texts if text is not None]
            assert numbers == [i for i in range(250) if i % 7]
            assert rejects.counts == {"null": 36}


def test_a_dictionary_that_grows_or_is_replaced_is_followed(tmp_path: Path) -> None:
    texts = [f"text {i // 3}" for i in range(60)]
    chunks = [pa.array(texts[start : start + 20]).dictionary_encode() for start in (0, 20, 40)]
    schema = pa.schema([("text", chunks[0].type)])
    with pa.ipc.new_stream(tmp_path / "a.arrow", schema) as writer:
        for chunk in chunks:
            writer.write_batch(pa.record_batch([chunk], schema=schema))
    assert read(tmp_path / "a.arrow", piece_bytes=1)[0] == texts


def test_feather_and_saved_datasets_are_arrow(tmp_path: Path) -> None:
    table = pa.table({"text": [f"{i}" for i in range(50)]})
    for compression in ("lz4", "zstd", "uncompressed"):
        feather.write_feather(table, tmp_path / "a.feather", compression=compression, chunksize=20)
        assert read(tmp_path / "a.feather")[:2] == (table["text"].to_pylist(), list(range(50)))
    Dataset(table).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    assert read(file)[0] == table["text"].to_pylist()
    (tmp_path / "old.feather").write_bytes(b"FEA1\0\0\0\0 no stream of messages")
    with pytest.raises(InputError, match=r"Feather's first version.*old\.feather.*write_feather"):
        input_file(tmp_path / "old.feather")


@given(rows=st.lists(st.integers(0, 9), max_size=8), piece_bytes=st.integers(1, 3000), stream=st.booleans())
def test_record_batches_of_any_size_keep_rows_and_order(
    tmp_path_factory: pytest.TempPathFactory, rows: list[int], piece_bytes: int, stream: bool
) -> None:
    path = tmp_path_factory.mktemp("batches") / "a.arrow"
    texts = [f"text {i}" for i in range(sum(rows))]
    schema = pa.schema([("text", pa.string())])
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(path, schema) as writer:
        for start, count in zip(itertools.accumulate([0, *rows]), rows, strict=False):
            writer.write_batch(pa.record_batch([pa.array(texts[start : start + count], pa.string())], schema=schema))
    found, numbers, _ = read(path, piece_bytes=piece_bytes)
    assert found == texts
    assert numbers == list(range(len(texts)))


@pytest.mark.parametrize("share", [0, 0.01, 0.3, 0.6, 0.999])
def test_a_cut_arrow_file_is_told(tmp_path: Path, share: float) -> None:
    table = pa.table({"text": [f"{i} text" for i in range(1000)]})
    path = write_arrow(tmp_path / "a.arrow", table, stream=True)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(InputError, match=r"no readable Arrow file.*a\.arrow.*Fetch or write it again"):
        input_file(path)


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_a_damaged_record_batch_is_told_or_counted(tmp_path: Path, compression: str | None) -> None:
    texts = [f"{i} " + "words " * 20 for i in range(400)]
    path = write_arrow(tmp_path / "a.arrow", pa.table({"text": texts}), stream=False, compression=compression)
    batch = read_layout(str(path)).batches[2]
    data = bytearray(path.read_bytes())
    body = batch.stop - (batch.size_bytes // (COMPRESSION_RATIO if compression else 1))
    data[body : body + 64] = b"\xff" * 64  # the first offsets, or the head of what is compressed
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"arrow file is damaged.*a\.arrow, in or after row 200"):
        read(path)
    found, numbers, rejects = read(path, on_error="skip")
    assert found == texts[:200] + texts[300:]
    assert numbers == [*range(200), *range(300, 400)]
    assert rejects.counts == {"corrupt": 100}


# ---- csv


def csv_bytes(rows: list[list[str]], **options: Any) -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out, **options).writerows(rows)
    return out.getvalue().encode()


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=12),
    end=st.sampled_from(["\n", "\r\n"]),
    bom=st.booleans(),
    tabs=st.booleans(),
    chunk_bytes=st.integers(1, 50),
)
def test_a_csv_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], end: str, bom: bool, tabs: bool, chunk_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("csv") / ("a.tsv" if tabs else "a.csv")
    rows = [["id", "text", "url"], *([str(i), f"<{text}", "u"] for i, text in enumerate(texts))]
    quoting = csv.QUOTE_ALL if any("\r" in text for text in texts) else csv.QUOTE_MINIMAL
    data = csv_bytes(rows, lineterminator=end, delimiter="\t" if tabs else ",", quoting=quoting)
    path.write_bytes(stream.BOM * bom + data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "CHUNK_BYTES", chunk_bytes)
        assert read(path, piece_bytes=5)[:2] == ([f"<{text}" for text in texts], list(range(len(texts))))


def test_csv_columns_by_name_blank_lines_and_compression(tmp_path: Path) -> None:
    data = b'\n"text",url\n"two\r\nlines",u\n\n"",v\n"say ""hi""",\n'
    columns = Columns(text="text", kept=pa.schema([("url", pa.string()), ("absent", pa.string())]))
    for name, content in {
        "a.csv": data,
        "a.csv.gz": gzip.compress(data),
        "a.csv.zst": zstandard.compress(data),
    }.items():
        (tmp_path / name).write_bytes(content)
        rejects = Rejects(on_error="fail")
        batches = list(read_piece(pieces_of(tmp_path / name)[0], columns, rejects))
        kept = pa.concat_tables([batch.kept for batch in batches]).to_pylist()
        assert [text for batch in batches for text in batch.texts.to_pylist()] == ["two\r\nlines", 'say "hi"']
        assert [row for batch in batches for row in batch.rows.tolist()] == [0, 2]
        assert kept == [{"url": "u", "absent": None}, {"url": "", "absent": None}]
        assert rejects.counts == {"empty": 1}


BAD_ROWS = {
    "too many fields": (b"a,b,c", "malformed_csv", "3 fields under 2 column names"),
    "too few fields": (b"a", "malformed_csv", "1 fields"),
    "a stray quote": (b'"a"b,c', "malformed_csv", "text follows a closing quote"),
    "invalid utf-8": (b"\xff\xfe,u", "invalid_utf8", "no valid UTF-8"),
}


@pytest.mark.parametrize(("line", "reason", "what"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_malformed_row_is_told_with_its_line_or_counted(tmp_path: Path, line: bytes, reason: str, what: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,url\n"one\n\n",u\n' + line + b"\ntwo,\xff\n")
    with pytest.raises(InputError, match=rf"{what}.*a\.csv, row 1 \(line 5\)"):
        read(path)
    texts, rows, rejects = read(path, on_error="skip")
    assert (texts, rows) == (["one\n\n", "two"], [0, 2])
    assert rejects.counts == {reason: 1}
    (sample,) = rejects.samples
    assert (sample["row"], sample["byte"], sample["reason"]) == (1, path.read_bytes().index(line), reason)
    assert what in sample["what"] and sample["sample"] == line.decode(errors="backslashreplace")


def test_a_csv_that_ends_within_quotes_or_is_cut_is_told_or_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text\none\n"two\nthree\n')
    with pytest.raises(
        InputError, match=r"a quote opens in it that no other closes.*a\.csv, row 1 \(line 3\); got \"two three\)"
    ):
        read(path)
    texts, _, rejects = read(path, on_error="skip")
    assert (texts, rejects.counts) == (["one"], {"malformed_csv": 1})
    letters = random.Random(0)
    data = csv_bytes([["text"], *([letters.randbytes(200).hex()] for _ in range(1000))])
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(data)[:60_000])
    with pytest.raises(InputError, match=r"damaged: the gzip stream ends.*in or after row \d+"):
        read(path)
    texts, _, rejects = read(path, on_error="skip")
    assert 0 < len(texts) < 1000
    assert rejects.counts == {"truncated": 1}


def test_an_empty_csv_has_no_documents(tmp_path: Path) -> None:
    for content in (b"", b"\n", b"text\n"):
        (tmp_path / "a.csv").write_bytes(content)
        assert read(tmp_path / "a.csv")[0] == []


def test_raw_surrogates_in_csv_are_repaired(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text\nraw \xed\xa0\x80\n")
    texts, _, rejects = read(tmp_path / "a.csv")
    assert (texts, rejects.repaired) == (["raw \ufffd"], {"lone_surrogates": 1})
