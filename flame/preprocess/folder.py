"""The output folder of a build: what state it is in, and what in it belongs to which task."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flame.errors import CorpusError
from flame.files import TEMPORARY_SUFFIX, fsync_folder, remove_tree, temporary_path
from flame.preprocess.records import intact, read_record
from flame.shards.format import (
    BUILD_FOLDER,
    END_DTYPE,
    HEADER_BYTES,
    MANIFEST,
    REJECTS_FOLDER,
    TOKEN_DTYPE,
    docs_path,
    ends_path,
    shard_name,
    tokens_path,
)
from flame.shards.manifest import ShardInfo

BUILD = Path(BUILD_FOLDER)
PLAN = BUILD / "plan.json"
LOCK = BUILD / "lock"
WORKERS_LOCK = BUILD / "workers.lock"
PLAN_LOCK = BUILD / "plan.lock"
CLAIMS = BUILD / "claims"
# The pieces of every task, for the processes of an array job.
PIECES = BUILD / "pieces.parquet"
TASKS = BUILD / "tasks"
# The code points on which the engine differs from the reference.
SCREEN = BUILD / "engine-screen.json"
# Held-out documents of each task, until sealing merges them into val/.
VAL_PARTS = BUILD / "tasks-val"
# --dedup: the hashes of all texts, and then the places of the copies among each task's documents.
HASHES = BUILD / "hashes"
COPIES = BUILD / "copies"
COPIES_LOCK = BUILD / "copies.lock"


_STARTED = (
    *("lock", "workers.lock", "plan.lock", "pieces.parquet"),
    *(f"pieces.parquet{TEMPORARY_SUFFIX}", f"plan.json{TEMPORARY_SUFFIX}"),
)


# What a receipt holds and later steps rely on.
_RECEIPT_FIELDS = {"task": int, "engine": str, "rejects": dict, "repaired": dict, "splits": dict, "val_docs": list}


def receipt_path(corpus: Path, task: int) -> Path:
    """Return where a task's receipt lies."""
    return corpus / TASKS / f"task-{task:05d}.json"


def rejects_path(corpus: Path, task: int) -> Path:
    """Return where the samples of what a task refused lie."""
    return corpus / REJECTS_FOLDER / f"task-{task:05d}.jsonl"


def check_folder(corpus: Path) -> None:
    """Raise `CorpusError` unless the folder is absent, empty, or what a build of ours left."""
    if not corpus.exists():
        return
    if not corpus.is_dir():
        raise CorpusError("the output is a file, not a folder", where=corpus, fix="Name a new folder in --output")
    names = sorted(path.name for path in corpus.iterdir())
    if (corpus / PLAN).is_file():
        return
    if MANIFEST in names:
        raise CorpusError(
            "the output folder holds a corpus without a record of how it was built",
            where=corpus,
            got=f"no {PLAN}",
            fix="Name a new folder in --output",
        )
    # A build that died before its plan was written leaves the lock, and perhaps the plan's temporary file.
    started = [BUILD / name for name in _STARTED]
    foreign = [name for name in names if name != BUILD_FOLDER]
    if (corpus / BUILD).is_dir():
        foreign += [path.name for path in (corpus / BUILD).iterdir() if BUILD / path.name not in started]
    if foreign:
        raise CorpusError(
            "the output folder holds files that no build of a corpus made",
            where=corpus,
            got=", ".join(foreign[:5]),
            expected="a new or empty folder, or an unfinished build",
            fix="Name a new folder in --output",
        )


def read_receipts(corpus: Path, plan_digest: str) -> dict[int, dict[str, Any]]:
    """Return the receipts of the finished tasks of this plan whose files are all there, by task.

    Raises `CorpusError` for a receipt that is damaged.
    """
    receipts = {}
    for path in sorted((corpus / TASKS).glob("task-*.json")):
        receipt = _read_receipt(corpus, path, plan_digest)
        if receipt is not None:
            receipts[int(receipt["task"])] = receipt
    return receipts


def read_receipt(corpus: Path, plan_digest: str, task: int) -> dict[str, Any] | None:
    """Return the receipt of a task of this plan, None where it is not finished."""
    return _read_receipt(corpus, receipt_path(corpus, task), plan_digest)


