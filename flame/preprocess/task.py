"""One task from its pieces to its receipt: read, tokenize, shuffle, write. The same wherever and whenever it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flame.errors import TokenizerError
from flame.files import named_disk_errors, write_json
from flame.preprocess.blocks import INTERLEAVED_PIECES, BlockShuffler, Tokenized, interleave, write
from flame.preprocess.careful import Crash, compare_apart, encode_apart
from flame.preprocess.claims import claimed
from flame.preprocess.dedup import Copies
from flame.preprocess.engine_check import Encoder, EngineDifferenceError, compared
from flame.preprocess.filters import Cut, by_characters, cut_long, keep_documents
from flame.preprocess.folder import COPIES, VAL_PARTS, read_receipt, receipt_path, rejects_path, remove_task
from flame.preprocess.holdout import HASH_COLUMN, HASH_TYPE, held_out, text_hashes
from flame.preprocess.plan import STREAM_FORMATS, Task
from flame.preprocess.readers.columns import Columns
from flame.preprocess.readers.formats import read_piece
from flame.preprocess.rejects import Rejects
from flame.preprocess.texts import Documents, tokenizer_batches
from flame.shards.writer import PROVENANCE_FIELDS, SplitWriter


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """What every task of a build is told. `shuffle_seed` None keeps the input's order.

    `careful`: the tokenizer has killed processes at this task. `claims`: other builders run tasks of this corpus.
    """

    corpus: Path
    plan_digest: str
    columns: Columns
    provenance: bool
    eos_id: int
    bos_id: int | None
    batch_size: int
    shuffle_seed: int | None
    shuffle_block_tokens: int
    shard_tokens: int
    val_fraction: float
    on_error: str
    min_chars: int | None = None
    max_chars: int | None = None
    dedup: bool = False
    max_tokens: int | None = None
    long_documents: str = "skip"
    careful: bool = False
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
        """Run a task; False, and nothing done, if another process has claimed it and `wait` is not set."""
        settings = dataclasses.replace(self, careful=careful)
        if careful:
            remove_task(self.corpus, task.index)  # what those that died have left
        if not self.claims:
            run_task(task, settings, encoder, report)
            return True
        with claimed(self.corpus, task.index, wait=wait) as ours:
            if not ours:
                return False
            if read_receipt(self.corpus, self.plan_digest, task.index) is not None:
                report(Progress(input_bytes=task.num_bytes))
                return True
            remove_task(self.corpus, task.index)
            run_task(task, settings, encoder, report)
        return True

    @property
    def docs_schema(self) -> pa.Schema | None:
        return docs_schema(self.columns) if self.provenance else None

    @property
    def val_schema(self) -> pa.Schema:
        """The schema of held-out documents until sealing: their size and hash whether or not provenance is kept."""
        return pa.schema([*PROVENANCE_FIELDS, *self.columns.kept, pa.field(HASH_COLUMN, HASH_TYPE)])


def docs_schema(columns: Columns) -> pa.Schema:
    """Return the schema of docs.parquet."""
    return pa.schema([*PROVENANCE_FIELDS, *columns.kept])


@dataclass(frozen=True, kw_only=True)
class InHand:
    """Which documents the tokenizer has at the moment; `row` as docs.parquet counts."""

    path: str
    noun: str
    first: int
    last: int

    def __str__(self) -> str:
        if self.first == self.last:
            return f"{self.path}, {self.noun} {self.first}"
        return f"{self.path}, {self.noun}s {self.first} to {self.last}"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What has been done since the last report (less than nothing where it is done again); `note` is for people.

    `num_refused` and, of these, `num_errors` (malformed input) come when a task ends. `in_hand` is what the tokenizer
    begins with; None if it has nothing.
    """

    input_bytes: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_refused: int = 0
    num_errors: int = 0
    note: str | None = None
    in_hand: InHand | None = None

    def __add__(self, other: Progress) -> Progress:
        return Progress(**{name: getattr(self, name) + getattr(other, name) for name in _COUNTS})

    def taken_back(self, note: str) -> Progress:
        """Return the report that undoes this one."""
        return Progress(**{name: -getattr(self, name) for name in _COUNTS}, note=note)


