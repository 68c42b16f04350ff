"""`flame-preprocess build --dry_run`: what a build would read, give and take, by a sample that is built and deleted."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flame.files import free_bytes
from flame.preprocess.executors import Executor
from flame.preprocess.folder import WORKERS_LOCK, read_receipt, receipt_path, shards_of
from flame.preprocess.plan import LINE_FORMATS, STREAM_FORMATS, Piece, Task, random_order
from flame.preprocess.plan_file import Plan
from flame.preprocess.reports import Progress
from flame.preprocess.task import TokenizeSettings
from flame.preprocess.task_settings import TaskSettings
from flame.words import counted

SAMPLE_PIECES = 16
PIECE_BYTES = (2**16, 2**22)
SECONDS_AT_MOST = 20.0
BYTES_A_DOCUMENT = 24  # its end, and about its row of docs.parquet


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What the sample was: bytes of text read of all that there are, what came of them, and how long it took.

    `text_bytes` is the text of its documents, `disk_bytes` what it took on disk, `rejects` what was refused by reason;
    None where it was not finished.
    """

    input_bytes: int
    num_documents: int
    num_tokens: int
    seconds: float
    text_bytes: int | None = None
    disk_bytes: int | None = None
    rejects: Mapping[str, int] | None = None


class _EnoughError(Exception):
    """The sample has taken its time."""


def take_sample(
    plan: Plan, settings: TaskSettings, executor: Executor, clock: Callable[[], float] = time.monotonic
) -> Sample:
    """Build samples of the plan's pieces into `settings.corpus`, which is empty and deleted by the caller.

    A small one, then a larger one; what is not finished within `SECONDS_AT_MOST` counts only if nothing is. Cost: that
    time, or `SAMPLE_PIECES` times the last of `PIECE_BYTES` of text by one worker. A compressed file is read from its
    start to its end.
    """
    pieces = [piece for task in plan.tasks for piece in task.pieces]
    tasks = [
        Task(index=index, pieces=tuple(sample_pieces(pieces, piece_bytes)))
        for index, piece_bytes in enumerate(PIECE_BYTES)
    ]
    done = Progress()
    marks = [clock()]

    def report(progress: Progress) -> None:
        nonlocal done
        done += progress
        if len(marks) == 1 and receipt_path(settings.corpus, 0).exists():
            marks.append(clock())
        if clock() - marks[0] > SECONDS_AT_MOST and done.num_tokens > 0:
            raise _EnoughError

    with suppress(_EnoughError):
        executor.run(tasks, TokenizeSettings(build=settings), lock=settings.corpus / WORKERS_LOCK, report=report)
    marks.append(clock())
    for task in reversed(tasks):
        receipt = read_receipt(settings.corpus, settings.plan_digest, task.index)
        if receipt is not None:
            return _of_receipt(receipt, settings, task, marks[task.index + 1] - marks[task.index])
    return Sample(
        input_bytes=max(done.input_bytes, 1),
        num_documents=done.num_documents,
        num_tokens=done.num_tokens,
        seconds=max(marks[-1] - marks[0], 1e-9),
    )


def _of_receipt(receipt: Mapping[str, Any], settings: TaskSettings, task: Task, seconds: float) -> Sample:
    shards = [shard for _, shard in shards_of(receipt)]
    files = settings.corpus.glob(f"**/shard-{task.index:05d}-*")
    return Sample(
        input_bytes=max(task.num_bytes, 1),
        num_documents=sum(shard["num_documents"] for shard in shards),
        num_tokens=sum(shard["num_tokens"] for shard in shards),
        seconds=max(seconds, 1e-9),
        text_bytes=sum(shard["num_bytes"] for shard in shards),
        disk_bytes=sum(path.stat().st_size for path in files),
        rejects=receipt["rejects"],
    )


def sample_pieces(pieces: Sequence[Piece], piece_bytes: int) -> list[Piece]:
    """Return some pieces, from all over the input, each cut to about `piece_bytes` where that can be done."""
    order = random_order("dry run", len(pieces))[:SAMPLE_PIECES]
    return [_cut(pieces[index], piece_bytes) for index in sorted(order.tolist())]


def _cut(piece: Piece, piece_bytes: int) -> Piece:
    if piece.num_bytes <= piece_bytes or piece.stop is None:
        return piece
    if piece.format in LINE_FORMATS and piece.compression is None:
        return dataclasses.replace(piece, stop=piece.start + piece_bytes, num_bytes=piece_bytes)
    if piece.format in STREAM_FORMATS:
        return piece
    groups = piece.stop - piece.start
    kept = max(groups * piece_bytes // piece.num_bytes, 1)
    return dataclasses.replace(piece, stop=piece.start + kept, num_bytes=piece.num_bytes * kept // groups)


def told(corpus: Path, plan: Plan, sample: Sample, *, engine: str, num_workers: int) -> str:
    """Return what the build would be, for people."""
    total = sum(task.num_bytes for task in plan.tasks)
    factor = total / sample.input_bytes
    documents, tokens = sample.num_documents * factor, sample.num_tokens * factor
    disk = sample.disk_bytes
    if disk is None:
        disk = 4 * sample.num_tokens + BYTES_A_DOCUMENT * sample.num_documents
    disk_bytes, free = disk * factor, free_bytes(corpus)
    speed = sample.input_bytes / sample.seconds
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    whole = "" if sample.input_bytes < total else " (all of the input was read)"
    lines = [
        f"dry run: {corpus} is not written; from a sample of {_size(sample.input_bytes)} of text{whole}",
        f"  input      {counted(len(plan.inputs), 'file')} of {_size(plan.input_bytes)}, about {_size(total)} of text",
        f"  documents  about {documents:,.0f}",
        f"  tokens     about {_number(tokens)}" + _bytes_a_token(sample),
        f"  disk       about {_size(disk_bytes)}; {_size(free)} are free there",
        f"  time       about {_duration(total / speed / num_workers)} with {workers} of {engine}, "
        f"at {_size(speed)} of text a second each",
        f"  tasks      {plan.num_tasks:,}",
    ]
    if sample.rejects:
        refused = sum(sample.rejects.values())
        share = 100 * refused / (refused + sample.num_documents)
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in sample.rejects.items())
        lines.insert(3, f"  refused    about {share:.2g}% of what is read: in the sample {reasons}")
    if plan.options["dedup"] is not None:
        lines += [
            "  copies     not counted: a sample holds few. With --dedup documents and tokens are fewer than these,",
            "             and the input is read once more, without tokenizing it",
        ]
    if disk_bytes > free:
        lines.append(
            f"there is no room for it in {corpus}: choose another --output, or free {_size(disk_bytes - free)}"
        )
    return "\n".join(lines)


def _bytes_a_token(sample: Sample) -> str:
    if sample.text_bytes is None or not sample.num_tokens:
        return ""
    return f", {sample.text_bytes / sample.num_tokens:.2f} bytes of text each"


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def _number(count: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:,.0f}"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(seconds, 1):.0f} s"
