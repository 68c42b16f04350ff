"""What a file is, told by its name: its format, its compression, whether it is a note; and the order of names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from flame.errors import UsageError
from flame.preprocess import remote
from flame.preprocess.storage import FileState, state_of

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
# These compress within themselves, and are not read from .gz or .zst.
COLUMNAR_FORMATS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
FORMATS = COLUMNAR_FORMATS | {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "txt",
    ".csv": "csv",
    ".tsv": "tsv",
}
LATER = {".bz2": "bzip2", ".xz": "xz", ".tar": "tar", ".zip": "zip"}
_NOTE_NAME = re.compile(
    r"\..*|_.*|.*\.(md|lock|crc)|readme.*|licen[sc]e.*|(sha256|md5|check)sums?(\.txt)?"
    r"|dataset_infos?\.json|dataset_dict\.json|state\.json",
    re.IGNORECASE,
)
READABLE = ".parquet, .arrow, .feather, or .jsonl, .txt, .csv, .tsv (these also as .gz and .zst)"


@dataclass(frozen=True, kw_only=True)
class FoundFile:
    """A file to read: its path as named by the user, the reader's name and the compression, None for none."""

    path: str
    format: str
    compression: str | None
    state: FileState

    @property
    def size_bytes(self) -> int:
        return self.state.size_bytes


def is_note(name: str) -> bool:
    """Whether a file or folder so called is hidden or a note beside the texts, and is passed over."""
    return _NOTE_NAME.fullmatch(name) is not None


def is_known(name: str) -> bool:
    """Whether `classify` has an answer for this name, be it that its format comes later."""
    suffix, compression = _suffixes(name)
    return suffix in FORMATS or (compression is None and suffix in LATER)


def _suffixes(path: str) -> tuple[str, str | None]:
    """Return what tells the format, "" for nothing, and the compression."""
    name = PurePosixPath(remote.name_of(path).lower())
    compression = COMPRESSIONS.get(name.suffix)
    suffix = name.suffix if compression is None else name.with_suffix("").suffix
    return ("" if compression is not None and suffix in COLUMNAR_FORMATS else suffix), compression


def classify(path: str, state: FileState | None = None) -> FoundFile:
    """Return the reader for a path by its name, and the file's state; `UsageError` where there is none."""
    suffix, compression = _suffixes(path)
    if suffix in FORMATS:
        try:
            state = state or state_of(path)
        except FileNotFoundError as error:
            raise UsageError("a link leads to no file", got=path, fix="Mend it, or remove it") from error
        return FoundFile(path=path, format=FORMATS[suffix], compression=compression, state=state)
    if suffix in LATER:
        raise UsageError(
            f"reading {LATER[suffix]} files is not available yet", got=path, fix="Convert them to parquet or jsonl"
        )
    raise UsageError("no reader knows this kind of file", got=path, expected=f"a name that ends in {READABLE}")


def natural_key(path: str) -> tuple[list[list[str | int]], str]:
    """Sort key by which part-2 comes before part-10, folder by folder."""
    return ([_natural(part) for part in Path(path).parts], path)


def _natural(name: str) -> list[str | int]:
    # re.split with a group alternates text and digits, so that equal positions hold equal types.
    return [int(part) if index % 2 else part for index, part in enumerate(re.split(r"([0-9]+)", name))]
