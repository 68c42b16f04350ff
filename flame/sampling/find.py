"""`flame-mix find`: the samples that documents came in, computed back from their tokens without scanning a run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from flame.config import by_name, option, parse_count
from flame.errors import UsageError
from flame.sampling.documents import WantedDocuments
from flame.sampling.history import (
    Stretch,
    first_step,
    latest_step,
    mixture_of_segment,
    read_segments,
    stretches_of,
)
from flame.sampling.mixture import Mixture
from flame.sampling.mixture_file import read_mixture
from flame.sampling.occurrences import Occurrences, epochs_of, occurrences
from flame.sampling.sampler import MAX_SAMPLES, Sampler
from flame.sampling.show import table
from flame.sampling.sources import open_mixture
from flame.sampling.trace import RESERVED, parse_stretch
from flame.shards.reader import Split

_ROWS_AT_ONCE = 1000  # of the table for people: columns are as wide as these need
_PLACE = ("step", "rank", "micro_step", "batch_row")
_COLUMNS = ("k", "source", "epoch", "window", "document", "source_file", "row", "start", "num_tokens")


def parse_source(text: str) -> tuple[str, Path | None]:
    """Return (source, None) of NAME, and (source, corpus folder) of NAME=PATH."""
    name, equals, path = text.partition("=")
    if not name or (equals and not path):
        raise UsageError("it names no source", expected="NAME, or NAME=PATH for where its corpus lies now")
    return name, Path(path) if equals else None


def parse_regex(text: str) -> re.Pattern[str]:
    """Return the compiled regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        what = f"it is no regular expression: {error}"
        raise UsageError(what, expected=r"one of Python's, such as example\.com/") from error


def parse_condition(text: str) -> tuple[str, re.Pattern[str]]:
    """Return (column, pattern) of NAME=REGEX."""
    name, equals, pattern = text.partition("=")
    if not equals or not name:
        raise UsageError("it names no column and pattern", expected="NAME=REGEX, such as language=^en")
    return name, parse_regex(pattern)


@dataclass(frozen=True, kw_only=True)
class FindOptions:
    """The options of `flame-mix find`."""

    mixture: Path | None = option(None, help="mixture manifest: where documents will come", positional=True)
    window_len: int | None = option(None, help="tokens of a sample, as the run's training.window_len", unit="tokens")
    tokens: int | None = option(None, help="length of the run of the mixture", unit="tokens", parse=parse_count)
    run: Path | None = option(None, help="run folder: where documents came in it, up to its latest step")
    source: tuple[tuple[str, Path | None], ...] = option(
        (),
        help="only documents of this source; NAME=PATH says instead where a source's corpus lies now",
        metavar="NAME[=PATH]",
        parse=parse_source,
        repeat=True,
    )
    document: tuple[range, ...] = option(
        (),
        help="number of a document in its source's split, from 0, or several as 10:20 (20 is not in it), 10: or :20",
        metavar="N|N:M",
        parse=parse_stretch,
        repeat=True,
    )
    where_column: tuple[tuple[str, re.Pattern[str]], ...] = option(
        (),
        help="documents in whose kept column this regular expression of Python's is found; reads all docs.parquet of "
        "the sources, a row group at a time",
        metavar="NAME=REGEX",
        parse=parse_condition,
        repeat=True,
    )
    url: Any = option(None, help="the same for the column `url`", metavar="REGEX", parse=parse_regex)
    source_file: str | None = option(
        None, help="documents of this file, as trace names it, or as its name ends after a slash", metavar="FILE"
    )
    row: tuple[range, ...] = option(
        (),
        help="with --source_file, the row (jsonl, txt: byte offset) of a document, as trace tells it, or several",
        metavar="N|N:M",
        parse=parse_stretch,
        repeat=True,
    )
    json: bool = option(False, help="print one JSON object for each sample that holds tokens of a document")

    def __post_init__(self) -> None:
        if self.run is not None:
            if self.mixture is not None or self.window_len is not None or self.tokens is not None:
                raise UsageError("--run knows its mixture, window_len and tokens itself", fix="Leave them away")
        elif self.mixture is None or self.window_len is None or self.tokens is None:
            raise UsageError(
                "find needs --run, or a mixture, --window_len and --tokens",
                fix="Such as: flame-mix find --run exp/a --source web --document 4711",
            )
        elif self.window_len < 1:
            raise UsageError("--window_len is no length", got=self.window_len, expected="1 or more")
        elif self.tokens // self.window_len >= MAX_SAMPLES:
            raise UsageError("--tokens goes beyond the last sample", expected=f"at most {MAX_SAMPLES} samples")
        if not (self.document or self.wanted.by_origin):
            raise UsageError(
                "flame-mix find looks for no document",
                expected="--document, --url, --where_column or --source_file",
            )
        if self.row and self.source_file is None:
            raise UsageError("--row is a row of a file", fix="Name it: --source_file")

    @property
    def wanted(self) -> WantedDocuments:
        """Which documents are looked for."""
        columns = self.where_column if self.url is None else (("url", self.url), *self.where_column)
        return WantedDocuments(
            numbers=self.document, columns=columns, source_file=self.source_file or None, rows=self.row
        )


def find(options: FindOptions) -> int:
    """Print each sample that holds tokens of a wanted document, and say on stderr how far was looked."""
    names = [name for name, path in options.source if path is None]
    overrides = by_name(((name, path) for name, path in options.source if path is not None), "--source")
    if options.run is not None:
        found = find_in_run(options.run, options.wanted, names, overrides=overrides)
        until = f"by step {latest_step(options.run):,}"
    else:
        assert options.mixture is not None and options.window_len is not None and options.tokens is not None
        mixture = read_mixture(options.mixture, overrides=overrides)
        found = find_in_mixture(mixture, options.window_len, options.tokens, options.wanted, names)
        until = f"in {options.tokens:,} tokens"
    number = 0
    for number, occurrence in enumerate(_printed(found, as_json=options.json), start=1):  # noqa: B007
        pass
    times = {0: "nowhere", 1: "once"}.get(number, f"{number:,} times")  # a sample may hold several of the documents
    print(f"flame-mix find: found {times} {until}", file=sys.stderr)
    return 0


