"""Candidate texts to documents: one policy for every format, as Arrow arrays so that no text becomes Python twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from flame.errors import InputError
from flame.preprocess.rejects import Rejects

BATCH_DOCUMENTS = 1024
BATCH_BYTES = 8 * 2**20
MAX_DOCUMENT_BYTES = 2**32 - 1
LIST_SEPARATOR = "\n"  # between the strings of a text that is a list of them
# The first bytes of every character that str.isspace() knows: ASCII, U+0085 and U+00A0, U+1680, U+2000…205F, U+3000.
_SPACE_STARTS = np.zeros(256, dtype=bool)
_SPACE_STARTS[[*range(9, 14), *range(28, 33), 0xC2, 0xE1, 0xE2, 0xE3]] = True


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Some documents of one file, in its order: every text is valid UTF-8 and not blank.

    `texts` is a large_string array without nulls, `rows` uint64 (row or byte offset in the file), `num_bytes` int64,
    `kept` the kept columns or None; `progress_bytes` is the input read for them, refused rows included.
    """

    path: str
    texts: pa.LargeStringArray
    rows: NDArray[np.uint64]
    num_bytes: NDArray[np.int64]
    kept: pa.Table | None
    progress_bytes: int

    def __len__(self) -> int:
        return len(self.rows)


def make_documents(
    texts: pa.LargeStringArray,
    rows: NDArray[np.uint64],
    kept: pa.Table | None,
    rejects: Rejects,
    *,
    path: str,
    progress_bytes: int,
) -> Documents:
    """Return what is a document among candidates, counting null, empty and whitespace-only ones in `rejects`."""
    lengths = text_lengths(texts)
    null = np.asarray(texts.is_null()) if texts.null_count else np.zeros(len(texts), dtype=bool)
    empty = ~null & (lengths == 0)
    blank = _blank(texts, ~null & ~empty)
    for reason, mask in (("null", null), ("empty", empty), ("whitespace", blank)):
        rejects.count(reason, int(np.count_nonzero(mask)))
    keep = ~(null | empty | blank)
    if not keep.all():
        mask = pa.array(keep)
        texts, rows, lengths = texts.filter(mask), rows[keep], lengths[keep]
        kept = kept.filter(mask) if kept is not None else None
    if len(lengths) and lengths.max() > MAX_DOCUMENT_BYTES:
        raise InputError(
            "a document is too large",
            where=f"{path}, row {rows[int(lengths.argmax())]}",
            got=f"{lengths.max()} bytes",
            expected=f"at most {MAX_DOCUMENT_BYTES} bytes",
            fix="Cut it into several documents",
        )
    return Documents(path=path, texts=texts, rows=rows, num_bytes=lengths, kept=kept, progress_bytes=progress_bytes)


def text_offsets(texts: pa.LargeStringArray) -> NDArray[np.int64]:
    """Return the `len(texts) + 1` offsets of the texts in `text_data(texts)`."""
    buffer = texts.buffers()[1]
    if buffer is None or len(texts) == 0:
        return np.zeros(len(texts) + 1, dtype=np.int64)
    return np.frombuffer(buffer, dtype=np.int64, count=len(texts) + 1, offset=8 * texts.offset)


def text_lengths(texts: pa.LargeStringArray) -> NDArray[np.int64]:
    """Return each text's length in bytes of UTF-8."""
    return np.diff(text_offsets(texts))


def text_data(texts: pa.LargeStringArray) -> memoryview:
    """Return the bytes that `text_offsets` point into, without a copy."""
    buffer = texts.buffers()[2]
    return memoryview(b"" if buffer is None else buffer)


def _blank(texts: pa.LargeStringArray, candidates: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which of `candidates` (texts with at least a byte) hold only what `str.isspace` calls space."""
    blank = np.zeros(len(texts), dtype=bool)
    indices = np.flatnonzero(candidates)
    if len(indices):
        data = np.frombuffer(text_data(texts), dtype=np.uint8)
        suspects = indices[_SPACE_STARTS[data[text_offsets(texts)[indices]]]]
        for index in suspects.tolist():
            blank[index] = texts[index].as_py().isspace()
    return blank


def tokenizer_batches(documents: Documents, batch_size: int, batch_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `batch_size` documents and `batch_bytes` of text, never less than one document."""
    ends = np.cumsum(documents.num_bytes)
    start = 0
    while start < len(documents):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + batch_bytes, side="right"))
        stop = min(max(stop, start + 1), start + batch_size)
        yield start, stop
        start = stop


def utf8_texts(
    values: pa.Array, rows: NDArray[np.uint64], rejects: Rejects, *, path: str
) -> tuple[pa.LargeStringArray, NDArray[np.bool_] | None]:
    """Return an array of texts as valid large_string, and which rows are left (None: all of them).

    `values` are strings or bytes, or lists of them, which are joined by line breaks without their nulls. Lone
    surrogates become U+FFFD and are counted; a row that is no UTF-8 otherwise is malformed.
    """
    binary = large_binary(values)
    texts = binary.view(pa.large_string())
    try:
        texts.validate(full=True)
        return texts, None
    except pa.ArrowInvalid:
        pass
    keep = np.ones(len(values), dtype=bool)
    repaired: list[str | None] = []
    for index, value in enumerate(binary.to_pylist()):
        text = None if value is None else decode_utf8(value, rejects)
        if text is None and value is not None:
            rejects.malformed(
                "invalid_utf8",
                "a text is no valid UTF-8",
                path=path,
                row=int(rows[index]),
                place=lambda row=int(rows[index]): f"row {row}",  # type: ignore[misc]
                sample=value,
            )
            keep[index] = False
        repaired.append(text)
    texts = pa.array([text for text, kept in zip(repaired, keep, strict=True) if kept], pa.large_string())
    return texts, keep


def large_binary(values: pa.Array) -> pa.LargeBinaryArray:
    """Return the bytes of texts of any type that `is_text_type` knows, one value a text."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if not is_list_type(values.type):
        return values.cast(pa.large_binary())
    parts = large_binary(values.flatten())  # what null lists hide is not among them
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy().astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    if parts.null_count:
        valid = np.asarray(parts.is_valid())
        ends = np.concatenate([[0], np.cumsum(valid)])[ends]
        parts = parts.drop_null()
    lists = pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), parts)
    joined = pc.binary_join(lists, pa.scalar(LIST_SEPARATOR.encode(), pa.large_binary()))
    return joined if values.null_count == 0 else pc.if_else(values.is_valid(), joined, None)


def is_list_type(kind: pa.DataType) -> bool:
    """Whether a type is one of Arrow's lists."""
    tests = (
        pa.types.is_list,
        pa.types.is_large_list,
        pa.types.is_fixed_size_list,
        pa.types.is_list_view,
        pa.types.is_large_list_view,
    )
    return any(test(kind) for test in tests)


def decode_utf8(value: bytes, rejects: Rejects) -> str | None:
    """Return the text, its lone surrogates replaced by U+FFFD and counted; None where it is no UTF-8."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        pass
    try:
        return replace_surrogates(value.decode("utf-8", "surrogatepass"), rejects)
    except UnicodeDecodeError:
        return None


def replace_surrogates(text: str, rejects: Rejects | None) -> str:
    """Return a text that holds lone surrogates with U+FFFD in their place; counted unless `rejects` is None."""
    if rejects is not None:
        rejects.repaired["lone_surrogates"] += 1
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def text_hash(text: memoryview | bytes) -> int:
    """Return the xxh3-64 of a text's UTF-8: what decides on which side of a held-out split it falls."""
    return xxhash.xxh3_64_intdigest(text)
