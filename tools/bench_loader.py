"""Whole training steps out of a warm mixture of 8 sources, in one thread, against the copy of np.memmap slices.

    python tools/bench_loader.py [--json] [--seconds 10]
    python tools/bench_loader.py --peers [--json]

A step is 65,536 tokens of one rank as the trainer's loader plans and packs it: input_ids, labels, positions and
cu_seqlens of documents with lengths as on the web. The peer copies the same windows out of np.memmap, and makes nothing
of them, at another place of the data: neither finds in the cache what the other has just read. Figures are million
tokens per CPU second; both sides take turns, and a figure is the median of its turns. Rows are named
`loader/<seq_len>/<window_len>`.

With `--peers`: one window a row, in 1, 2 and 4 threads, warm and cold (files dropped from the page cache), beside
Megatron's GPTDataset (as it is; and with positions and losses that heed documents), litdata (its own order; one
thread) and np.memmap, in million tokens per second of the clock. Rows are `loader/<window_len>/<warm|cold>/<threads>`,
one for each peer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import loader_peers
import numpy as np
import torch
from numpy.typing import NDArray

from flame.sampling.geometry import BatchGeometry
from flame.sampling.interleave import integer_weights
from flame.sampling.mixture import Mixture, Stage
from flame.sampling.packing import PackedBatch, pack_windows
from flame.sampling.sampler import Sampler
from flame.sampling.sources import open_mixture, source_of
from flame.shards.format import DEFAULT_SHARD_TOKENS, HEADER_BYTES, TOKEN_DTYPE, tokens_path
from flame.shards.manifest import Manifest, SplitInfo, TokenizerInfo, write_manifest
from flame.shards.reader import Split
from flame.shards.writer import SplitWriter
from flame.train.loader import StepLoader, plan_steps

SHAPES = ((65536, 65536), (65536, 8192), (2048, 2048))  # seq_len, window_len
CONTEXT_LEN = 4096
TOKENS_PER_STEP = 65536
NUM_SOURCES = 8
TOKENS_PER_SOURCE = 4_000_000
VOCABULARY = 50_257
EOS = VOCABULARY - 1
MEAN_DOCUMENT_TOKENS = 1_100  # 58 documents in 65,536 tokens
STEPS_A_TURN = 8  # so few that whatever else the machine does weighs on both sides alike
WINDOWS = (65536, 2048)  # of --peers
THREADS = (1, 2, 4)
NUM_STEPS = 128  # of each reading of --peers
READINGS = 3


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
    parser.add_argument("--peers", action="store_true", help="beside other systems' readers, warm and cold")
    parser.add_argument("--scratch", type=Path, default=None, help="where corpora are written, and deleted again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        mixture = make_mixture(Path(folder))
        if arguments.peers:
            for row in compare(mixture, Path(folder)):
                show(row, as_json=arguments.json)
            return
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
    located = sampler.locate(np.arange(2**40, 2**40 + 100_000))  # where nobody else is reading
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


# ---- beside other systems


def compare(mixture: Mixture, folder: Path) -> Iterator[Row]:
    """Yield a row a peer, window_len, temperature and number of threads; absent packages are named on stderr."""
    for window_len in WINDOWS:
        readers = peers_of(mixture, folder, window_len)
        for temperature, threads in itertools.product(("warm", "cold"), THREADS):
            cold = temperature == "cold"
            ours = tokens_per_second(partial(our_steps, mixture, window_len, threads), folder, cold=cold)
            for peer, open_peer in readers.items():
                if peer == "litdata" and threads > 1:
                    continue  # an iterator, for one thread
                open_steps = partial(peer_steps, open_peer, window_len, threads)
                theirs = tokens_per_second(open_steps, folder, cold=cold)
                yield Row(
                    name=f"loader/{window_len}/{temperature}/{threads}",
                    value=ours / 1e6,
                    unit="million tokens per second",
                    peer=peer,
                    peer_value=theirs / 1e6,
                )


def peers_of(mixture: Mixture, folder: Path, window_len: int) -> dict[str, Callable[[], loader_peers.Read]]:
    """Write the documents in each peer's format; return how each is opened."""
    readers: dict[str, Callable[[], loader_peers.Read]] = {"memmap": partial(open_memmap, mixture, window_len)}
    if loader_peers.is_installed("megatron.core"):
        data = folder / "megatron"
        if not data.exists():
            apart(write_megatron, data, mixture)
        for name, heeds in (("megatron", False), ("megatron, documents", True)):
            num_windows = NUM_STEPS * TOKENS_PER_STEP // window_len
            readers[name] = partial(loader_peers.open_megatron, data, window_len, num_windows, EOS, documents=heeds)
    else:
        print("megatron-core is not installed: left out", file=sys.stderr)
    if loader_peers.is_installed("litdata"):
        chunks = folder / f"litdata-{window_len}"
        apart(write_litdata, chunks, mixture, window_len)
        readers["litdata"] = partial(loader_peers.open_litdata, chunks, window_len)
    else:
        print("litdata is not installed: left out", file=sys.stderr)
    return readers


