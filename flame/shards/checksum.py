"""The checksum of a shard's file, as its writer made it."""

from __future__ import annotations

from pathlib import Path

import xxhash

from flame.shards.format import HEADER_BYTES, unreadable_file

_CHUNK_BYTES = 1 << 22


def payload_checksum(path: Path) -> str:
    """Return `xxh3:` and 32 hex digits: xxh3-128 of what follows the header. Reads the whole file, 4 MiB at a time.

    Raises `CorpusError` for a file that is absent or cannot be read.
    """
    digest = xxhash.xxh3_128()
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(HEADER_BYTES)
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise unreadable_file(path, error) from error
    return f"xxh3:{digest.hexdigest()}"