_COUNTS = ("input_bytes", "num_documents", "num_tokens", "num_refused", "num_errors")


class RedoError(Exception):
    """The engine erred on a document of the task: `where` and how."""


def run_task(
    task: Task, settings: TaskSettings, encoder: Encoder, report: Callable[[Progress], None]
) -> dict[str, Any]:
    """Write the task's shards, its rejects and, last, its receipt, which is returned.

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
        return _run_once(task, settings, encoder, count, redone=None)
    except RedoError as error:
        report(done.taken_back(f"task {task.index} is done again with the reference: {error}"))
        return _run_once(task, settings, encoder.without_fast(), report, redone=str(error))


def _run_once(
    task: Task, settings: TaskSettings, encoder: Encoder, report: Callable[[Progress], None], *, redone: str | None
) -> dict[str, Any]:
    rejects = Rejects(on_error=settings.on_error)
    train = SplitWriter(
        settings.corpus, "train", task=task.index, shard_tokens=settings.shard_tokens, docs_schema=settings.docs_schema
    )
    val = SplitWriter(
        settings.corpus / VAL_PARTS.parent,
        VAL_PARTS.name,
        task=task.index,
        shard_tokens=settings.shard_tokens,
        docs_schema=settings.val_schema,
    )
    try:
        with named_disk_errors(settings.corpus):
            _write_documents(task, settings, encoder, report, rejects, train, val)
            splits = {"train": train.finish(), VAL_PARTS.name: val.finish()}
            rejects.write_samples(rejects_path(settings.corpus, task.index))
    except BaseException:
        train.abort()
        val.abort()
        raise
    receipt = {
        "task": task.index,
        "plan": settings.plan_digest,
        "engine": encoder.name,
        "redone": redone,
        "rejects": dict(sorted(rejects.counts.items())),
        "errors": rejects.errors,
        "repaired": dict(sorted(rejects.repaired.items())),
        "splits": {name: [dataclasses.asdict(shard) for shard in shards] for name, shards in splits.items()},
    }
    write_json(receipt_path(settings.corpus, task.index), receipt)
    report(Progress(num_refused=rejects.counts.total(), num_errors=rejects.errors))
    return receipt


def _write_documents(
    task: Task,
    settings: TaskSettings,
    encoder: Encoder,
    report: Callable[[Progress], None],
    rejects: Rejects,
    train: SplitWriter,
    val: SplitWriter,
) -> None:
    shuffler = BlockShuffler(
        train, block_tokens=settings.shuffle_block_tokens, key=f"block|{settings.shuffle_seed}|{task.index}"
    )
    copies = Copies.of_task(settings.corpus / COPIES, task.index) if settings.dedup else None
    nouns = {piece.path: "byte" if piece.format in STREAM_FORMATS else "row" for piece in task.pieces}
    next_place = 0
    for documents in read_documents(task, settings, rejects):
        report(Progress(input_bytes=documents.progress_bytes))
        if copies is not None:
            keep = copies.keep(len(documents))
            rejects.count("duplicate", int(np.count_nonzero(~keep)))
            documents = keep_documents(documents, keep)
        place, next_place = next_place, next_place + len(documents)
        for tokenized, texts, parts in _tokenize(
            documents, task.index, place, nouns[documents.path], settings, encoder, rejects, report
        ):
            report(Progress(num_documents=len(tokenized), num_tokens=len(tokenized.tokens)))
            kept = tokenized
            if settings.val_fraction > 0:
                kept = hold_out(tokenized, texts, settings.val_fraction, val, parts)
            if not settings.provenance:
                kept = dataclasses.replace(kept, docs=None)
            if settings.shuffle_seed is None:
                write(train, kept)
            else:
                shuffler.append(kept)
    shuffler.flush()


def read_documents(task: Task, settings: TaskSettings, rejects: Rejects) -> Iterator[Documents]:
    """Yield the task's documents in the order in which they are tokenized, those too short or too long left out."""
    pieces = (read_piece(piece, settings.columns, rejects) for piece in task.pieces)
    for documents in interleave(pieces, 1 if settings.shuffle_seed is None else INTERLEAVED_PIECES):
        yield by_characters(documents, settings.min_chars, settings.max_chars, rejects)


