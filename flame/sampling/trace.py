"""`flame-mix trace`: the documents behind a sample, where each came from, and the part of its text that is in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flame.config import option, parse_count
from flame.errors import UsageError
from flame.sampling.mixture import Mixture, open_mixture, read_mixture
from flame.sampling.sampler import MAX_SAMPLES, Sampler
from flame.sampling.show import parse_override

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from flame.shards.reader import Split


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
    run: Path | None = option(None, help="run folder, to trace a step of it: not available yet")
    step: int | None = option(None, help="with --run, a step: not available yet")
    rank: int | None = option(None, help="with --run, a rank: not available yet")
    json: bool = option(False, help="print one JSON object a document")

    def __post_init__(self) -> None:
        for name in ("run", "step", "rank"):
            if getattr(self, name) is not None:
                raise UsageError(
                    f"flame-mix trace --{name} is not available yet",
                    fix="Name samples: flame-mix trace mix.json --window_len N --sample K (a run's segments.jsonl says "
                    "its window_len and samples_per_step)",
                )
        if self.mixture is None or self.window_len is None or not self.sample:
            raise UsageError(
                "flame-mix trace needs a mixture, --window_len and --sample",
                fix="Such as: flame-mix trace mix.json --window_len 4096 --sample 123",
            )
        if self.window_len < 1:
            raise UsageError("--window_len is no length", got=self.window_len, expected="1 or more")
        if max(self.sample) >= MAX_SAMPLES:
            raise UsageError("--sample goes beyond the last sample", expected=f"at most {MAX_SAMPLES - 1}")


def trace(options: TraceOptions) -> int:
    """Print the documents of each sample, in order, for people or as JSON lines."""
    assert options.mixture is not None and options.window_len is not None, "checked when the options were made"
    mixture = read_mixture(options.mixture, overrides=dict(options.source))
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(encoding="utf-8")  # any text, whatever the locale says
    for found in trace_samples(mixture, options.window_len, options.sample):
        print(json.dumps(found, ensure_ascii=False, allow_nan=False) if options.json else _told(found))
    return 0


def trace_samples(mixture: Mixture, window_len: int, ks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield an object a document that a sample holds tokens of (not the token that follows, which is a label only)."""
    from flame.shards.tokenizer import load_tokenizer

    splits = open_mixture(mixture)
    located = Sampler(mixture, splits, window_len).locate(np.array(ks, dtype=np.int64))
    tokenizer = load_tokenizer(splits[0].corpus.path)  # all corpora of a mixture have the same
    for k, source, offset in zip(ks, located.source.tolist(), located.offset.tolist(), strict=True):
        for part in parts_of_window(splits[source], offset, offset + window_len, tokenizer):
            yield {"k": k, "source": mixture.sources[source].name, **part}


def parts_of_window(split: Split, start: int, stop: int, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield an object a document that has tokens in `[start, stop)` of a split."""
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
            "text": _text(split, begin, end, (first, last), tokenizer),
            **{name: value for name, value in origin.items() if name not in ("k", "source", "document", "text")},
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
    place = f"tokens {found['start']} to {found['start'] + found['num_tokens'] - 1}"
    return f"--- sample {found['k']}, {found['source']} document {found['document']}{origin}, {place}\n{found['text']}"