def find_in_mixture(
    mixture: Mixture, window_len: int, num_tokens: int, wanted: WantedDocuments, names: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield an object a sample that holds tokens of a wanted document, of those that begin within `num_tokens`.

    By source (those named, or all), document and sample. Cost: see `occurrences`, and `WantedDocuments.find`.
    """
    sources = _sources(mixture, names, wanted)
    limit = range(-(-num_tokens // window_len))
    for found, split, source in _find(mixture, window_len, limit, wanted, sources):
        for occurrence in found.rows():
            yield _told(mixture, source, split, occurrence)


def find_in_run(
    run: Path, wanted: WantedDocuments, names: Sequence[str] = (), *, overrides: Mapping[str, Path] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the objects of `find_in_mixture` for what a run took up to its latest step, with step, rank and row.

    Steps that a resume took back are left out. Data segments, and mixtures that a run changed to, come one after the
    other. Raises `UsageError` for a source that none of them has.
    """
    segments = read_segments(run)
    steps = range(first_step(segments), latest_step(run) + 1)
    stretches = stretches_of(segments, steps) if steps else []
    drawn = [
        (mixture_of_segment(run, own[0].segment, overrides or {}), own)
        for own in (list(group) for _, group in groupby(stretches, key=lambda stretch: stretch.segment.order))
    ]
    for name in names:
        if drawn and not any(name == source.name for mixture, _ in drawn for source in mixture.sources):
            _sources(drawn[-1][0], [name], wanted)  # raises
    for mixture, own in drawn:
        its_own = [name for name in names if any(name == source.name for source in mixture.sources)]
        if names and not its_own:
            continue
        sources = _sources(mixture, its_own, wanted)
        limit = range(own[0].samples.start, own[-1].samples.stop)
        for found, split, source in _find(mixture, own[0].segment.window_len, limit, wanted, sources):
            which = np.searchsorted([stretch.samples.start for stretch in own], found.k, side="right") - 1
            for occurrence, stretch in zip(found.rows(), which.tolist(), strict=True):
                yield {**_place(own[stretch], occurrence["k"]), **_told(mixture, source, split, occurrence)}


def _sources(mixture: Mixture, names: Sequence[str], wanted: WantedDocuments) -> list[int]:
    """Return the numbers of the sources that are asked for: all where none is named, and numbers say no documents."""
    known = [source.name for source in mixture.sources]
    for name in names:
        if name not in known:
            raise UsageError("the mixture has no such source", got=name, expected="one of " + ", ".join(known))
    chosen = [number for number, name in enumerate(known) if not names or name in names]
    if wanted.numbers and len(chosen) > 1:
        raise UsageError(
            "--document numbers the documents of one source", expected="--source and one of " + ", ".join(known)
        )
    return chosen


def _find(
    mixture: Mixture, window_len: int, limit: range, wanted: WantedDocuments, sources: Sequence[int]
) -> Iterator[tuple[Occurrences, Split, int]]:
    splits = open_mixture(mixture)
    sampler = Sampler(mixture, splits, window_len)
    for source in sources:
        split = splits[source]
        if wanted.by_origin:
            name = mixture.sources[source].name
            print(
                f"flame-mix find: looks through where {split.num_documents:,} documents of {name} came from",
                file=sys.stderr,
            )
        epochs = epochs_of(sampler, source, limit)
        for documents in wanted.find(split):
            yield occurrences(sampler, split, source, documents, epochs, limit), split, source
            sys.stdout.flush()  # told as it is found


def _place(stretch: Stretch, k: int) -> dict[str, int]:
    """Return where a sample of a stretch of steps was: its step, rank, micro-step and row."""
    segment = stretch.segment
    step, place = divmod(k - stretch.samples.start, segment.samples_per_step)
    row = place // (segment.seq_len // segment.window_len)
    micro_step, row = divmod(row, segment.dp_size * segment.micro_batch)
    rank, row = divmod(row, segment.micro_batch)
    return dict(zip(_PLACE, (stretch.first_step + step, rank, micro_step, row), strict=True))


def _told(mixture: Mixture, source: int, split: Split, occurrence: Mapping[str, int]) -> dict[str, Any]:
    origin = split.provenance(occurrence["document"])
    values = {
        **occurrence,
        "source": mixture.sources[source].name,
        "source_file": origin.pop("source_file", None),
        "row": origin.pop("row", None),
    }
    own = {name: values[name] for name in _COLUMNS}
    return own | {name: value for name, value in origin.items() if name not in (*RESERVED, *own)}


def _printed(found: Iterator[dict[str, Any]], *, as_json: bool) -> Iterator[dict[str, Any]]:
    """Yield what is found, printed: an object a line, or a table."""
    if as_json:
        for occurrence in found:
            print(json.dumps(occurrence, ensure_ascii=False, allow_nan=False))
            yield occurrence
        return
    header = True
    while some := list(islice(found, _ROWS_AT_ONCE)):
        columns = [name for name in (*_PLACE, *_COLUMNS) if name in some[0]]
        rows = [["-" if row[name] is None else str(row[name]) for name in columns] for row in some]
        print("\n".join(table([columns, *rows] if header else rows)))
        yield from some
        header = False
