"""The bytes and names of format version 1, which never change."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest

from flame.errors import CorpusError
from flame.shards.format import (
    DEFAULT_SHARD_TOKENS,
    END_DTYPE,
    HEADER_BYTES,
    TOKEN_DTYPE,
    docs_path,
    ends_path,
    npy_header,
    read_npy_length,
    shard_name,
    tokens_path,
)
from tests.corpora import make_corpus


def test_the_header_is_these_bytes() -> None:
    assert npy_header(TOKEN_DTYPE, 5) == (
        b"\x93NUMPY\x01\x00\x76\x00{'descr': '<u4', 'fortran_order': False, 'shape': (5,), }" + b" " * 60 + b"\n"
    )
    assert npy_header(END_DTYPE, 2**64 - 1) == (
        b"\x93NUMPY\x01\x00\x76\x00{'descr': '<u8', 'fortran_order': False, 'shape': (18446744073709551615,), }"
        + b" " * 41
        + b"\n"
    )


@pytest.mark.parametrize("dtype", [TOKEN_DTYPE, END_DTYPE])
@pytest.mark.parametrize("length", [0, 1, 9, 10, 2**28, 2**32 + 5, 2**63])
def test_numpy_reads_the_header(dtype: np.dtype[np.unsignedinteger], length: int) -> None:
    header = npy_header(dtype, length)
    assert len(header) == HEADER_BYTES
    file = io.BytesIO(header)
    assert np.lib.format.read_magic(file) == (1, 0)
    assert np.lib.format.read_array_header_1_0(file) == ((length,), False, dtype)
    assert file.tell() == HEADER_BYTES


def test_names_and_places() -> None:
    name = shard_name(17, 0)
    assert name == "shard-00017-000"
    corpus = Path("corpora/web")
    assert tokens_path(corpus, "train", name) == Path("corpora/web/train/shard-00017-000.tokens.npy")
    assert ends_path(corpus, "train", name) == Path("corpora/web/train/shard-00017-000.ends.npy")
    assert docs_path(corpus, "train", name) == Path("corpora/web/train/shard-00017-000.docs.parquet")
    assert DEFAULT_SHARD_TOKENS == 268_435_456


def test_length_of_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(npy_header(TOKEN_DTYPE, 3) + bytes(12))
    assert read_npy_length(path, TOKEN_DTYPE) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "an empty file"),
        (npy_header(TOKEN_DTYPE, 3)[:100], "does not begin with a header"),
        (npy_header(TOKEN_DTYPE, 3) + bytes(10), "got 138 bytes; expected 140 bytes"),
        (npy_header(TOKEN_DTYPE, 3) + bytes(13), "got 141 bytes; expected 140 bytes"),
        (npy_header(END_DTYPE, 3) + bytes(24), "does not begin with a header"),
        (npy_header(TOKEN_DTYPE, 3).replace(b"(3,)", b"(-3,)"), "does not begin with a header"),
        (npy_header(TOKEN_DTYPE, 3).replace(b"False", b"True "), "does not begin with a header"),
        (npy_header(TOKEN_DTYPE, 3).replace(b"(3,)", b"((("), "does not begin with a header"),
        (b"PK" + npy_header(TOKEN_DTYPE, 3)[2:] + bytes(12), "does not begin with a header"),
    ],
)
def test_what_is_not_such_a_file_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        read_npy_length(path, TOKEN_DTYPE)
    assert str(path) in str(caught.value)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"is absent.*x\.npy"):
        read_npy_length(tmp_path / "x.npy", TOKEN_DTYPE)


def test_the_page_on_the_format_reads_a_corpus_with_numpy_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "format.md").read_text("utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    assert len(code.splitlines()) == 5 and "flame" not in code
    make_corpus(tmp_path / "corpora" / "web", [[1, 2], [3], [4, 5, 6], [7]])
    monkeypatch.chdir(tmp_path)
    names: dict[str, np.ndarray] = {}
    exec(code, names)
    assert names["third_document"].tolist() == [4, 5, 6, 0]