def _tokenize(
    documents: Documents,
    task: int,
    place: int,
    noun: str,
    settings: TaskSettings,
    encoder: Encoder,
    rejects: Rejects,
    report: Callable[[Progress], None],
) -> Iterator[tuple[Tokenized, pa.LargeStringArray, NDArray[np.int64] | None]]:
    """Yield the documents with their ids, BOS and EOS, and their texts; a text without a token is refused.

    Of texts that were cut into several documents each has its part's number, None where no text was.
    `place` is the number of the task's documents before these. Raises `RedoError` where the engine errs.
    """
    for start, stop in tokenizer_batches(documents, settings.batch_size, encoder.batch_bytes):
        texts = documents.texts.slice(start, stop - start)
        rows, num_bytes = documents.rows[start:stop], documents.num_bytes[start:stop]
        kept = None if documents.kept is None else documents.kept.slice(start, stop - start)
        hand = InHand(path=documents.path, noun=noun, first=int(rows[0]), last=int(rows[-1]))
        report(Progress(in_hand=hand))
        chosen = compared(task, place + start, stop - start)
        crashes: list[Crash] = []
        try:
            if settings.careful:
                (ids, lengths), crashes = encode_apart(encoder, texts)
                compare_apart(encoder, texts, (ids, lengths), chosen)
            else:
                ids, lengths = encoder.encode(texts)
                encoder.compare(texts, (ids, lengths), chosen)
        except EngineDifferenceError as error:
            if error.document is not None:
                hand = dataclasses.replace(hand, first=rows[error.document], last=rows[error.document])
            raise RedoError(f"{encoder.name} erred on {hand}: {error.what}") from error
        except Exception as error:
            raise TokenizerError(
                "the tokenizer failed on a document", where=hand, got=f"{type(error).__name__}: {error}"
            ) from error
        for crash in crashes:
            row = int(rows[crash.document])
            _tell_crash(
                crash, dataclasses.replace(hand, first=row, last=row), texts[crash.document].as_py(), rejects, report
            )
        keep = lengths > 0
        if not keep.all():
            crashed = sum(not crash.served for crash in crashes)
            rejects.count("no_tokens", int(np.count_nonzero(~keep)) - crashed)
            mask = pa.array(keep)
            texts, rows, num_bytes, lengths = texts.filter(mask), rows[keep], num_bytes[keep], lengths[keep]
            kept = None if kept is None else kept.filter(mask)
        tokens, num_tokens = add_ends(ids, lengths, bos_id=settings.bos_id, eos_id=settings.eos_id)
        parts = None
        if settings.max_tokens is not None and (long := num_tokens > settings.max_tokens).any():
            cut = _cut(ids, lengths, long, settings, rejects)
            tokens, num_tokens = add_ends(cut.ids, cut.lengths, bos_id=settings.bos_id, eos_id=settings.eos_id)
            origin, parts = cut.origin, cut.part
            texts, rows, num_bytes = texts.take(pa.array(origin)), rows[origin], cut.share(num_bytes, lengths)
            kept = None if kept is None else kept.take(pa.array(origin))
        docs = provenance_table(documents.path, rows, num_bytes, kept)
        yield Tokenized(tokens=tokens, lengths=num_tokens, num_bytes=num_bytes, docs=docs), texts, parts


