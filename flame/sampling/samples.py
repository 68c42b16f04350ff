"""`flame-mix samples`: where any stretch of a run's samples lies, in order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from flame.config import option, parse_count
from flame.errors import UsageError
from flame.sampling.mixture import Mixture
from flame.sampling.sampler import MAX_SAMPLES, Sampler
from flame.sampling.show import MixtureOptions, table
from flame.sampling.sources import open_mixture
from flame.shards.packed import PackedSplit

_SAMPLES_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class SamplesOptions(MixtureOptions):
    """The options of `flame-mix samples`."""

    window_len: int = option(help="tokens of a sample, as the run's training.window_len", unit="tokens")
    start: int = option(0, help="first sample, numbered from 0 over the whole run", parse=parse_count)
    count: int = option(16, help="how many samples", parse=parse_count)
    json: bool = option(False, help="print one JSON object a sample")

    def __post_init__(self) -> None:
        if self.window_len < 1:
            raise UsageError("--window_len is no length", got=self.window_len, expected="1 or more")
        if self.start + self.count > MAX_SAMPLES:
            raise UsageError("--start and --count go beyond the last sample", expected=f"at most {MAX_SAMPLES} samples")


@dataclass(frozen=True, kw_only=True)
class LocatedSample:
    """One sample; `offset` is its first token in the split, `shard` the shard that this token lies in."""

    k: int
    source: str
    epoch: int
    window: int
    offset: int
    shard: str
    first_token_id: int


def samples(options: SamplesOptions) -> int:
    """Print the samples `[start, start + count)`, for people or as JSON lines."""
    found = locate_samples(options.read(), options.window_len, options.start, options.start + options.count)
    if options.json:
        for sample in found:
            print(json.dumps(asdict(sample), ensure_ascii=False))
        return 0
    columns = tuple(LocatedSample.__dataclass_fields__)
    rows = [tuple(str(getattr(sample, column)) for column in columns) for sample in found]
    print("\n".join(table([columns, *rows])))
    return 0


def locate_samples(mixture: Mixture, window_len: int, start: int, stop: int) -> Iterator[LocatedSample]:
    """Yield the samples `[start, stop)`. Cost: one token read a sample."""
    splits = open_mixture(mixture)
    sampler = Sampler(mixture, splits, window_len)
    for first in range(start, stop, _SAMPLES_AT_ONCE):
        ks = np.arange(first, min(first + _SAMPLES_AT_ONCE, stop))
        located = sampler.locate(ks)
        columns = (ks, located.source, located.epoch, located.window, located.offset)
        for k, source, epoch, window, offset in zip(*(column.tolist() for column in columns), strict=True):
            split = splits[source]
            if isinstance(split, PackedSplit):
                offset = split.stretches(offset)[0][0]
            yield LocatedSample(
                k=k,
                source=mixture.sources[source].name,
                epoch=epoch,
                window=window,
                offset=offset,
                shard=f"{split.name}/{split.shards[split.locate(offset)[0]].name}",
                first_token_id=int(split.read(offset, offset + 1)[0]),
            )
