"""What a build keeps for its own later steps, each file so that damage to it is seen where it is read.

A flipped digit in a receipt or a plan would otherwise be believed, and sealed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from flame.errors import CorpusError
from flame.files import canonical_json, write_json

_KEY = "checksum"


def checksum_of(data: bytes | memoryview) -> str:
    """Return `xxh3:` and 32 hex digits."""
    return f"xxh3:{xxhash.xxh3_128_hexdigest(data)}"


def write_record(path: Path, value: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Write an object as JSON, and with it the checksum of the rest."""
    write_json(path, with_checksum(value), indent=indent)


def with_checksum(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object that `write_record` writes."""
    return {**value, _KEY: checksum_of(canonical_json(value))}


def read_record(path: Path) -> dict[str, Any]:
    """Return the object that `write_record` wrote; `ValueError` where it is another."""
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise TypeError("it is no JSON object")
    check_record(value)
    return value


def check_record(value: dict[str, Any]) -> None:
    """Take the checksum off an object that was read; `ValueError` where it is not the object's."""
    expected = value.pop(_KEY, None)
    if checksum_of(canonical_json(value)) != expected:
        raise ValueError("its content was changed after it was written")


@contextmanager
def intact(path: Path, *, fix: str) -> Iterator[None]:
    """Raise `CorpusError` where a file of the build, read and taken apart within, is not what a build wrote."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, got=f"{type(error).__name__}: {error}", fix=fix) from error


def damaged(path: Path, *, got: str, fix: str) -> CorpusError:
    """Return the error for a file of the build that is not what a build wrote."""
    return CorpusError("a file that the build keeps in its folder is damaged", where=path, got=got, fix=fix)
