"""What a build will do, as it lies in its folder: plan.json, and for array jobs the pieces beside it."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from flame.errors import CorpusError, FlameError
from flame.files import exclusive_lock, fsync_file, named_disk_errors, publish, sha256_of_json, temporary_path
from flame.preprocess.folder import (
    PIECES,
    PLAN,
    WORKERS_LOCK,
    check_folder,
    differences,
    read_receipts,
    remove_strays,
)
from flame.preprocess.plan import PLAN_VERSION, InputFile, Piece, Task
from flame.preprocess.readers.columns import Columns
from flame.preprocess.records import check_record, checksum_of, intact, write_record
from flame.preprocess.where_parse import parse_where
from flame.shards.manifest import read_manifest

SECONDS_TO_DIE = 30.0
_PIECE_FIELDS = (
    ("task", pa.uint32()),
    ("file", pa.uint32()),
    ("format", pa.dictionary(pa.int8(), pa.string())),
    ("compression", pa.dictionary(pa.int8(), pa.string())),
    ("start", pa.int64()),
    ("stop", pa.int64()),
    ("num_bytes", pa.int64()),
    ("first_row", pa.int64()),
    ("row_limit", pa.int64()),
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a build will do. `options` and `inputs` are all that decides its bytes, and what `digest` covers.

    `asked` is what the user said, before the inputs were looked at, `dataset` how they named them; `num_ranges` is how
    many shares an array job said that it has, `pieces` the checksum of the file of its pieces.
    """

    options: Mapping[str, Any]
    inputs: Sequence[Mapping[str, Any]]
    on_error: str
    columns: Columns
    tasks: Sequence[Task]
    num_tasks: int
    dataset: Sequence[str] = ()
    asked: Mapping[str, Any] | None = None
    num_ranges: int | None = None
    pieces: str | None = None

    @cached_property
    def digest(self) -> str:
        return sha256_of_json({"version": PLAN_VERSION, "options": self.options, "inputs": self.inputs})

    @property
    def input_bytes(self) -> int:
        return sum(entry["size"] for entry in self.inputs)

    @property
    def inputs_in_short(self) -> dict[str, Any]:
        """What the manifest keeps of the inputs: how many files and bytes, and what tells them from others."""
        return {
            "num_files": len(self.inputs),
            "num_bytes": self.input_bytes,
            "digest": sha256_of_json(self.inputs),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the object that plan.json holds."""
        return {
            "version": PLAN_VERSION,
            "digest": self.digest,
            "options": self.options,
            "on_error": self.on_error,
            "num_tasks": self.num_tasks,
            "dataset": list(self.dataset),
            "text_column": self.columns.text,
            "kept_schema": base64.b64encode(self.columns.kept.serialize().to_pybytes()).decode(),
            "asked": self.asked,
            "num_ranges": self.num_ranges,
            "pieces": self.pieces,
            "inputs": self.inputs,
        }


def input_entry(file: InputFile) -> dict[str, Any]:
    """Return what a plan keeps of a file."""
    entry = {"path": file.path, "size": file.size_bytes, "mtime_ns": file.mtime_ns, "rows": file.num_rows}
    return entry if file.etag is None else entry | {"etag": file.etag}


def write_plan(corpus: Path, plan: Plan) -> None:
    """Write plan.json, an input a line."""
    write_record(corpus / PLAN, plan.to_json(), indent=None if len(plan.inputs) > 1000 else 2)


def read_plan(corpus: Path) -> Plan | None:
    """Return the plan that lies in a folder, without its tasks; None where there is none.

    Raises `CorpusError` where it is damaged, or of another version.
    """
    with _intact_plan(corpus):
        try:
            found = json.loads((corpus / PLAN).read_bytes())
        except FileNotFoundError:
            return None
        if found["version"] != PLAN_VERSION or "kept_schema" not in found:
            raise CorpusError(
                "the output folder holds a build of another version of flame",
                where=corpus,
                got=f"a plan of version {found['version']}",
                expected=f"version {PLAN_VERSION}",
                fix="Finish it with that version, or build into a new folder",
            )
        check_record(found)
        kept = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(found["kept_schema"])))
        where = found["options"].get("where")
        return Plan(
            options=found["options"],
            inputs=found["inputs"],
            on_error=found["on_error"],
            columns=Columns(text=found["text_column"], kept=kept, where=parse_where(where) if where else None),
            tasks=(),
            num_tasks=found["num_tasks"],
            dataset=found["dataset"],
            asked=found["asked"],
            num_ranges=found["num_ranges"],
            pieces=found["pieces"],
        )


def _intact_plan(corpus: Path) -> AbstractContextManager[None]:
    return intact(corpus / PLAN, fix="Name a new folder in --output, or delete this one to build it again")


def write_pieces(corpus: Path, plan: Plan) -> str:
    """Write the pieces of all tasks, so that other processes need not look at the inputs to know them.

    Returns the file's checksum.
    """
    number = {entry["path"]: index for index, entry in enumerate(plan.inputs)}
    pieces = [piece for task in plan.tasks for piece in task.pieces]
    columns: dict[str, list[Any]] = {
        "task": [task.index for task in plan.tasks for _ in task.pieces],
        "file": [number[piece.path] for piece in pieces],
    }
    for name, _ in _PIECE_FIELDS[2:]:
        columns[name] = [getattr(piece, name) for piece in pieces]
    table = pa.table([pa.array(columns[name], kind) for name, kind in _PIECE_FIELDS], schema=pa.schema(_PIECE_FIELDS))
    path = corpus / PIECES
    path.parent.mkdir(parents=True, exist_ok=True)
    with named_disk_errors(path, table.nbytes):
        pq.write_table(table, temporary_path(path), compression="zstd")
        fsync_file(temporary_path(path))
        publish(temporary_path(path), path)
    return checksum_of(path.read_bytes())


def read_tasks(corpus: Path, plan: Plan, wanted: range) -> list[Task]:
    """Return the tasks of a stretch, from what `write_pieces` wrote."""
    with intact(corpus / PIECES, fix="Delete this file and run the same command again: the inputs are planned again"):
        data = (corpus / PIECES).read_bytes()
        if checksum_of(data) != plan.pieces:
            raise ValueError("its content was changed after it was written")
        share = [("task", ">=", wanted.start), ("task", "<", wanted.stop)]
        table = pq.read_table(pa.BufferReader(data), filters=share, use_threads=False)
    pieces: dict[int, list[Piece]] = {task: [] for task in wanted}
    for row in table.to_pylist():
        entry = plan.inputs[row.pop("file")]
        task = row.pop("task")
        file = {"path": entry["path"], "size_bytes": entry["size"], "mtime_ns": entry["mtime_ns"]}
        pieces[task].append(Piece(**row, **file, etag=entry.get("etag")))
    return [Task(index=index, pieces=tuple(found)) for index, found in pieces.items()]


def say_finished(corpus: Path, plan: Plan) -> int:
    """Return 0 if the sealed corpus is the one asked for; `CorpusError` naming the difference otherwise."""
    check_same_plan(corpus, plan)
    manifest = read_manifest(corpus)
    print(f"{corpus} is already built with these options and inputs: nothing to do ({manifest.fingerprint})")
    return 0


def adopt(corpus: Path, plan: Plan) -> None:
    """Begin the build, or take over what an earlier process left of the same one."""
    check_folder(corpus)
    if (corpus / PLAN).is_file():
        check_same_plan(corpus, plan)
    with no_workers(corpus):
        write_plan(corpus, plan)
        remove_strays(corpus, read_receipts(corpus, plan.digest).values())


def check_same_plan(corpus: Path, plan: Plan) -> None:
    """Raise `CorpusError`, naming what differs or that it is damaged, unless the folder's plan is this one."""
    with _intact_plan(corpus):
        old = json.loads((corpus / PLAN).read_bytes())
        if old["version"] != PLAN_VERSION:
            found = differences(old, plan.to_json())
            raise another_build(corpus, [f"the plan's version was {old['version']} and is {PLAN_VERSION}", *found])
        check_record(old)
        if old["digest"] != plan.digest:
            raise another_build(corpus, differences(old, plan.to_json()))
        check_same_policy(corpus, old["on_error"], plan.on_error)


def another_build(corpus: Path, found: Sequence[str]) -> CorpusError:
    """Return the error for a folder whose build differs in what is `found`."""
    more = f", and {len(found) - 3} more" if len(found) > 3 else ""
    return CorpusError(
        "the output folder holds a build with other options or inputs",
        where=corpus,
        got="; ".join(found[:3]) + more,
        fix="Name a new folder in --output, or delete this one to build it again",
    )


def check_same_policy(corpus: Path, before: str, now: str) -> None:
    """Raise `CorpusError` where a build that may have skipped errors would go on as one that skips none.

    What a build that never skipped anything wrote is what one that may skip writes too; not the other way round.
    """
    if before == "skip" and now == "fail":
        raise CorpusError(
            "the output folder holds a build that skips malformed input",
            where=corpus,
            got='on_error was "skip" and is "fail"',
            fix="Go on with --on_error skip, or name a new folder in --output",
        )


@contextmanager
def no_workers(corpus: Path) -> Iterator[None]:
    """Hold the workers' lock, once the workers of a killed build are gone: they die with it, but not at once."""
    deadline = time.monotonic() + SECONDS_TO_DIE
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(exclusive_lock(corpus / WORKERS_LOCK, what="the tasks of this corpus"))
                break
            except FlameError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        yield
