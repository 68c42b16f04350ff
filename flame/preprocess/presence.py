"""What can be told of a corpus's files without reading them: are they all there, and as long as they were sealed?"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from flame.shards.format import (
    END_DTYPE,
    HEADER_BYTES,
    TOKEN_DTYPE,
    TOKENIZER_FOLDER,
    docs_path,
    ends_path,
    tokens_path,
)
from flame.shards.manifest import Manifest

LOOKING_THREADS = 8  # a network file system answers slowly, and several questions at once


@dataclass(frozen=True, kw_only=True)
class Presence:
    """How many files were looked at, their bytes on disk, and what is wrong: (path inside the corpus, problem)."""

    num_files: int
    size_bytes: int
    problems: tuple[tuple[str, str], ...]


def look_at_files(corpus: Path, manifest: Manifest) -> Presence:
    """Look at every file that the manifest stands for. Cost: a stat a file."""
    wanted: list[tuple[Path, int | None]] = [(corpus / TOKENIZER_FOLDER / "tokenizer.json", None)]
    for name, split in manifest.splits.items():
        for shard in split.shards:
            tokens_bytes = HEADER_BYTES + shard.num_tokens * TOKEN_DTYPE.itemsize
            ends_bytes = HEADER_BYTES + shard.num_documents * END_DTYPE.itemsize
            wanted += [(tokens_path(corpus, name, shard.name), tokens_bytes)]
            wanted += [(ends_path(corpus, name, shard.name), ends_bytes)]
            if manifest.options.get("provenance") is True:
                wanted += [(docs_path(corpus, name, shard.name), None)]
    with ThreadPoolExecutor(LOOKING_THREADS) as pool:
        found = list(pool.map(lambda file: _look(*file), wanted))
    problems = [
        (path.relative_to(corpus).as_posix(), problem)
        for (path, _), (_, problem) in zip(wanted, found, strict=True)
        if problem is not None
    ]
    return Presence(num_files=len(wanted), size_bytes=sum(size for size, _ in found), problems=tuple(problems))


def _look(path: Path, expected_bytes: int | None) -> tuple[int, str | None]:
    """Return the file's size, and what is wrong with it; `expected_bytes` None: any but nothing."""
    try:
        size_bytes = path.stat().st_size
    except FileNotFoundError:
        return 0, "absent"
    except OSError as error:
        return 0, f"cannot be looked at: {error.strerror}"
    if not path.is_file():
        return 0, "a folder, not a file"
    if expected_bytes is None:
        return size_bytes, None if size_bytes else "empty"
    if size_bytes == expected_bytes:
        return size_bytes, None
    return size_bytes, f"{size_bytes:,} bytes, and {expected_bytes:,} were sealed"