def _cut(
    ids: NDArray[np.uint32],
    lengths: NDArray[np.int64],
    long: NDArray[np.bool_],
    settings: TaskSettings,
    rejects: Rejects,
) -> Cut:
    """Do with long documents as the user chose: leave them out, or cut them so that BOS and EOS have room."""
    assert settings.max_tokens is not None
    if settings.long_documents == "skip":
        rejects.count("too_many_tokens", int(np.count_nonzero(long)))
    else:
        rejects.repaired[settings.long_documents] += int(np.count_nonzero(long))
    most = settings.max_tokens - 1 - (settings.bos_id is not None)
    return cut_long(ids, lengths, long, most, policy=settings.long_documents)


def _tell_crash(crash: Crash, where: InHand, text: str, rejects: Rejects, report: Callable[[Progress], None]) -> None:
    """Say which document kills the tokenizer; `TokenizerError` where nothing can tokenize it and none may be left."""
    if crash.served:
        report(Progress(note=f"{crash.engine} dies on {where} ({crash.how}): the reference tokenized it"))
        return
    if rejects.on_error == "fail":
        raise TokenizerError(
            "the tokenizer dies on a document",
            where=where,
            got=f"{crash.how}, {len(text.encode()):,} bytes that begin {text[:60]!r}",
            fix="Mend or remove the document, or leave such documents out and count them with --on_error skip. If "
            "memory ran out, use fewer --num_workers",
        )
    rejects.malformed(
        "engine_crash",
        "the tokenizer dies on a document",
        path=where.path,
        row=where.first,
        place=lambda: f"{where.noun} {where.first}",
        sample=text[:1000].encode(),
    )


def add_ends(
    ids: NDArray[np.uint32], lengths: NDArray[np.int64], *, bos_id: int | None, eos_id: int
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return the documents each ended by exactly one EOS and, with `bos_id`, begun by one BOS; none is doubled.

    `lengths` are at least 1 and sum to `len(ids)`.
    """
    ends = np.cumsum(lengths)
    without_eos = ids[ends - 1] != eos_id
    new_lengths = lengths + without_eos
    if bos_id is not None:
        without_bos = ids[ends - lengths] != bos_id
        new_lengths += without_bos
    new_ends = np.cumsum(new_lengths)
    added = np.zeros(int(new_ends[-1]) if len(new_ends) else 0, dtype=bool)
    added[new_ends[without_eos] - 1] = True
    tokens = np.empty(len(added), dtype=np.uint32)
    if bos_id is not None:
        new_starts = (new_ends - new_lengths)[without_bos]
        added[new_starts] = True
        tokens[new_starts] = bos_id
    tokens[new_ends[without_eos] - 1] = eos_id
    tokens[~added] = ids
    return tokens, new_lengths


def provenance_table(
    path: str, rows: NDArray[np.uint64], num_bytes: NDArray[np.int64], kept: pa.Table | None
) -> pa.Table:
    arrays = [pa.repeat(pa.scalar(path), len(rows)), pa.array(rows), pa.array(num_bytes.astype(np.uint32))]
    table = pa.table(arrays, schema=pa.schema(PROVENANCE_FIELDS))
    if kept is not None:
        for field in kept.schema:
            table = table.append_column(field, kept.column(field.name))
    return table


def hold_out(
    tokenized: Tokenized,
    texts: pa.LargeStringArray,
    val_fraction: float,
    val: SplitWriter,
    parts: NDArray[np.int64] | None = None,
) -> Tokenized:
    """Write what is held out, with the hash by which copies are told; return the rest.

    All `parts` of a text are on the same side, and are no copies of each other.
    """
    mask = held_out(texts, val_fraction)
    if not mask.any():
        return tokenized
    chosen = np.flatnonzero(mask)
    documents = tokenized.take(chosen)
    assert documents.docs is not None, "provenance is made for all, and left out when train is written"
    hashes = text_hashes(texts.take(pa.array(chosen)), None if parts is None else parts[chosen])
    val.append(documents.tokens, documents.lengths, documents.docs.append_column(HASH_COLUMN, hashes))
    return tokenized.take(np.flatnonzero(~mask))
