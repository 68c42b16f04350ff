"""The statistics of a corpus: its shards counted one by one, by processes where that pays, and added up here."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from flame.errors import CorpusError, FlameError
from flame.preprocess.distribution import Distribution
from flame.preprocess.duplicates import Copies, CopyCounter
from flame.preprocess.forks import interrupts_ignored
from flame.preprocess.shard_stats import ShardJob, ShardStats, count_shard
from flame.preprocess.tally import Tally
from flame.shards.reader import Corpus

PROCESS_TOKENS = 1 << 25  # fewer are counted sooner than a process starts
MOST_COPIED = 5


@dataclass(kw_only=True)
class Stats:
    """The statistics of some splits; what only docs.parquet tells is None where a shard has none.

    `first_documents` are the numbers that the splits' first documents have in `copies`.
    """

    num_bytes: int
    first_documents: Mapping[str, int]
    lengths: Distribution
    byte_lengths: Distribution | None
    ratios: Distribution | None
    token_counts: NDArray[np.int64]
    source_files: Tally = field(default_factory=Tally)
    hosts: Tally = field(default_factory=Tally)
    copies: Copies | None = None

    def add(self, part: ShardStats) -> None:
        """Take a shard's; only distinct lengths are kept."""
        self.lengths = Distribution.sum_of([self.lengths, part.lengths])
        self.byte_lengths = _both(self.byte_lengths, part.byte_lengths)
        self.ratios = _both(self.ratios, part.ratios)
        if len(part.token_counts) > len(self.token_counts):  # of a vocabulary with holes, ids lie beyond its size
            self.token_counts = np.pad(self.token_counts, (0, len(part.token_counts) - len(self.token_counts)))
        self.token_counts[: len(part.token_counts)] += part.token_counts
        self.source_files.add(part.source_files)
        self.hosts.add(part.hosts or ())


def _both(sum_: Distribution | None, part: Distribution | None) -> Distribution | None:
    return None if sum_ is None or part is None else Distribution.sum_of([sum_, part])


def count_corpus(corpus: Corpus, names: Sequence[str], *, duplicates: bool, num_workers: int | None) -> Stats:
    """Count these splits together.

    Memory: per worker a shard's maps and 50 bytes a document of it; here some times 64 MiB (see `CopyCounter`). Raises
    `CorpusError` for damage, and where there is no document.
    """
    splits = {name: corpus.manifest.splits[name] for name in names}
    first_documents: dict[str, int] = {}
    jobs: list[ShardJob] = []
    num_documents = 0
    for name, split in splits.items():
        first_documents[name] = num_documents
        for shard in split.shards:
            job = ShardJob(
                corpus=corpus.path, split=name, shard=shard, first_document=num_documents, duplicates=duplicates
            )
            jobs.append(job)
            num_documents += shard.num_documents
    if not jobs:
        raise CorpusError("there is nothing to count: no document is there", where=corpus.path, got=", ".join(names))
    nothing = Distribution.sum_of([])
    stats = Stats(
        num_bytes=sum(split.num_bytes for split in splits.values()),
        first_documents=first_documents,
        lengths=nothing,
        byte_lengths=nothing,
        ratios=nothing,
        token_counts=np.zeros(corpus.manifest.tokenizer.vocab_size, np.int64),
    )
    with contextlib.ExitStack() as stack:
        counter: CopyCounter | None = None
        if duplicates:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="flame-stats-"))
            counter = CopyCounter(Path(folder), num_documents)
            stack.callback(counter.close)
        for part in _counted(jobs, num_workers):
            stats.add(part)
            if counter is not None and part.records is not None:
                counter.add(part.records)
        if counter is not None:
            stats.copies = counter.finish(MOST_COPIED)
    return stats


def _counted(jobs: Sequence[ShardJob], num_workers: int | None) -> Iterator[ShardStats]:
    """Yield the shards' counts in order; few wait. A bar on a terminal's stderr."""
    total = sum(job.shard.num_tokens for job in jobs)
    workers = min(num_workers or len(os.sched_getaffinity(0)), len(jobs))
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(
            tqdm(total=total, unit="token", unit_scale=True, desc="stats", disable=None, leave=False, file=sys.stderr)
        )
        pool: ProcessPoolExecutor | None = None
        if workers > 1 and total > PROCESS_TOKENS:
            context = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(workers, context))
            stack.callback(pool.shutdown, cancel_futures=True)
        waiting: deque[Future[ShardStats]] = deque()
        ahead = 0
        for job in jobs:
            while pool is not None and ahead < len(jobs) and len(waiting) < 2 * workers:
                with interrupts_ignored():  # a process may be started here
                    waiting.append(pool.submit(count_shard, jobs[ahead]))
                ahead += 1
            yield count_shard(job) if pool is None else _result(waiting.popleft(), job)
            bar.update(job.shard.num_tokens)


def _result(future: Future[ShardStats], job: ShardJob) -> ShardStats:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise FlameError(
            "a process that counted a shard was killed",
            where=f"{job.corpus}, at or after {job.split}/{job.shard.name}",
            fix="If memory was short, count with fewer of them: --num_workers",
        ) from error
