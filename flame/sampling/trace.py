"""`flame-mix trace`: the documents behind samples, or behind steps of a run, and the part of each that is in them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flame.config import by_name, option, parse_count
from flame.errors import UsageError
from flame.sampling.history import (
    Segment,
    Stretch,
    check_taken,
    first_step,
    latest_step,
    mixture_of_segment,
    read_segments,
    stretches_of,
)
from flame.sampling.mixture import Mixture
from flame.sampling.mixture_file import read_mixture
from flame.sampling.sampler import MAX_SAMPLES, Sampler
from flame.sampling.show import parse_override
from flame.sampling.sources import open_mixture
from flame.shards.packed import PackedSplit

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from flame.shards.reader import Split


OPEN = 1 << 256  # the end of a stretch that has none
_SAMPLES_AT_ONCE = 1024

# What an object says itself; a kept column of such a name is left away.
RESERVED = ("step", "rank", "micro_step", "batch_row", "k", "source", "document", "ids", "text")


def parse_stretch(text: str) -> range:
    """Return the numbers of `12`, or of `10:20`, `10:` or `:20`, whose end is not in them; without one it is `OPEN`."""
    first, colon, stop = text.partition(":")
    start = parse_count(first) if first.strip() or not colon else 0
    end = start + 1 if not colon else parse_count(stop) if stop.strip() else OPEN
    if end <= start:
        raise UsageError("it holds no number", expected="a first number, and a higher one to end before")
    return range(start, end)


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """The options of `flame-mix trace`."""

    mixture: Path | None = option(None, help="mixture manifest", positional=True)
    source: tuple[tuple[str, Path], ...] = option(
        (),
        help="where a source's corpus lies now, if not where the manifest says",
        metavar="NAME=PATH",
        parse=parse_override,
        repeat=True,
    )
    window_len: int | None = option(None, help="tokens of a sample, as the run's training.window_len", unit="tokens")
    sample: tuple[range, ...] = option(
        (),
        help="number of a sample, from 0 over the whole run, or several as 100:110 (110 is not in it)",
        metavar="K|K:L",
        parse=parse_stretch,
        repeat=True,
    )
    run: Path | None = option(None, help="run folder: trace steps of it, instead of samples of a mixture")
    step: tuple[range, ...] = option(
        (),
        help="with --run, a step, from 1, or several as 100:110 (110 is not in it), 100: (up to the latest) or :110",
        metavar="N|N:M",
        parse=parse_stretch,
        repeat=True,
    )
    rank: tuple[range, ...] = option(
        (),
        help="with --run, only what this data-parallel rank took, from 0, or several as 0:4 (4 is not in it)",
        metavar="R|R:S",
        parse=parse_stretch,
        repeat=True,
    )
    ids: bool = option(False, help="with --json, the token ids too")
    json: bool = option(False, help="print one JSON object a document")

    def __post_init__(self) -> None:
        if self.run is None:
            self._check_samples()
        elif not self.step or self.mixture is not None or self.window_len is not None or self.sample:
            raise UsageError(
                "flame-mix trace --run takes a step, and knows the mixture and the samples itself",
                fix="Such as: flame-mix trace --run exp/a --step 12345 [--rank 3]",
            )
        if self.ids and not self.json:
            raise UsageError("--ids goes with --json")

    def _check_samples(self) -> None:
        if self.step or self.rank:
            raise UsageError("--step and --rank go with --run", fix="flame-mix trace --run exp/a --step 12345")
        if self.mixture is None or self.window_len is None or not self.sample:
            raise UsageError(
                "trace needs a mixture, --window_len and --sample, or --run and --step",
                fix="Such as: flame-mix trace mix.json --window_len 4096 --sample 123",
            )
        if self.window_len < 1:
            raise UsageError("--window_len is no length", got=self.window_len, expected="1 or more")
        last = max(stretch.stop for stretch in self.sample)
        if last == OPEN:
            raise UsageError("--sample has no end: a mixture is drawn from for ever", expected="such as 100:110")
        if last > MAX_SAMPLES:
            raise UsageError("--sample goes beyond the last sample", expected=f"at most {MAX_SAMPLES - 1}")


def trace(options: TraceOptions) -> int:
    """Print the documents of each sample, in order and as they are found, for people or as JSON lines."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(encoding="utf-8")  # any text, whatever the locale says
    overrides = by_name(options.source, "--source")
    if options.run is not None:
        found = trace_steps(options.run, options.step, options.rank, overrides=overrides, ids=options.ids)
    else:
        assert options.mixture is not None and options.window_len is not None, "checked when the options were made"
        opened = OpenedMixture(read_mixture(options.mixture, overrides=overrides), options.window_len)
        found = (part for stretch in options.sample for part in trace_stretch(opened, stretch, ids=options.ids))
    for document in found:
        if document["start"] == 0:  # of a sample: a reader who has seen enough is noticed here
            sys.stdout.flush()
        print(json.dumps(document, ensure_ascii=False, allow_nan=False) if options.json else _told(document))
    return 0


class OpenedMixture:
    """A mixture, its splits, the order of its samples, and the tokenizer that all its corpora share."""

    def __init__(self, mixture: Mixture, window_len: int) -> None:
        from flame.shards.tokenizer import load_tokenizer

        self.mixture = mixture
        self.splits = open_mixture(mixture)
        self.sampler = Sampler(mixture, self.splits, window_len)
        self.tokenizer = load_tokenizer(self.splits[0].corpus.path)


