"""`flame-mix trace`: the documents behind a sample, or behind a step of a run, and the part of each that is in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flame.config import option, parse_count
from flame.errors import UsageError
from flame.sampling.history import check_taken, mixture_of_segment, read_segments, segment_of_step
from flame.sampling.mixture import Mixture, open_mixture, read_mixture
from flame.sampling.sampler import MAX_SAMPLES, Sampler
from flame.sampling.show import parse_override

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from flame.shards.reader import Split


# What an object says itself; a kept column of such a name is left away.
RESERVED = ("step", "rank", "micro_step", "batch_row", "k", "source", "document", "ids", "text")


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
    sample: tuple[int, ...] = option(
        (), help="number of a sample, from 0 over the whole run", metavar="K", parse=parse_count, repeat=True
    )
    run: Path | None = option(None, help="run folder: trace a step of it, instead of samples of a mixture")
    step: int | None = option(None, help="with --run, the step, from 1")
    rank: int | None = option(None, help="with --run, only what this data-parallel rank took, from 0")
    ids: bool = option(False, help="with --json, the token ids too")
    json: bool = option(False, help="print one JSON object a document")

    def __post_init__(self) -> None:
        if self.run is None:
            self._check_samples()
        elif self.step is None or self.mixture is not None or self.window_len is not None or self.sample:
            raise UsageError(
                "flame-mix trace --run takes a step, and knows the mixture and the samples itself",
                fix="Such as: flame-mix trace --run exp/a --step 12345 [--rank 3]",
            )
        if self.ids and not self.json:
            raise UsageError("--ids goes with --json")

    def _check_samples(self) -> None:
        if self.step is not None or self.rank is not None:
            raise UsageError("--step and --rank go with --run", fix="flame-mix trace --run exp/a --step 12345")
        if self.mixture is None or self.window_len is None or not self.sample:
            raise UsageError(
                "flame-mix trace needs a mixture, --window_len and --sample, or --run and --step",
                fix="Such as: flame-mix trace mix.json --window_len 4096 --sample 123",
            )
        if self.window_len < 1:
            raise UsageError("--window_len is no length", got=self.window_len, expected="1 or more")
        if max(self.sample) >= MAX_SAMPLES:
            raise UsageError("--sample goes beyond the last sample", expected=f"at most {MAX_SAMPLES - 1}")


def trace(options: TraceOptions) -> int:
    """Print the documents of each sample, in order, for people or as JSON lines."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(encoding="utf-8")  # any text, whatever the locale says
    overrides = dict(options.source)
    if options.run is not None:
        assert options.step is not None, "checked when the options were made"
        found = trace_step(options.run, options.step, options.rank, overrides=overrides, ids=options.ids)
    else:
        assert options.mixture is not None and options.window_len is not None, "checked when the options were made"
        mixture = read_mixture(options.mixture, overrides=overrides)
        found = trace_samples(mixture, options.window_len, options.sample, ids=options.ids)
    for document in found:
        print(json.dumps(document, ensure_ascii=False, allow_nan=False) if options.json else _told(document))
    return 0


def trace_samples(
    mixture: Mixture, window_len: int, ks: Sequence[int], *, ids: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield an object a document that a sample holds tokens of (not the token that follows, which is a label only)."""
    from flame.shards.tokenizer import load_tokenizer

    splits = open_mixture(mixture)
    located = Sampler(mixture, splits, window_len).locate(np.array(ks, dtype=np.int64))
    tokenizer = load_tokenizer(splits[0].corpus.path)  # all corpora of a mixture have the same
    for k, source, offset in zip(ks, located.source.tolist(), located.offset.tolist(), strict=True):
        for part in parts_of_window(splits[source], offset, offset + window_len, tokenizer, ids=ids):
            yield {"k": k, "source": mixture.sources[source].name, **part}


def trace_step(
    run: Path, step: int, rank: int | None = None, *, overrides: Mapping[str, Path] | None = None, ids: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the objects of `trace_samples` for what a step of a run took, each with its rank, micro-step and row in it.

    In the order of the global batch. Raises `UsageError` for a folder without a run, and a rank that it did not have,
    `FlameError` for a step that it has not taken.
    """
    segment = segment_of_step(read_segments(run), step)
    check_taken(run, step)
    if rank is not None and not 0 <= rank < segment.dp_size:
        raise UsageError(
            "the run had no such rank", got=rank, expected=f"0 to {segment.dp_size - 1}", where=f"{run}, step {step}"
        )
    mixture = mixture_of_segment(run, segment, overrides or {})
    places = {
        int(k): {"step": step, "rank": dp_rank, "micro_step": micro_step, "batch_row": row}
        for (micro_step, dp_rank, row, _), k in np.ndenumerate(segment.samples_of(step))
        if rank is None or dp_rank == rank
    }
    for document in trace_samples(mixture, segment.window_len, list(places), ids=ids):
        yield {**places[document["k"]], **document}


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
