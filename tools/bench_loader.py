"""Whole training steps out of a warm mixture of 8 sources, in one thread, against the copy of np.memmap slices.

    python tools/bench_loader.py [--json] [--seconds 10]

A step is 65,536 tokens of one rank as the trainer's loader plans and packs it: input_ids, labels, positions and
cu_seqlens of documents with lengths as on the web. The peer copies the same windows out of np.memmap, and makes nothing
of them. Figures are million tokens per CPU second; both sides take turns, and a figure is the median of its turns. Rows
are named `loader/<seq_len>/<window_len>`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flame.sampling.interleave import integer_weights
from flame.sampling.mixture import Mixture, Stage
from flame.sampling.packing import PackedBatch, pack_windows
from flame.sampling.sampler import BatchGeometry, Sampler
from flame.sampling.sources import open_mixture, source_of
from flame.shards.format import DEFAULT_SHARD_TOKENS, HEADER_BYTES, TOKEN_DTYPE, tokens_path
from flame.shards.manifest import Manifest, SplitInfo, TokenizerInfo, write_manifest
from flame.shards.reader import Split
from flame.shards.writer import SplitWriter
from flame.train.loader import plan_steps

SHAPES = ((65536, 65536), (65536, 8192), (2048, 2048))  # seq_len, window_len
CONTEXT_LEN = 4096
TOKENS_PER_STEP = 65536
NUM_SOURCES = 8
TOKENS_PER_SOURCE = 4_000_000
VOCABULARY = 50_257
EOS = VOCABULARY - 1
MEAN_DOCUMENT_TOKENS = 1_100  # 58 documents in 65,536 tokens
STEPS_A_TURN = 8  # so few that whatever else the machine does, caches included, weighs on both sides alike


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure, and the peer's."""

    name: str
    value: float
    unit: str
    peer: str
    peer_value: float

    @property
    def ratio(self) -> float:
        return self.value / self.peer_value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object a row instead of a table")
    parser.add_argument("--seconds", type=float, default=10.0, help="CPU seconds a row (10)")
    parser.add_argument("--scratch", type=Path, default=None, help="where corpora are written, and deleted again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        mixture = make_mixture(Path(folder))
        for seq_len, window_len in SHAPES:
            show(measure(mixture, seq_len, window_len, arguments.seconds), as_json=arguments.json)


def make_mixture(folder: Path) -> Mixture:
    """Write corpora of documents with lengths as on the web, and mix them with weights of 1 to 8."""
    rng = np.random.default_rng(0)
    names = [f"source-{i}" for i in range(NUM_SOURCES)]
    for name in names:
        write_corpus(folder / name, rng)
    return Mixture(
        data_seed=42,
        sources=tuple(source_of(name, folder / name, "train") for name in names),
        stages=(Stage(start_tokens=0, weights=integer_weights(names, range(1, NUM_SOURCES + 1))),),
    )


def write_corpus(folder: Path, rng: np.random.Generator) -> None:
    """Write and seal one corpus of random tokens in documents of log-normal length."""
    writer = SplitWriter(folder, "train", task=0, shard_tokens=DEFAULT_SHARD_TOKENS, docs_schema=None)
    written = 0
    while written < TOKENS_PER_SOURCE:
        lengths = 1 + rng.lognormal(np.log(MEAN_DOCUMENT_TOKENS) - 0.5, 1.0, 1000).astype(np.int64)
        tokens = rng.integers(0, EOS, int(lengths.sum()), dtype=np.uint32)
        tokens[np.cumsum(lengths) - 1] = EOS
        writer.append(tokens, lengths, num_bytes=lengths)
        written += len(tokens)
    tokenizer = TokenizerInfo(
        fingerprint="sha256:bench", vocab_size=VOCABULARY, bos_id=None, eos_id=EOS, bos="never", special_text="plain"
    )
    write_manifest(folder, Manifest(tokenizer=tokenizer, splits={"train": SplitInfo.of(tuple(writer.finish()))}))


def measure(mixture: Mixture, seq_len: int, window_len: int, seconds: float) -> Row:
    """Time both sides in turns; each turn of a side goes on where its last one ended."""
    splits = open_mixture(mixture)
    sampler = Sampler(mixture, splits, window_len)
    geometry = BatchGeometry(
        seq_len=seq_len,
        window_len=window_len,
        context_len=min(CONTEXT_LEN, window_len),
        micro_batch=TOKENS_PER_STEP // seq_len,
        accumulation=1,
        dp_size=1,
        varlen=True,
    )
    steps, copies = packed_steps(sampler, splits, geometry), memmap_copies(sampler, splits, window_len)
    seconds_of_steps(steps, 1000), seconds_of_steps(copies, 1000)  # until every page is mapped
    ours, theirs = [], []
    began = time.process_time()
    while time.process_time() - began < seconds:
        ours.append(seconds_of_steps(steps, STEPS_A_TURN))
        theirs.append(seconds_of_steps(copies, STEPS_A_TURN))
    value, peer_value = (STEPS_A_TURN * TOKENS_PER_STEP / statistics.median(turns) / 1e6 for turns in (ours, theirs))
    unit = "million tokens per CPU second"
    return Row(name=f"loader/{seq_len}/{window_len}", value=value, unit=unit, peer="memmap", peer_value=peer_value)


def seconds_of_steps(steps: Iterator[object], count: int) -> float:
    """Take that many steps of `TOKENS_PER_STEP`; return the CPU seconds."""
    began = time.process_time()
    for _ in range(count):
        next(steps)
    return time.process_time() - began


def packed_steps(sampler: Sampler, splits: Sequence[Split], geometry: BatchGeometry) -> Iterator[PackedBatch]:
    """Yield step after step as the trainer's loader plans and packs it."""
    for step in plan_steps(sampler, geometry, dp_rank=0, consumed_samples=0):
        sources, offsets = step.sources[0].tolist(), step.offsets[0].tolist()
        windows = [(splits[source], offset) for source, offset in zip(sources, offsets, strict=True)]
        yield pack_windows(windows, geometry, sources=step.sources[0], samples=step.samples[0])


def memmap_copies(sampler: Sampler, splits: Sequence[Split], window_len: int) -> Iterator[list[NDArray[np.uint32]]]:
    """Yield the windows of step after step as copies of np.memmap slices (windows within one shard only)."""
    maps = [
        [
            np.memmap(tokens_path(split.corpus.path, split.name, shard.name), TOKEN_DTYPE, "r", offset=HEADER_BYTES)
            for shard in split.shards
        ]
        for split in splits
    ]
    located = sampler.locate(np.arange(100_000))
    places = [
        (maps[source][shard], start, start + window_len)
        for source, offset in zip(located.source.tolist(), located.offset.tolist(), strict=True)
        for shard, start in [splits[source].locate(offset)]
        if start + window_len <= len(maps[source][shard])
    ]
    windows = itertools.cycle(places)
    while True:
        taken = itertools.islice(windows, TOKENS_PER_STEP // window_len)
        yield [np.array(tokens[start:stop]) for tokens, start, stop in taken]


def show(row: Row, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**vars(row), "ratio": row.ratio}), flush=True)
        return
    print(
        f"{row.name:20} {row.value:8.1f}  {row.peer} {row.peer_value:8.1f}  ratio {row.ratio:.3f}  ({row.unit})",
        flush=True,
    )


if __name__ == "__main__":
    main()