def _read_receipt(corpus: Path, path: Path, plan_digest: str) -> dict[str, Any] | None:
    with intact(path, fix="Delete this file and run the same command again: its task is run again"):
        try:
            receipt = read_record(path)
        except FileNotFoundError:
            return None
        if receipt["plan"] != plan_digest:
            return None
        for name, kind in _RECEIPT_FIELDS.items():
            if not isinstance(receipt[name], kind):
                raise TypeError(f"{name} is {receipt[name]!r}")
        if receipt_path(corpus, receipt["task"]) != path:
            raise ValueError(f"it is the receipt of task {receipt['task']}")
        whole = all(_is_whole(corpus, split, ShardInfo(**shard)) for split, shard in shards_of(receipt))
    return receipt if whole else None


def remove_task(corpus: Path, task: int) -> None:
    """Delete what a task that was not finished left: temporary files, shards, samples. Lists no folder."""
    for path in (receipt_path(corpus, task), rejects_path(corpus, task)):
        _remove_with_temporary(path)
    for folder, split in ((corpus, "train"), (corpus / VAL_PARTS.parent, VAL_PARTS.name)):
        for part in itertools.count():
            names = (path(folder, split, shard_name(task, part)) for path in (tokens_path, ends_path, docs_path))
            if not sum(_remove_with_temporary(path) for path in names):
                break  # parts are written in order


def _remove_with_temporary(path: Path) -> bool:
    """Delete a file and what was to become it; whether either was there."""
    there = [one for one in (path, temporary_path(path)) if one.exists()]
    for one in there:
        remove_tree(one)
    return bool(there)


def shards_of(receipt: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Yield (split, shard) of all that a receipt names."""
    for split, shards in receipt["splits"].items():
        for shard in shards:
            yield split, shard


def split_folder(corpus: Path, split: str) -> Path:
    """Return the folder whose subfolder `split` holds a task's shards of that name."""
    return corpus / VAL_PARTS.parent if split == VAL_PARTS.name else corpus


def _is_whole(corpus: Path, split: str, shard: ShardInfo) -> bool:
    folder = split_folder(corpus, split)
    sizes = {
        tokens_path(folder, split, shard.name): shard.num_tokens * TOKEN_DTYPE.itemsize,
        ends_path(folder, split, shard.name): shard.num_documents * END_DTYPE.itemsize,
    }
    try:
        return all(path.stat().st_size == HEADER_BYTES + size for path, size in sizes.items())
    except FileNotFoundError:
        return False


def remove_strays(corpus: Path, receipts: Iterable[Mapping[str, Any]]) -> None:
    """Delete what killed tasks left: temporary files, and shards and samples that no receipt names."""
    wanted: set[Path] = set()
    for receipt in receipts:
        wanted |= {receipt_path(corpus, receipt["task"]), rejects_path(corpus, receipt["task"])}
        for split, shard in shards_of(receipt):
            folder = split_folder(corpus, split)
            wanted |= {path(folder, split, shard["name"]) for path in (tokens_path, ends_path, docs_path)}
    for folder in (corpus / "train", corpus / VAL_PARTS, corpus / TASKS, corpus / REJECTS_FOLDER):
        ours = [*folder.glob("shard-*"), *folder.glob("task-*")]
        strays = [path for path in ours if path not in wanted]
        for path in strays:
            remove_tree(path)
        if strays:
            fsync_folder(folder)
    # Sealing writes val/ anew each time, and everything else under a temporary name.
    remove_tree(corpus / "val")
    for folder in (corpus, corpus / BUILD):
        for path in folder.glob(f"*{TEMPORARY_SUFFIX}"):
            remove_tree(path)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return in words how two plans differ, options first; empty where they are the same."""
    found = []
    for name in dict.fromkeys([*old["options"], *new["options"]]):
        before, now = old["options"].get(name), new["options"].get(name)
        if before != now:
            found.append(f"{name} was {json.dumps(before)} and is {json.dumps(now)}")
    return found + input_differences(old.get("inputs", ()), new.get("inputs", ()))


def input_differences(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return in words how two lists of inputs differ."""
    before, now = ({entry["path"]: entry for entry in entries} for entries in (old, new))
    found = [f"{path} is no longer an input" for path in before if path not in now]
    found += [f"{path} is a new input" for path in now if path not in before]
    for path in before.keys() & now.keys():
        found += [
            f"{path}: {key} was {before[path][key]} and is {now[path][key]}"
            for key in before[path]
            if before[path][key] != now[path][key]
        ]
    if not found and [entry["path"] for entry in old] != [entry["path"] for entry in new]:
        found.append("the inputs come in another order")
    return sorted(found)
