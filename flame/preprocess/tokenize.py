"""From documents to their ids, BOS and EOS included: batch by batch, checked, and cut where they are too long."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flame.errors import TokenizerError
from flame.preprocess.blocks import Tokenized
from flame.preprocess.careful import Crash, compare_apart, encode_apart
from flame.preprocess.engine_check import Encoder, EngineDifferenceError, compared
from flame.preprocess.filters import Cut, cut_long
from flame.preprocess.rejects import Rejects
from flame.preprocess.reports import InHand, Progress
from flame.preprocess.task_output import provenance_table
from flame.preprocess.task_settings import TaskSettings
from flame.preprocess.texts import Documents, tokenizer_batches


class RedoError(Exception):
    """The engine erred on a document of the task: `where` and how."""


def tokenized(
    documents: Documents,
    task: int,
    place: int,
    noun: str,
    settings: TaskSettings,
    encoder: Encoder,
    rejects: Rejects,
    report: Callable[[Progress], None],
    *,
    careful: bool = False,
) -> Iterator[tuple[Tokenized, pa.LargeStringArray, NDArray[np.int64] | None]]:
    """Yield the documents with their ids, BOS and EOS, and their texts; a text without a token is refused.

    Of texts that were cut into several documents each has its part's number, None where no text was.
    `place` is the number of the task's documents before these, `noun` what `rows` count; with `careful` a batch is
    encoded in a process of its own. Raises `RedoError` where the engine errs, `TokenizerError` where nothing can
    tokenize a document.
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
            if careful:
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
                "the tokenizer failed on a document",
                where=hand,
                got=f"{type(error).__name__}: {error}",
                fix="Mend or remove the document; if memory ran out, use fewer --num_workers",
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
