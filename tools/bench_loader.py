"""Whole training steps out of a warm mixture of 8 sources, in one thread, against the copy of np.memmap slices.

    python tools/bench_loader.py [--json] [--seconds 4]

A step is 65,536 tokens of one rank: input_ids, labels, positions and cu_seqlens of packed documents, as training gets
them from its loader. The peer copies the same windows out of np.memmap, and makes nothing of them. Figures are million
tokens per CPU second; both sides take turns, and each figure is the median of its turns. Rows are named
`loader/<seq_len>/<window_len>`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from flame.sampling.interleave import integer_weights
from flame.sampling.mixture import Mixture, Stage, open_mixture, source_of
from flame.sampling.sampler import BatchGeometry, Sampler
from flame.shards.format import HEADER_BYTES, TOKEN_DTYPE, tokens_path
from flame.shards.manifest import Manifest, SplitInfo, TokenizerInfo, write_manifest
from flame.shards.reader import Split
from flame.shards.writer import SplitWriter
from flame.train.loader import StepLoader

SHAPES = ((65536, 65536), (65536, 8192), (2048, 2048))  # seq_len, window_len
CONTEXT_LEN = 4096
TOKENS_PER_STEP = 65536
NUM_SOURCES = 8
TOKENS_PER_SOURCE = 4_000_000
SHARD_TOKENS = 1_000_000
VOCABULARY = 50_257
EOS = VOCABULARY - 1
MEAN_DOCUMENT_TOKENS = 1_100  # 58 documents in 65,536 tokens
TURNS = 9


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
    parser.add_argument("--seconds", type=float, default=4.0, help="CPU seconds a row and side (4)")
    parser.add_argument("--scratch", type=Path, default=None, help="where corpora are written, and deleted again")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
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
    writer = SplitWriter(folder, "train", task=0, shard_tokens=SHARD_TOKENS, docs_schema=None)
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
    loader = StepLoader(
        sampler,
        splits,
        geometry,
        dp_rank=0,
        consumed_samples=0,
        num_embeddings=VOCABULARY,
        device=torch.device("cpu"),
        num_threads=0,
    )
    copies = memmap_copies(sampler, splits, window_len)
    sides: tuple[Callable[[], object], Callable[[], object]] = (lambda: next(loader), lambda: next(copies))
    turns: tuple[list[float], list[float]] = ([], [])
    for turn in range(TURNS + 1):
        for advance, figures in zip(sides, turns, strict=True):
            rate = tokens_per_cpu_second(advance, seconds / TURNS)
            if turn:  # the first warms up
                figures.append(rate / 1e6)
    ours, theirs = (statistics.median(figures) for figures in turns)
    unit = "million tokens per CPU second"
    return Row(name=f"loader/{seq_len}/{window_len}", value=ours, unit=unit, peer="memmap", peer_value=theirs)


def tokens_per_cpu_second(advance: Callable[[], object], seconds: float) -> float:
    """Call `advance`, a step of `TOKENS_PER_STEP`, until the seconds are spent."""
    began, steps = time.process_time(), 0
    while (spent := time.process_time() - began) < seconds:
        for _ in range(8):
            advance()
        steps += 8
    return steps * TOKENS_PER_STEP / spent


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
        (maps[source][shard], start)
        for source, offset in zip(located.source.tolist(), located.offset.tolist(), strict=True)
        for shard, start in [splits[source].locate(offset)]
        if start + window_len <= len(maps[source][shard])
    ]
    windows = itertools.cycle(places)
    while True:
        taken = itertools.islice(windows, TOKENS_PER_STEP // window_len)
        yield [np.array(tokens[start : start + window_len]) for tokens, start in taken]


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
