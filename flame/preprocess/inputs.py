"""Which files a build reads: patterns and folders to one stable list, whatever order the disk gives them in."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from flame.errors import UsageError
from flame.preprocess import remote
from flame.preprocess.file_kinds import READABLE, FoundFile, classify, is_known, is_note, natural_key
from flame.preprocess.hub import hub_files
from flame.preprocess.progress import log
from flame.preprocess.remote import is_remote
from flame.preprocess.saved import SAVED_NOTES, SPLITS, STATE, chosen_split, saved_files, split_names
from flame.preprocess.storage import FileState
from flame.words import counted

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_GENERIC_LOADERS = {"parquet", "arrow", "json", "csv", "text"}


def find_inputs(
    datasets: Sequence[str],
    *,
    data_dir: str | None,
    data_files: Sequence[str],
    name: str | None = None,
    split: str | None = None,
    revision: str | None = None,
) -> list[FoundFile]:
    """Return the files that the arguments name: arguments in their order, the files of each in natural order.

    `UsageError` for what is absent, what is named twice, and what no reader knows. Notes and hidden files are passed
    over, and told in one line.
    """
    passed_over: list[str] = []
    files: list[FoundFile] = []
    names = list(_separated(datasets))
    if data_files and all(map(is_remote, data_files)) and set(names) <= _GENERIC_LOADERS:
        names, data_files = list(data_files), ()
    alone = [] if data_dir or data_files else [dataset for dataset in names if remote.is_listed_alone(dataset)]
    heard = remote.describe_all(list(dict.fromkeys(alone)))
    for dataset in names:
        if _is_hub_name(dataset, named=name is not None or revision is not None):
            found = hub_files(
                dataset, name=name, split=split, revision=revision, data_dir=data_dir, data_files=data_files
            )
            files += sorted((classify(url, state) for url, state in found), key=lambda file: natural_key(file.path))
            continue
        if name is not None or revision is not None:
            raise UsageError(
                "--dataset_name and --dataset_revision choose from a hub dataset: these are files",
                got=dataset,
                fix="Leave them away",
            )
        if dataset in heard:
            _refuse_split(dataset, split)
            files.append(classify(dataset, _remote_state(heard[dataset])))
        elif is_remote(dataset):
            files += _remote_files(dataset, data_dir, data_files, split, passed_over)
        else:
            path = unquote(urlsplit(dataset).path) if dataset.startswith("file://") else dataset
            files += [classify(path) for path in _files_of(path, data_dir, data_files, split, passed_over)]
    _refuse_twice(files)
    if not files:
        raise UsageError("there is no file to read", where=", ".join(datasets), expected=READABLE)
    if passed_over:
        number = len(passed_over)
        log(
            f"note: passed over {number:,} {'note or hidden file' if number == 1 else 'notes and hidden files'}: "
            f"{_some(passed_over)}"
        )
    return files


def _refuse_twice(files: Sequence[FoundFile]) -> None:
    seen: dict[str, str] = {}
    for file in files:
        real = file.path if is_remote(file.path) else os.path.realpath(file.path)
        if real in seen:
            raise UsageError(
                "the same file is named twice",
                got=f"{seen[real]} and {file.path}",
                expected="each file once",
                fix="Name it once: the corpus would hold its texts twice",
            )
        seen[real] = file.path


def _separated(datasets: Sequence[str]) -> Iterator[str]:
    for dataset in datasets:
        if dataset.startswith("@") and not Path(dataset).exists():
            yield from _listed(dataset[1:])
        elif "," not in dataset or Path(dataset).exists():
            yield dataset
        else:
            yield from (part.strip() for part in dataset.split(",") if part.strip())


def _listed(path: str) -> list[str]:
    """Return the lines of a file of names; blank ones and those that begin with # are none."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        got = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UsageError(
            "a list of files cannot be read", where=path, got=got, fix="Name it as --dataset @FILE"
        ) from error
    names = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not names:
        raise UsageError("a list of files is empty", where=path, expected="a file, folder or pattern a line")
    return names


def _is_hub_name(dataset: str, *, named: bool) -> bool:
    """Whether `org/name` means a hub dataset: a path that is there wins, and so does one into a folder that is."""
    if not _HUB_NAME.fullmatch(dataset) or Path(dataset).exists() or is_known(dataset):
        return False
    return named or not (Path(dataset).parent.exists() or dataset.startswith("."))


