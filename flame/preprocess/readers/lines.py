"""Texts of line files: jsonl (an object a line) and txt (a document a line), with the byte offset of each line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from flame.preprocess.plan import Piece
from flame.preprocess.readers.batch import StringBatch
from flame.preprocess.readers.columns import Columns
from flame.preprocess.readers.stream import ByteStream, DamagedStreamError, line_number, lines_between, range_stream
from flame.preprocess.rejects import Rejects
from flame.preprocess.texts import LIST_SEPARATOR, Documents, decode_utf8
from flame.preprocess.where import Where
from flame.preprocess.where_rows import WhereTypeError, keeps_row

MISSING: Any = object()


def read_jsonl(piece: Piece, columns: Columns, rejects: Rejects) -> Iterator[Documents]:
    """Yield the documents of a jsonl piece: objects whose text is a string, or a list of them, and not blank."""
    batch = StringBatch(piece, columns, range_stream(piece.path, piece.compression, piece.start))
    for offset, line in _whole_lines(piece, batch.stream, rejects):
        if not line or line.isspace():
            continue
        value = _parse(line, offset, piece, rejects)
        if value is None:
            continue
        if columns.where is not None and not _is_wanted(columns.where, value, line, offset, piece, rejects):
            continue
        text = lookup(value, columns.text)
        if text is MISSING:
            rejects.count("missing")
            continue
        if isinstance(text, list) and all(part is None or isinstance(part, str) for part in text):
            text = LIST_SEPARATOR.join(part for part in text if part is not None)
        if text is not None and not isinstance(text, str):
            rejects.count("not_text")
        else:
            batch.add(offset, text, [_kept_text(lookup(value, name)) for name in columns.kept_names])
            if batch.is_full:
                yield batch.take(rejects)
    yield batch.take(rejects)


def read_txt(piece: Piece, columns: Columns, rejects: Rejects) -> Iterator[Documents]:
    """Yield the documents of a txt piece: each line is one, blank lines are counted as empty."""
    batch = StringBatch(piece, columns, range_stream(piece.path, piece.compression, piece.start))
    kept: list[str | None] = [None] * len(columns.kept_names)
    for offset, line in _whole_lines(piece, batch.stream, rejects):
        text = decode_utf8(line, rejects)
        if text is None:
            _malformed("invalid_utf8", "a line is no valid UTF-8", line, offset, piece, rejects)
            continue
        batch.add(offset, text, kept)
        if batch.is_full:
            yield batch.take(rejects)
    yield batch.take(rejects)


def lookup(value: dict[str, Any], name: str) -> Any:
    """Return what `name` holds, `a.b` inside the object `a` unless a key is so called; `MISSING` where nothing does."""
    if name in value or "." not in name:
        return value.get(name, MISSING)
    found: Any = value
    for key in name.split("."):
        if not isinstance(found, dict) or key not in found:
            return MISSING
        found = found[key]
    return found


def parse_object(text: str) -> dict[str, Any]:
    """Return the JSON object that a line is; `ValueError` says what else it is."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(_json_words(error)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"it is {'an array' if isinstance(value, list) else 'a single value'}")
    return value


def _json_words(error: json.JSONDecodeError) -> str:
    """Return what is wrong with a line, without the number that the line would have in a text of its own."""
    place = f"character {error.pos + 1}"
    if error.msg == "Extra data":
        return f"more follows the first value, from {place} on"
    what = error.msg.removesuffix(" at")
    return f"{what[:1].lower()}{what[1:]} at {place}"


def _parse(line: bytes, offset: int, piece: Piece, rejects: Rejects) -> dict[str, Any] | None:
    text = decode_utf8(line, rejects)
    if text is None:
        _malformed("invalid_utf8", "a line is no valid UTF-8", line, offset, piece, rejects)
        return None
    try:
        return parse_object(text)
    except ValueError as error:
        _malformed("malformed_json", f"a line is no JSON object: {error}", line, offset, piece, rejects)
        return None


def _is_wanted(where: Where, value: dict[str, Any], line: bytes, offset: int, piece: Piece, rejects: Rejects) -> bool:
    """Whether --where keeps an object; a key that is absent is null, one of another kind is malformed input."""

    def value_of(name: str) -> Any:
        found = lookup(value, name)
        return None if found is MISSING else found

    try:
        wanted = keeps_row(where, value_of)
    except WhereTypeError as error:
        _malformed("where_type", f"--where cannot judge a line: {error}", line, offset, piece, rejects)
        return False
    rejects.count("where", 0 if wanted else 1)
    return wanted


def _kept_text(value: Any) -> str | None:
    if value is MISSING or value is None or isinstance(value, str):
        return None if value is MISSING else value
    return json.dumps(value, ensure_ascii=False)


def _whole_lines(piece: Piece, stream: ByteStream, rejects: Rejects) -> Iterator[tuple[int, bytes]]:
    try:
        yield from lines_between(stream, piece.start, piece.stop)
    except DamagedStreamError as error:
        rejects.malformed(
            error.reason,
            f"a compressed file is damaged: {error}",
            path=piece.path,
            row=stream.produced,
            byte=stream.consumed - error.unread,
            place=lambda: f"line {line_number(piece.path, piece.compression, 2**63)}",
        )


def _malformed(reason: str, what: str, line: bytes, offset: int, piece: Piece, rejects: Rejects) -> None:
    rejects.malformed(
        reason,
        what,
        path=piece.path,
        row=offset,
        byte=offset,
        place=lambda: f"line {line_number(piece.path, piece.compression, offset)}",
        sample=line,
    )
