"""One task of a conversion, from its pieces to its receipt: read ids, decode them, shuffle, write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flame.errors import InputError, TokenizerError
from flame.files import named_disk_errors
from flame.preprocess.blocks import INTERLEAVED_PIECES, Tokenized, interleave
from flame.preprocess.plan import Piece, Task
from flame.preprocess.readers.formats import check_unchanged
from flame.preprocess.rejects import Rejects
from flame.preprocess.reports import Progress
from flame.preprocess.sources.formats import SOURCES
from flame.preprocess.sources.rows import TokenRows
from flame.preprocess.task_output import TaskOutput, provenance_table, write_receipt
from flame.preprocess.task_settings import TaskSettings
from flame.preprocess.texts import Documents, make_documents
from flame.preprocess.tokenize import add_ends
from flame.preprocess.tokenizer import RENEW
from flame.preprocess.workers import Loaded
from flame.shards.tokenizer import text_can_give

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ConvertSettings:
    """What every task of a conversion is told: `build` as the tasks of a build are, and ids are below `num_ids`."""

    build: TaskSettings
    source: str
    num_ids: int

    def run(
        self,
        task: Task,
        decoder: Decoder,
        report: Callable[[Progress], None],
        *,
        careful: bool = False,
        wait: bool = True,
    ) -> bool:
        """Run a task, whatever happened to an earlier attempt; nobody else claims it."""
        report(run_task(task, self, decoder))
        return True


@dataclass(frozen=True, kw_only=True)
class DecodeRequest:
    """What loads the tokenizer that turns ids back to text, for every task."""

    tokenizer_json: bytes
    parse_special: bool
    eos_id: int
    bos_id: int | None

    def load(self) -> tuple[Decoder, Loaded]:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_buffer(self.tokenizer_json)
        except Exception as error:  # `tokenizers` raises nothing narrower
            raise TokenizerError("`tokenizers` cannot load the tokenizer.json", got=str(error), fix=RENEW) from error
        tokenizer.encode_special_tokens = not self.parse_special
        decoder = Decoder(tokenizer, eos_id=self.eos_id, bos_id=self.bos_id, parse_special=self.parse_special)
        return decoder, Loaded()


@dataclass(frozen=True, kw_only=True)
class TokenDocuments(Documents):
    """Documents whose texts were decoded from their `ids` (uint32), which lie one behind the other by `lengths`."""

    ids: NDArray[np.uint32]
    lengths: NDArray[np.int64]


class Decoder:
    """The tokenizer that made the ids, and what its EOS is to a document. `eos_is_text`: a text may hold it."""

    def __init__(self, tokenizer: Tokenizer, *, eos_id: int, bos_id: int | None, parse_special: bool) -> None:
        self.eos_id = eos_id
        self.bos_id = bos_id
        self.eos_is_text = parse_special or text_can_give(tokenizer, eos_id)
        self._tokenizer = tokenizer

    def texts(self, ids: NDArray[np.uint32], lengths: NDArray[np.int64]) -> list[str]:
        """Return each document's text: without the EOS at its end and the BOS at its start, as `decode` prints it."""
        ends = np.cumsum(lengths)
        starts = ends - lengths
        if self.bos_id is not None:
            starts = starts + _holds(ids, starts, lengths > 0, self.bos_id)
        ends = ends - _holds(ids, ends - 1, ends > starts, self.eos_id)
        documents = [ids[a:b].tolist() for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        texts: list[str] = self._tokenizer.decode_batch(documents, skip_special_tokens=False)
        return texts


def _holds(
    ids: NDArray[np.uint32], places: NDArray[np.int64], there: NDArray[np.bool_], token: int
) -> NDArray[np.bool_]:
    """Return which of the places that are `there` hold the token."""
    found = np.zeros(len(places), dtype=bool)
    found[there] = ids[places[there]] == token
    return found


def run_task(task: Task, settings: ConvertSettings, decoder: Decoder) -> Progress:
    """Write the task's shards and, last, its receipt, as a task of a build does; returns what was done.

    Cost: memory is bounded by a block of the shuffle, `INTERLEAVED_PIECES` batches, and the largest document.
    """
    rejects = Rejects(on_error="fail")
    with TaskOutput(task.index, settings.build) as output, named_disk_errors(settings.build.corpus):
        done = _write_documents(task, settings, decoder, rejects, output)
        splits = output.finish()
    write_receipt(task.index, settings.build, rejects, splits, engine=settings.source)
    return done


def _write_documents(
    task: Task, settings: ConvertSettings, decoder: Decoder, rejects: Rejects, output: TaskOutput
) -> Progress:
    build = settings.build
    num_documents = num_tokens = 0
    pieces = (_read_piece(piece, settings, decoder, rejects) for piece in task.pieces)
    for documents in interleave(pieces, 1 if build.shuffle_seed is None else INTERLEAVED_PIECES):
        assert isinstance(documents, TokenDocuments)
        tokens, lengths = add_ends(documents.ids, documents.lengths, bos_id=build.bos_id, eos_id=build.eos_id)
        num_documents, num_tokens = num_documents + len(lengths), num_tokens + len(tokens)
        docs = provenance_table(documents.path, documents.rows, documents.num_bytes, documents.kept)
        batch = Tokenized(tokens=tokens, lengths=lengths, num_bytes=documents.num_bytes, docs=docs)
        output.append(batch, documents.texts)
    return Progress(input_bytes=task.num_bytes, num_documents=num_documents, num_tokens=num_tokens)


def _read_piece(piece: Piece, settings: ConvertSettings, decoder: Decoder, rejects: Rejects) -> Iterator[Documents]:
    check_unchanged(piece)
    for rows in SOURCES[settings.source].read(piece, settings.build.columns):
        yield make_token_documents(rows, decoder, rejects, num_ids=settings.num_ids)


def make_token_documents(rows: TokenRows, decoder: Decoder, rejects: Rejects, *, num_ids: int) -> TokenDocuments:
    """Return what is a document among rows; null and empty ones, and those of blank text, are counted in `rejects`.

    A run of EOS at the end of a row, as padding leaves it, becomes one and is counted as repaired. Raises `InputError`
    for an id that the tokenizer does not have, and for EOS inside a document where no text can give it.
    """
    _check_ids(rows, num_ids)
    ids, lengths = rows.ids.astype(np.uint32), rows.lengths
    if not decoder.eos_is_text:
        ids, lengths, shortened = _one_eos_at_most(ids, lengths, decoder.eos_id)
        rejects.repaired.update({"repeated_eos": shortened} if shortened else {})
        _refuse_inner_eos(rows, ids, lengths, decoder.eos_id)
    texts = pa.array(decoder.texts(ids, lengths), pa.large_string(), mask=rows.null)
    numbers = np.arange(rows.first_row, rows.first_row + len(lengths), dtype=np.uint64)
    documents = make_documents(texts, numbers, rows.kept, rejects, path=rows.path, progress_bytes=rows.progress_bytes)
    keep = np.zeros(len(lengths), dtype=bool)
    keep[(documents.rows - np.uint64(rows.first_row)).astype(np.int64)] = True
    return TokenDocuments(
        path=documents.path,
        texts=documents.texts,
        rows=documents.rows,
        num_bytes=documents.num_bytes,
        kept=documents.kept,
        progress_bytes=documents.progress_bytes,
        ids=ids if keep.all() else ids[np.repeat(keep, lengths)],
        lengths=lengths[keep],
    )


def _check_ids(rows: TokenRows, num_ids: int) -> None:
    if len(rows.ids) == 0 or (rows.ids.min() >= 0 and rows.ids.max() < num_ids):
        return
    place = int(np.flatnonzero((rows.ids < 0) | (rows.ids >= num_ids))[0])
    raise InputError(
        "a token id is not one of the tokenizer's",
        where=f"{rows.path}, {rows.noun} {_row_of(rows, rows.lengths, place)}",
        got=f"id {rows.ids[place]}",
        expected=f"0 to {num_ids - 1}",
        fix="Name the tokenizer that made these ids in --tokenizer",
    )


def _row_of(rows: TokenRows, lengths: NDArray[np.int64], place: int) -> int:
    return rows.first_row + int(np.searchsorted(np.cumsum(lengths), place, side="right"))


def _one_eos_at_most(
    ids: NDArray[np.uint32], lengths: NDArray[np.int64], eos_id: int
) -> tuple[NDArray[np.uint32], NDArray[np.int64], int]:
    """Return the rows with a run of EOS at their end cut to one, and how many were longer."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    is_eos = ids == eos_id
    # The last place of anything else, at or before each place: what lies behind it in a row is the run of EOS.
    last_other = np.maximum.accumulate(np.where(is_eos, -1, np.arange(len(ids))))
    run = np.zeros(len(lengths), dtype=np.int64)
    there = lengths > 0
    last = ends[there] - 1
    run[there] = last - np.maximum(last_other[last], starts[there] - 1)
    extra = np.maximum(run - 1, 0)
    if not extra.any():
        return ids, lengths, 0
    new_lengths = lengths - extra
    within = np.arange(len(ids)) - np.repeat(starts, lengths)
    return ids[within < np.repeat(new_lengths, lengths)], new_lengths, int(np.count_nonzero(extra))


def _refuse_inner_eos(rows: TokenRows, ids: NDArray[np.uint32], lengths: NDArray[np.int64], eos_id: int) -> None:
    places = np.flatnonzero(ids == eos_id)
    if not len(places):
        return
    inner = places[~np.isin(places, np.cumsum(lengths) - 1)]
    if not len(inner):
        return
    row = _row_of(rows, lengths, int(inner[0]))
    raise InputError(
        f"a {rows.noun} holds the EOS token before its end, so it is not one text",
        where=f"{rows.path}, {rows.noun} {row}",
        got=f"EOS {eos_id} at {int(inner[0] - (np.cumsum(lengths) - lengths)[row - rows.first_row])}",
        fix=f"If the {rows.noun}s are windows of several texts, build the corpus from the text: where one was cut is "
        "not to be seen. If the text itself was tokenized with its special tokens parsed, add --parse_special",
    )