def _remote_files(
    url: str, data_dir: str | None, data_files: Sequence[str], split: str | None, passed_over: list[str]
) -> list[FoundFile]:
    _refuse_split(url, split)
    folder = remote.join(url, data_dir or "")
    patterns = [remote.join(folder, pattern) for pattern in data_files] or [folder]
    found = {path: state for pattern in patterns for path, state in remote.find(pattern)}
    if len(found) == 1 and not is_note(PurePosixPath(remote.name_of(next(iter(found)))).name):
        return [classify(path, _remote_state(state)) for path, state in found.items()]
    root = remote.folder_of(folder)
    known: list[str] = []
    unknown: list[str] = []
    for path in sorted(found, key=natural_key):
        names = path.removeprefix(root).strip("/").split("/")
        if names[-1] == SPLITS:
            raise _several_splits(path, [])
        if any(is_note(name) for name in names):
            passed_over.append(path)
        else:
            (known if is_known(names[-1]) else unknown).append(path)
    _refuse_unknown(url, unknown)
    return [classify(path, _remote_state(found[path])) for path in known]


def _remote_state(state: tuple[int, str | None]) -> FileState:
    return FileState(size_bytes=state[0], mtime_ns=0, etag=state[1])


def _refuse_split(dataset: object, split: str | None) -> None:
    if split not in (None, "train"):
        raise UsageError(
            f"--dataset_split {split}: these files have no splits",
            where=dataset,
            expected=f"a folder with a {SPLITS}, as `datasets` saves several splits, or the name of a hub dataset",
            fix="Name the split's files by --data_files or a pattern",
        )


def _several_splits(where: str, names: Sequence[str]) -> UsageError:
    return UsageError(
        "a folder within the dataset holds several splits, and a corpus is made of one",
        where=where,
        got=", ".join(names) or None,
        fix="Name the folder of each split to read in --dataset",
    )


def _refuse_unknown(folder: str, unknown: list[str]) -> None:
    if unknown:
        raise UsageError(
            f"the folder holds {counted(len(unknown), 'file')} that no reader knows",
            where=folder,
            got=_some(sorted(unknown, key=natural_key)),
            expected=READABLE,
            fix=f"Move them away, or name what to read by a pattern such as '{folder}/**/*.parquet'",
        )


def _files_of(
    dataset: str, data_dir: str | None, data_files: Sequence[str], split: str | None, passed_over: list[str]
) -> list[str]:
    generic = dataset in _GENERIC_LOADERS and not Path(dataset).exists() and bool(data_dir or data_files)
    folder = Path(data_dir or "") if generic else Path(dataset, data_dir or "")
    if (folder / SPLITS).is_file() and not data_files:
        folder = folder / chosen_split(folder, split)
    else:
        _refuse_split(folder, split)
    patterns = [str(folder / pattern) for pattern in data_files] if data_files else [str(folder)]
    return sorted((path for pattern in patterns for path in _matches(pattern, passed_over)), key=natural_key)


def _matches(pattern: str, passed_over: list[str]) -> list[str]:
    """Return the files of a path or a pattern, in any order."""
    exists = Path(pattern).exists()
    found = [pattern] if exists else glob.glob(pattern, recursive=True)  # noqa: PTH207 (absolute patterns too)
    if not found:
        raise _absent(pattern)
    paths: set[str] = set()
    for path in found:
        if Path(path).is_dir():
            paths |= set(_walk(path, passed_over))
        elif not exists and is_note(Path(path).name):
            passed_over.append(path)
        else:
            paths.add(os.path.normpath(path))
    return sorted(paths)


def _absent(pattern: str) -> UsageError:
    if glob.has_magic(pattern):
        return UsageError("no file matches", got=pattern, fix="Quote the pattern, and check it with ls")
    return UsageError(
        "there is no such file or folder", got=pattern, fix="Name a file, a folder or a pattern in --dataset"
    )


def _walk(folder: str, passed_over: list[str]) -> Iterator[str]:
    """Yield the files of a folder and its subfolders; of one that `datasets` saved, those that are its rows."""
    unknown: list[str] = []
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=_unreadable):
        passed_over += [f"{Path(parent, name)}/" for name in folders if is_note(name)]
        folders[:] = sorted(name for name in folders if not is_note(name))
        rows = saved_files(Path(parent)) if STATE in names else None
        if SPLITS in names:
            raise _several_splits(parent, split_names(Path(parent)))
        for name in names:
            path = os.path.normpath(Path(parent, name))
            if rows is not None and (name.endswith(".arrow") or name in SAVED_NOTES):
                if name not in SAVED_NOTES and path not in rows:
                    passed_over.append(path)
            elif is_note(name):
                passed_over.append(path)
            elif is_known(name):
                yield path
            else:
                unknown.append(path)
        yield from rows or ()
    _refuse_unknown(folder, unknown)


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _unreadable(error: OSError) -> None:
    raise UsageError(
        "a folder cannot be read",
        where=error.filename,
        got=error.strerror,
        fix="Get the right to read it, or name what to read by a pattern",
    ) from error
