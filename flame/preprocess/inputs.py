"""Which files a build reads: patterns and folders to one stable list, whatever order the disk gives them in."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flame.errors import UsageError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
FORMATS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".txt": "txt"}
LATER = {".arrow": "arrow", ".csv": "csv", ".tsv": "tsv", ".bz2": "bzip2", ".xz": "xz", ".tar": "tar", ".zip": "zip"}
_METADATA_NAME = re.compile(r"\..*|_.*|.*\.md|readme.*|licen[sc]e.*|dataset_infos?\.json|state\.json", re.IGNORECASE)
_READABLE = ".parquet, .jsonl, .txt (the last two also as .gz and .zst)"
_GENERIC_LOADERS = {"parquet", "json", "text"}


@dataclass(frozen=True, kw_only=True)
class FoundFile:
    """A file to read: its path as named by the user, the reader's name and the compression, None for none."""

    path: str
    format: str
    compression: str | None


def find_inputs(datasets: Sequence[str], *, data_dir: str | None, data_files: Sequence[str]) -> list[FoundFile]:
    """Return the files that the arguments name: arguments in their order, the files of each in natural order.

    `UsageError` for what is absent, what is named twice, and what no reader knows.
    """
    files: list[FoundFile] = []
    for dataset in _separated(datasets):
        files += [classify(path) for path in _files_of(dataset, data_dir, data_files)]
    seen: dict[str, str] = {}
    for file in files:
        real = os.path.realpath(file.path)
        if real in seen:
            raise UsageError(
                "the same file is named twice", got=f"{seen[real]} and {file.path}", expected="each file once"
            )
        seen[real] = file.path
    if not files:
        raise UsageError("there is no file to read", where=", ".join(datasets), expected=_READABLE)
    return files


def _separated(datasets: Sequence[str]) -> Iterator[str]:
    for dataset in datasets:
        if "," not in dataset or Path(dataset).exists():
            yield dataset
        else:
            yield from (part.strip() for part in dataset.split(",") if part.strip())


def _files_of(dataset: str, data_dir: str | None, data_files: Sequence[str]) -> list[str]:
    if "://" in dataset:
        raise UsageError(
            f"{dataset} is a remote address: not available yet", fix="Download the files and name their folder"
        )
    generic = dataset in _GENERIC_LOADERS and not Path(dataset).exists() and bool(data_dir or data_files)
    folder = Path(data_dir or "") if generic else Path(dataset, data_dir or "")
    patterns = [str(folder / pattern) for pattern in data_files] if data_files else [str(folder)]
    return sorted((path for pattern in patterns for path in _matches(pattern)), key=natural_key)


def _matches(pattern: str) -> list[str]:
    if Path(pattern).exists():
        found = [pattern]
    else:
        found = glob.glob(pattern, recursive=True)  # noqa: PTH207 (absolute patterns too)
        if not found:
            raise _absent(pattern)
    paths: set[str] = set()
    for path in found:
        if Path(path).is_dir():
            paths |= set(_walk(path))
        else:
            paths.add(os.path.normpath(path))
    return sorted(paths)


def _absent(pattern: str) -> UsageError:
    if glob.has_magic(pattern):
        return UsageError("no file matches", got=pattern, fix="Quote the pattern, and check it with ls")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", pattern) and not Path(pattern).parent.exists():
        return UsageError(
            f"there is no file or folder {pattern}, and reading a hub dataset by its name is not available yet",
            fix=f"Download it (hf download {pattern} --repo-type dataset --local-dir raw) and name the folder raw",
        )
    return UsageError(
        "there is no such file or folder", got=pattern, fix="Name a file, a folder or a pattern in --dataset"
    )


def _walk(folder: str) -> Iterator[str]:
    unknown: list[str] = []
    paths: list[str] = []
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=_unreadable):
        folders[:] = [name for name in folders if not _METADATA_NAME.fullmatch(name)]
        for name in names:
            if not _METADATA_NAME.fullmatch(name):
                (paths if _known(name) else unknown).append(os.path.normpath(Path(parent, name)))
    if unknown:
        unknown.sort(key=natural_key)
        shown = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
        raise UsageError(
            "the folder holds files that are no text to read",
            where=folder,
            got=shown,
            expected=_READABLE,
            fix=f"Move them away, or name what to read by a pattern such as '{folder}/**/*.parquet'",
        )
    yield from paths


def _unreadable(error: OSError) -> None:
    raise UsageError("a folder cannot be read", where=error.filename, got=error.strerror) from error


def _known(name: str) -> bool:
    """Whether `classify` has an answer for this name, be it that its format comes later."""
    suffix, compression = _suffixes(name)
    return suffix in FORMATS or (compression is None and suffix in LATER)


def _suffixes(path: str) -> tuple[str, str | None]:
    """Return what tells the format, "" for nothing, and the compression."""
    name = Path(path.lower())
    compression = COMPRESSIONS.get(name.suffix)
    suffix = name.suffix if compression is None else name.with_suffix("").suffix
    return ("" if compression is not None and suffix == ".parquet" else suffix), compression


def classify(path: str) -> FoundFile:
    """Return the reader for a path by its name; `UsageError` where there is none."""
    suffix, compression = _suffixes(path)
    if suffix in FORMATS:
        return FoundFile(path=path, format=FORMATS[suffix], compression=compression)
    if suffix in LATER:
        raise UsageError(
            f"reading {LATER[suffix]} files is not available yet", got=path, fix="Convert them to parquet or jsonl"
        )
    raise UsageError("no reader knows this kind of file", got=path, expected=f"a name that ends in {_READABLE}")


def natural_key(path: str) -> tuple[list[list[str | int]], str]:
    """Sort key by which part-2 comes before part-10, folder by folder."""
    return ([_natural(part) for part in Path(path).parts], path)


def _natural(name: str) -> list[str | int]:
    # re.split with a group alternates text and digits, so that equal positions hold equal types.
    return [int(part) if index % 2 else part for index, part in enumerate(re.split(r"([0-9]+)", name))]
