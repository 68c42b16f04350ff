"""One task from its pieces to its receipt: read, tokenize, shuffle, write. The same wherever and whenever it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from flame.files import named_disk_errors
from flame.preprocess.blocks import INTERLEAVED_PIECES, interleave
from flame.preprocess.claims import claimed
from flame.preprocess.dedup import Copies
from flame.preprocess.engine_check import Encoder
from flame.preprocess.filters import by_characters, keep_documents
from flame.preprocess.folder import COPIES, read_receipt, rejects_path, remove_task
from flame.preprocess.plan import STREAM_FORMATS, Task
from flame.preprocess.readers.formats import read_piece
from flame.preprocess.rejects import Rejects
from flame.preprocess.reports import Progress
from flame.preprocess.task_output import TaskOutput, write_receipt
from flame.preprocess.task_settings import TaskSettings
from flame.preprocess.texts import Documents
from flame.preprocess.tokenize import RedoError, tokenized


@dataclass(frozen=True, kw_only=True)
class TokenizeSettings:
    """What every task of a build is told. `claims`: other builders run tasks of this corpus."""

    build: TaskSettings
    claims: bool = False

    def run(
        self,
        task: Task,
        encoder: Encoder,
        report: Callable[[Progress], None],
        *,
        careful: bool = False,
        wait: bool = True,
    ) -> bool:
        """Run a task; False, and nothing done, if another process has claimed it and `wait` is not set.

        `careful`: the tokenizer has killed processes at this task.
        """
        settings = self.build
        if careful:
            remove_task(settings.corpus, task.index)  # what those that died have left
        if not self.claims:
            run_task(task, settings, encoder, report, careful=careful)
            return True
        with claimed(settings.corpus, task.index, wait=wait) as ours:
            if not ours:
                return False
            if read_receipt(settings.corpus, settings.plan_digest, task.index) is not None:
                report(Progress(input_bytes=task.num_bytes))
                return True
            remove_task(settings.corpus, task.index)
            run_task(task, settings, encoder, report, careful=careful)
        return True


def run_task(
    task: Task, settings: TaskSettings, encoder: Encoder, report: Callable[[Progress], None], *, careful: bool = False
) -> None:
    """Write the task's shards, its rejects and, last, its receipt.

    A task on which the engine errs is done again with the reference. Nothing is left under a final name without a
    receipt that counts, nothing under a temporary one if an error is raised. Cost: memory is bounded by a block,
    `INTERLEAVED_PIECES` batches of text and the largest document.
    """
    done = Progress()

    def count(progress: Progress) -> None:
        nonlocal done
        done += progress
        report(progress)

    try:
        _run_once(task, settings, encoder, count, careful=careful, redone=None)
    except RedoError as error:
        report(done.taken_back(f"task {task.index} is done again with the reference: {error}"))
        _run_once(task, settings, encoder.without_fast(), report, careful=careful, redone=str(error))


def _run_once(
    task: Task,
    settings: TaskSettings,
    encoder: Encoder,
    report: Callable[[Progress], None],
    *,
    careful: bool,
    redone: str | None,
) -> None:
    rejects = Rejects(on_error=settings.on_error)
    with TaskOutput(task.index, settings) as output, named_disk_errors(settings.corpus):
        _write_documents(task, settings, encoder, report, rejects, output, careful=careful)
        splits = output.finish()
        rejects.write_samples(rejects_path(settings.corpus, task.index))
    write_receipt(task.index, settings, rejects, splits, engine=encoder.name, redone=redone)
    report(Progress(num_refused=rejects.counts.total(), num_errors=rejects.errors))


def _write_documents(
    task: Task,
    settings: TaskSettings,
    encoder: Encoder,
    report: Callable[[Progress], None],
    rejects: Rejects,
    output: TaskOutput,
    *,
    careful: bool,
) -> None:
    copies = Copies.of_task(settings.corpus / COPIES, task.index) if settings.dedup else None
    nouns = {piece.path: "byte" if piece.format in STREAM_FORMATS else "row" for piece in task.pieces}
    place = 0
    for documents in read_documents(task, settings, rejects):
        report(Progress(input_bytes=documents.progress_bytes))
        if copies is not None:
            keep = copies.keep(len(documents))
            rejects.count("duplicate", int(np.count_nonzero(~keep)))
            documents = keep_documents(documents, keep)
        noun = nouns[documents.path]
        for batch, texts, parts in tokenized(
            documents, task.index, place, noun, settings, encoder, rejects, report, careful=careful
        ):
            report(Progress(num_documents=len(batch), num_tokens=len(batch.tokens)))
            output.append(batch, texts, parts)
        place += len(documents)


def read_documents(task: Task, settings: TaskSettings, rejects: Rejects) -> Iterator[Documents]:
    """Yield the task's documents in the order in which they are tokenized, those too short or too long left out."""
    pieces = (read_piece(piece, settings.columns, rejects) for piece in task.pieces)
    for documents in interleave(pieces, 1 if settings.shuffle_seed is None else INTERLEAVED_PIECES):
        yield by_characters(documents, settings.min_chars, settings.max_chars, rejects)