def trace_samples(
    mixture: Mixture, window_len: int, ks: Sequence[int], *, ids: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield an object a document that a sample holds tokens of (not the token that follows, which is a label only)."""
    return _traced(OpenedMixture(mixture, window_len), np.array(ks, dtype=np.int64), ids=ids)


def trace_stretch(opened: OpenedMixture, ks: range, *, ids: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the objects of `trace_samples` for samples in a row, however many: some are located at a time."""
    for first in range(ks.start, ks.stop, _SAMPLES_AT_ONCE):
        yield from _traced(opened, np.arange(first, min(first + _SAMPLES_AT_ONCE, ks.stop)), ids=ids)


def _traced(opened: OpenedMixture, ks: NDArray[np.int64], *, ids: bool) -> Iterator[dict[str, Any]]:
    located, window_len = opened.sampler.locate(ks), opened.sampler.window_len
    for k, source, offset in zip(ks.tolist(), located.source.tolist(), located.offset.tolist(), strict=True):
        split, name = opened.splits[source], opened.mixture.sources[source].name
        begin = 0
        for start, stop in (
            split.stretches(offset) if isinstance(split, PackedSplit) else [(offset, offset + window_len)]
        ):
            for part in parts_of_window(split, start, stop, opened.tokenizer, ids=ids):
                yield {"k": k, "source": name, **part, "start": begin + part["start"]}
            begin += stop - start


def trace_steps(
    run: Path,
    steps: Sequence[range],
    ranks: Sequence[range] = (),
    *,
    overrides: Mapping[str, Path] | None = None,
    ids: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield the objects of `trace_samples` for what steps of a run took, each with its step, rank, micro-step and row.

    Stretches of steps come as they are asked for, and each step in the order of its global batch; all `ranks` where
    none is named. Raises `UsageError` for a folder without a run, and ranks that it had in none of the steps,
    `FlameError` for a step that it has not taken: all before the first object.
    """
    segments = read_segments(run)
    stretches = [stretch for asked in steps for stretch in stretches_of(segments, _taken(run, segments, asked))]
    _check_ranks(run, ranks, stretches)
    opened: OpenedMixture | None = None
    order: tuple[str, int, int] | None = None
    for stretch in stretches:
        segment = stretch.segment
        if opened is None or order != segment.order:
            order, opened = segment.order, None  # the last one's tables are dropped before these are made
            opened = OpenedMixture(mixture_of_segment(run, segment, overrides or {}), segment.window_len)
        for step in range(stretch.first_step, stretch.stop_step):
            places = [
                (int(k), {"step": step, "rank": dp_rank, "micro_step": micro_step, "batch_row": row})
                for (micro_step, dp_rank, row, _), k in np.ndenumerate(segment.samples_of(step))
                if not ranks or any(dp_rank in asked for asked in ranks)
            ]
            if not places:
                continue  # a step of fewer ranks than another that is asked for
            place_of = dict(places)
            for document in _traced(opened, np.array(list(place_of), dtype=np.int64), ids=ids):
                yield {**place_of[document["k"]], **document}


def _taken(run: Path, segments: list[Segment], steps: range) -> range:
    """Return the steps that are meant, all of them taken: an open end is the latest one, an absent start the first."""
    start = first_step(segments) if steps.start == 0 and steps.stop > 1 else steps.start
    if start < 1:
        raise UsageError("steps are numbered from 1", got=start)
    if steps.stop != OPEN:
        check_taken(run, steps.stop - 1)
        return range(start, steps.stop)
    latest = latest_step(run)
    check_taken(run, start)
    return range(start, max(latest, start) + 1)


def _check_ranks(run: Path, ranks: Sequence[range], stretches: Sequence[Stretch]) -> None:
    most = max(stretch.segment.dp_size for stretch in stretches)
    for asked in ranks:
        last = asked.start if asked.stop == OPEN else asked.stop - 1
        if last >= most:
            raise UsageError(
                "the run had no such rank in these steps", got=last, expected=f"0 to {most - 1}", where=run
            )


def parts_of_window(
    split: Split, start: int, stop: int, tokenizer: Tokenizer, *, ids: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield an object a document that has tokens in `[start, stop)` of a split; with `ids`, those tokens too."""
    document, begin = split.document_containing(start), start
    while begin < stop:
        first, last = split.document_bounds(document)
        end = min(last, stop)
        origin = split.provenance(document)
        yield {
            "document": document,
            "source_file": origin.pop("source_file", None),
            "row": origin.pop("row", None),
            "start": begin - start,
            "num_tokens": end - begin,
            **({"ids": split.read(begin, end).tolist()} if ids else {}),
            "text": _text(split, begin, end, (first, last), tokenizer),
            **{name: value for name, value in origin.items() if name not in RESERVED},
        }
        document, begin = document + 1, end


def _text(split: Split, begin: int, end: int, bounds: tuple[int, int], tokenizer: Tokenizer) -> str:
    """Return the text of a part of a document: its own EOS and BOS left out, where they are inside."""
    info = split.corpus.manifest.tokenizer
    ids = split.read(begin, end).tolist()
    if end == bounds[1]:
        ids = ids[:-1]
    if begin == bounds[0] and info.bos == "always" and ids[:1] == [info.bos_id]:
        ids = ids[1:]
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def _told(found: dict[str, Any]) -> str:
    origin = "" if found["source_file"] is None else f", {found['source_file']} row {found['row']}"
    step = f"step {found['step']}, rank {found['rank']}, " if "step" in found else ""
    place = f"tokens {found['start']} to {found['start'] + found['num_tokens'] - 1}"
    document = f"{found['source']} document {found['document']}{origin}"
    return f"--- {step}sample {found['k']}, {document}, {place}\n{found['text']}"