def write_megatron(folder: Path, mixture: Mixture) -> None:
    loader_peers.write_megatron(folder, documents_of(mixture))


def write_litdata(folder: Path, mixture: Mixture, window_len: int) -> None:
    loader_peers.write_litdata(folder, documents_of(mixture), window_len)


def documents_of(mixture: Mixture) -> Iterator[NDArray[np.uint32]]:
    for split in open_mixture(mixture):
        for document in range(split.num_documents):
            yield split.read(*split.document_bounds(document))


def tokens_per_second(open_steps: Callable[[], Any], folder: Path, *, cold: bool) -> float:
    """Return the median of `READINGS`, each in a process of its own: what nobody maps can be dropped from the cache."""
    return statistics.median(apart(read_once, open_steps, folder, cold) for _ in range(READINGS))


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *arguments).result()


def read_once(open_steps: Callable[[], Any], folder: Path, cold: bool) -> float:
    """Open, and return tokens per second; a cold reading finds nothing in the page cache, a warm one is its second."""
    if cold:
        drop_from_cache(folder)
    steps = open_steps()
    if not cold:
        take(steps, NUM_STEPS)
        steps.close()
        steps = open_steps()
    began = time.perf_counter()
    take(steps, NUM_STEPS)
    seconds = time.perf_counter() - began
    steps.close()
    return NUM_STEPS * TOKENS_PER_STEP / seconds


def take(steps: Iterator[object], count: int) -> None:
    for _ in range(count):
        next(steps)


def drop_from_cache(folder: Path) -> None:
    """Drop every file in the folder from the page cache, but for pages that are mapped: close readers before."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)  # only clean pages can be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def our_steps(mixture: Mixture, window_len: int, num_threads: int) -> StepLoader:
    """Open the mixture and the trainer's own loader of it."""
    splits = open_mixture(mixture)
    geometry = BatchGeometry(
        seq_len=window_len,
        window_len=window_len,
        context_len=min(CONTEXT_LEN, window_len),
        micro_batch=TOKENS_PER_STEP // window_len,
        accumulation=1,
        dp_size=1,
        varlen=True,
    )
    return StepLoader(
        Sampler(mixture, splits, window_len),
        splits,
        geometry,
        dp_rank=0,
        consumed_samples=0,
        num_embeddings=VOCABULARY,
        device=torch.device("cpu"),
        num_threads=num_threads,
        prefetch_steps=2 * num_threads,
    )


def peer_steps(open_peer: Callable[[], loader_peers.Read], window_len: int, num_threads: int) -> Iterator[object]:
    """Open a peer, and return its steps; with several threads each reads whole steps, as ours do."""
    return steps_of(open_peer(), TOKENS_PER_STEP // window_len, num_threads)


def steps_of(read: loader_peers.Read, per_step: int, num_threads: int) -> Iterator[object]:
    """Yield steps of `per_step` windows."""

    def step(number: int) -> list[object]:
        return [read(i) for i in range(number * per_step, (number + 1) * per_step)]

    if num_threads == 1:
        yield from map(step, itertools.count())
    with ThreadPoolExecutor(num_threads) as pool:
        ahead = [pool.submit(step, number) for number in range(2 * num_threads)]
        for number in itertools.count(2 * num_threads):
            yield ahead.pop(0).result()
            ahead.append(pool.submit(step, number))


def open_memmap(mixture: Mixture, window_len: int) -> loader_peers.Read:
    """Map the shards by np.memmap; windows are random."""
    maps = [
        np.memmap(tokens_path(split.corpus.path, split.name, shard.name), TOKEN_DTYPE, "r", offset=HEADER_BYTES)
        for split in open_mixture(mixture)
        for shard in split.shards
        if shard.num_tokens > window_len
    ]
    rng = np.random.default_rng(0)
    which = rng.integers(0, len(maps), 100_000).tolist()
    starts = [int(rng.integers(0, len(maps[i]) - window_len)) for i in which]
    return lambda i: np.array(maps[which[i % 100_000]][starts[i % 100_000] : starts[i % 100_000] + window_len])


def show(row: Row, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**vars(row), "ratio": row.ratio}), flush=True)
        return
    print(
        f"{row.name:22} {row.value:8.1f}  {row.peer:19} {row.peer_value:8.1f}  ratio {row.ratio:.3f}  ({row.unit})",
        flush=True,
    )


if __name__ == "__main__":
    main()
