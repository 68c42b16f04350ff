"""Readers: the same documents whatever the spelling of a file, one policy for what is no document."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from flame.errors import InputError
from flame.preprocess.readers import stream
from flame.preprocess.readers.columns import Columns
from flame.preprocess.readers.formats import read_piece
from flame.preprocess.rejects import Rejects
from tests.reading import TEXT, jsonl, pieces_of, read

ODD = ["plain", "a\r\nb", "\ttab", "é\u2028\u2029\x85\x0b\x0c", "ends in cr\r", "🙂", "\x00nul", "﻿bom inside"]


# ---- lines


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data,
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n"),
        lambda data: data.removesuffix(b"\n"),
        lambda data: b"\n\n" + data.replace(b"\n", b"\n \t\r\n\n"),
    ],
    ids=["plain", "bom", "crlf", "both", "no last newline", "blank lines"],
)
def test_the_spelling_of_a_jsonl_changes_no_document(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(change(jsonl(*({"text": text} for text in ODD))))
    texts, rows, rejects = read(path)
    assert texts == ODD
    assert not rejects.counts
    data = path.read_bytes()
    assert [json.loads(data[row:].split(b"\n")[0].removeprefix(stream.BOM))["text"] for row in rows] == ODD


@given(
    lines=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=12),
    piece_bytes=st.integers(1, 60),
    end=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    bom=st.booleans(),
    chunk_bytes=st.integers(1, 50),
)
def test_cutting_a_file_anywhere_reads_each_line_once(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[str],
    piece_bytes: int,
    end: str,
    last: bool,
    bom: bool,
    chunk_bytes: int,
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    data = (end.join(json.dumps({"text": f"<{line}"}, ensure_ascii=False) for line in lines) + end * last).encode()
    path.write_bytes(stream.BOM * bom + data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "CHUNK_BYTES", chunk_bytes)
        texts, rows, _ = read(path, piece_bytes=piece_bytes)
    assert texts == [f"<{line}" for line in lines]
    assert rows == sorted(set(rows))


def test_lines_longer_than_the_chunks_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CHUNK_BYTES", 16)
    monkeypatch.setattr(stream, "COMPRESSED_CHUNK_BYTES", 5)
    texts = ["x" * length for length in (1, 200, 3, 17, 16, 15, 1000)]
    for path in compressed_files(tmp_path, jsonl(*({"text": text} for text in texts))):
        assert read(path, piece_bytes=7)[0] == texts, path


def test_a_txt_line_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufefffirst\r\n\nsecond \r line\n  \nlast".encode())
    texts, rows, rejects = read(path)
    assert texts == ["first", "second \r line", "last"]
    assert rows == [0, 11, 28]
    assert rejects.counts == {"empty": 1, "whitespace": 1}


def compressed_files(folder: Path, data: bytes) -> list[Path]:
    """The data plain, and compressed in the ways that tools write: several members, frames, a skippable frame."""
    half = len(data) // 2
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"skip"
    zstd = zstandard.ZstdCompressor().compress
    files = {
        "a.jsonl": data,
        "one.jsonl.gz": gzip.compress(data),
        "two.jsonl.gz": gzip.compress(data[:half]) + gzip.compress(b"") + gzip.compress(data[half:]),
        "padded.jsonl.gz": gzip.compress(data) + bytes(600),
        "one.jsonl.zst": zstd(data),
        "two.jsonl.zst": zstd(data[:half]) + skippable + zstd(b"") + zstd(data[half:]),
        "unsized.jsonl.zst": zstandard.ZstdCompressor(write_content_size=False).compress(data),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in files]


def test_compression_changes_no_document(tmp_path: Path) -> None:
    values = [{"text": f"{i} " + "words " * (i % 50)} for i in range(3000)]
    plain, *compressed = compressed_files(tmp_path, jsonl(*values))
    expected = read(plain, piece_bytes=5000)
    assert expected[0] == [value["text"] for value in values]
    for path in compressed:
        assert read(path)[:2] == expected[:2], path


@pytest.mark.parametrize(
    "name", ["one.jsonl.gz", "two.jsonl.gz", "one.jsonl.zst", "two.jsonl.zst", "unsized.jsonl.zst"]
)
@pytest.mark.parametrize("share", [0, 0.3, 0.6, 0.99])
def test_a_cut_file_is_told_or_counted(tmp_path: Path, name: str, share: float) -> None:
    letters = random.Random(0)
    texts = [f"{i} " + letters.randbytes(200).hex() for i in range(1000)]
    compressed_files(tmp_path, jsonl(*({"text": text} for text in texts)))
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(InputError, match=rf"damaged.*{name}, line \d+.*--on_error skip"):
        read(path)
    found, _, rejects = read(path, on_error="skip")
    assert found == texts[: len(found)]
    assert len(found) < len(texts)
    assert rejects.counts == {"truncated": 1}
    assert rejects.samples[0]["byte"] == path.stat().st_size
    assert share < 0.9 or len(found) > 0


def test_garbage_after_or_inside_a_stream_is_corrupt(tmp_path: Path) -> None:
    data = jsonl(*({"text": f"text {i}"} for i in range(100)))
    for name, content in {"a.jsonl.gz": gzip.compress(data), "a.jsonl.zst": zstandard.compress(data)}.items():
        path = tmp_path / name
        path.write_bytes(content + b"garbage")
        with pytest.raises(InputError, match="damaged: other bytes follow"):
            read(path)
        texts, _, rejects = read(path, on_error="skip")
        assert len(texts) == 100
        assert (rejects.samples[0]["row"], rejects.samples[0]["byte"]) == (len(data), len(content))
        path.write_bytes(content[:40] + b"\xff\xff\xff" + content[43:])
        with pytest.raises(InputError, match="damaged"):
            read(path)
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"damaged: it holds no (gzip|zstd) data, whatever its name says"):
            read(path)
        (sample,) = read(path, on_error="skip")[2].samples
        assert (sample["row"], sample["byte"], sample["reason"]) == (0, 0, "corrupt")


# ---- policy

REFUSED = {
    "null": {"text": None},
    "empty": {"text": ""},
    "whitespace": {"text": " \t\n\u00a0\u2003\u3000\x85\x1c"},
    "missing": {"other": "x"},
    "not_text": {"text": 3.5},
}


@pytest.mark.parametrize("order", list(itertools.permutations(REFUSED))[::17])
def test_what_is_no_text_is_counted_by_reason_in_any_position(tmp_path: Path, order: tuple[str, ...]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(REFUSED[order[0]], {"text": "kept"}, *(REFUSED[reason] for reason in order[1:])))
    texts, _, rejects = read(path)
    assert texts == ["kept"]
    assert rejects.counts == dict.fromkeys(REFUSED, 1)


def test_null_empty_and_blank_in_parquet(tmp_path: Path) -> None:
    values = [None, "", "a", "\u3000", "\u3042", None, " b "]
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int8(), pa.string())):
        pq.write_table(pa.table({"text": pa.array(values, pa.string()).cast(kind)}), tmp_path / "a.parquet")
        texts, rows, rejects = read(tmp_path / "a.parquet")
        assert texts == ["a", "\u3042", " b "]
        assert rows == [2, 4, 6]
        assert rejects.counts == {"null": 2, "empty": 1, "whitespace": 1}


BAD_LINES = {
    "two objects": (
        b'{"text": "a"} {"text": "b"}',
        "malformed_json",
        "more follows the first value, from character 15 on",
    ),
    "half a line": (b'{"text": "a', "malformed_json", "unterminated string starting at character 10"),
    "a list": (b'["text"]', "malformed_json", "it is an array"),
    "a number": (b"17", "malformed_json", "it is a single value"),
    "no JSON": (b"text", "malformed_json", "expecting value at character 1"),
    "invalid utf-8": (b'{"text": "\xff\xfe"}', "invalid_utf8", "no valid UTF-8"),
    "too deep": (b'{"text": ' + b"[" * 200_000, "malformed_json", "nested too deeply"),
    "a number without end": (b'{"text": ' + b"9" * 5000 + b"}", "malformed_json", ""),
}


@pytest.mark.parametrize(("line", "reason", "what"), BAD_LINES.values(), ids=BAD_LINES.keys())
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_malformed_line_is_told_with_its_number_or_counted(
    tmp_path: Path, line: bytes, reason: str, what: str, suffix: str
) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    before = b'\n{"text": "one"}\r\n\n'
    data = before + line + b"\n" + b'{"text": "two"}\n'
    path.write_bytes(gzip.compress(data) if suffix else data)
    with pytest.raises(InputError, match=rf"{what} \(in .*a\.jsonl(\.gz)?, line 4;"):
        read(path)
    texts, _, rejects = read(path, on_error="skip")
    assert texts == ["one", "two"]
    assert rejects.counts == {reason: 1}
    (sample,) = rejects.samples
    assert (sample["row"], sample["byte"], sample["reason"]) == (len(before), len(before), reason)
    assert what in sample["what"] and line.decode(errors="backslashreplace").startswith(sample["sample"].rstrip("…"))


def test_invalid_utf8_in_parquet_and_txt(tmp_path: Path) -> None:
    values = pa.array([b"one", b"\xff", None, b"two"], pa.binary())
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet, row 1"):
        read(tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_bytes(b"one\n\xff\n\ntwo")
    for name, reason in (("a.parquet", "null"), ("a.txt", "empty")):
        texts, _, rejects = read(tmp_path / name, on_error="skip")
        assert texts == ["one", "two"]
        assert rejects.counts == {"invalid_utf8": 1, reason: 1}


def test_lone_surrogates_become_replacement_characters(tmp_path: Path) -> None:
    lines = [
        rb'{"text": "a\ud800b"}',
        rb'{"text": "\udc00\ud83d\ude00"}',
        b'{"text": "raw \xed\xa0\x80"}',
        b'{"text": "x"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    texts, _, rejects = read(tmp_path / "a.jsonl")
    assert texts == ["a\ufffdb", "\ufffd😀", "raw \ufffd", "x"]
    assert rejects.repaired == {"lone_surrogates": 3}
    assert not rejects.counts
    pq.write_table(pa.table({"text": pa.array([b"x", b"raw \xed\xa0\x80"], pa.binary())}), tmp_path / "a.parquet")
    texts, _, rejects = read(tmp_path / "a.parquet")
    assert texts == ["x", "raw \ufffd"]
    assert rejects.repaired == {"lone_surrogates": 1}


# ---- columns


def test_nested_texts_and_kept_columns(tmp_path: Path) -> None:
    kept = pa.schema([("meta.url", pa.string()), ("score", pa.string())])
    columns = Columns(text="doc.text", kept=kept)
    values = [
        {"doc": {"text": "one"}, "meta": {"url": "u"}, "score": 1.5},
        {"doc": {"text": "two"}, "meta": None, "score": "high"},
        {"doc": None},
        {"doc.text": "literal", "score": ["x", "é"]},
    ]
    (tmp_path / "a.jsonl").write_bytes(jsonl(*values))
    rejects = Rejects(on_error="fail")
    (batch,) = read_piece(pieces_of(tmp_path / "a.jsonl")[0], columns, rejects)
    assert batch.texts.to_pylist() == ["one", "two", "literal"]
    assert batch.kept.to_pylist() == [
        {"meta.url": "u", "score": "1.5"},
        {"meta.url": None, "score": "high"},
        {"meta.url": None, "score": '["x", "é"]'},
    ]
    assert rejects.counts == {"missing": 1}


def test_a_file_that_changed_after_planning_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl({"text": "one"}))
    (piece,) = pieces_of(path)
    path.write_bytes(jsonl({"text": "more"}))
    with pytest.raises(InputError, match="changed"):
        read_piece(piece, TEXT, Rejects(on_error="skip"))
    path.unlink()
    with pytest.raises(InputError, match="gone"):
        read_piece(piece, TEXT, Rejects(on_error="skip"))


# ---- lists of strings

LISTS = [["a", "b"], None, [], ["x", None, "é"], [None], [" "], ["z"]]


def test_the_strings_of_a_list_are_joined_by_line_breaks(tmp_path: Path) -> None:
    kinds = [
        pa.list_(pa.string()),
        pa.large_list(pa.large_string()),
        pa.list_(pa.binary()),
        pa.list_(pa.dictionary(pa.int32(), pa.string())),
    ]
    paths = [tmp_path / "a.jsonl"]
    paths[0].write_bytes(jsonl(*({"text": value} for value in LISTS)))
    for number, kind in enumerate(kinds):
        paths.append(tmp_path / f"{number}.parquet")
        pq.write_table(pa.table({"text": pa.array(LISTS, kind), "other": range(len(LISTS))}), paths[-1])
    for path in paths:
        texts, _, rejects = read(path)
        assert texts == ["a\nb", "x\né", "z"], path
        assert rejects.counts == {"null": 1, "empty": 2, "whitespace": 1}, path
    paths[0].write_bytes(jsonl({"text": ["a", 1]}, {"text": [["a"]]}, {"text": ["b"]}))
    assert (read(paths[0])[0], read(paths[0])[2].counts) == (["b"], {"not_text": 2})
