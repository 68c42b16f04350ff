"""`flame-preprocess pack`: an index beside a corpus by which no document that fits into N tokens is ever cut.

Documents are packed best-fit decreasing, group by group. A group is a stretch of documents whose bounds follow from the
corpus and N alone, so memory does not grow with the corpus, any number of processes may share the work, and the bytes
are the same.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from flame.config import option, parse_count
from flame.errors import CorpusError, FlameError, UsageError
from flame.files import exclusive_lock
from flame.preprocess.forks import interrupts_ignored
from flame.preprocess.pack_groups import GroupJob, PackedGroup, groups_of, pack_group
from flame.preprocess.pack_report import CutCounts, Report, report_lines
from flame.shards.array_file import ArrayFile
from flame.shards.format import MANIFEST
from flame.shards.packs import (
    ARRAYS,
    MAX_CONTEXT_LEN,
    PacksInfo,
    array_path,
    map_packs,
    packs_folder,
    read_packs,
    write_packs,
)
from flame.shards.reader import Corpus, Split
from flame.words import counted

PROCESS_TOKENS = 1 << 29  # fewer are packed sooner than processes start


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """The options of `flame-preprocess pack`."""

    corpus: Path = option(help="corpus folder", positional=True)
    context_len: int = option(
        help="tokens of a pack, which is one sample: the run's training.window_len", unit="tokens", parse=parse_count
    )
    split: str = option("train", help="split to pack")
    num_workers: int | None = option(
        None, help="processes; default one a CPU, and one where the corpus is small", aliases=("workers",)
    )
    overwrite: bool = option(False, help="make the index again where there is one, or a damaged one")
    json: bool = option(False, help="print the comparison as one JSON object")

    def __post_init__(self) -> None:
        if not 0 < self.context_len <= MAX_CONTEXT_LEN:
            raise UsageError(
                f"--context_len cannot be {self.context_len}", expected=f"from 1 to {MAX_CONTEXT_LEN} tokens"
            )
        if self.num_workers is not None and self.num_workers < 1:
            raise UsageError(f"--num_workers cannot be {self.num_workers}", expected="1 or more")


def pack(options: PackOptions) -> int:
    """Pack a split, and print what packs and windows make of it; one that is packed already is only told about."""
    corpus = Corpus.open(options.corpus)
    split = corpus.split(options.split)
    if not split.num_documents:
        raise CorpusError("there is nothing to pack: no document is there", where=options.corpus, got=options.split)
    folder = packs_folder(options.corpus, options.split, options.context_len)
    _make_folder(folder)
    with exclusive_lock(folder / "lock", what="this pack index"):
        info = None if options.overwrite else _made_already(folder, corpus)
        if info is None:
            began = time.monotonic()
            info = pack_split(split, options.context_len, folder, num_workers=options.num_workers)
            seconds = time.monotonic() - began
            a_second = split.num_documents / seconds
            speed = f"{counted(split.num_documents, 'document')} in {seconds:.1f} s, {a_second:,.0f} a second"
            print(f"flame-preprocess pack: wrote {folder}: {speed}", file=sys.stderr)
        else:
            print(f"flame-preprocess pack: {folder} is there already, of this very corpus", file=sys.stderr)
    if options.json:
        print(json.dumps({"fingerprint": info.fingerprint, "context_len": info.context_len, **info.report}))
    else:
        print("\n".join(report_lines(info.report, num_tokens=info.num_tokens, context_len=info.context_len)))
    return 0


def pack_split(split: Split, context_len: int, folder: Path, *, num_workers: int | None = None) -> PacksInfo:
    """Write the pack index of a split into `folder`, its manifest last; returns what it says.

    Memory: some 100 bytes a document of a group, for each process. A stopped one leaves no manifest, and is made anew.
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    jobs = (
        GroupJob(corpus=split.corpus.path, split=split.name, context_len=context_len, group=group)
        for group in groups_of(split, context_len)
    )
    num_packs = num_pieces = num_groups = 0
    windows, packs = CutCounts(), CutCounts()
    with contextlib.ExitStack() as stack:
        files = {name: ArrayFile(array_path(folder, name), dtype) for name, dtype in ARRAYS.items()}
        undo = stack.enter_context(contextlib.ExitStack())
        for file in files.values():
            undo.callback(file.abort)
        for packed in _packed(jobs, split.num_tokens, num_workers):
            files["packs"].append((num_pieces + np.cumsum(packed.sizes)).astype(np.uint64))
            files["starts"].append(packed.starts.astype(np.uint64))
            files["lengths"].append(packed.lengths.astype(np.uint32))
            num_packs, num_pieces = num_packs + len(packed.sizes), num_pieces + len(packed.starts)
            num_groups += 1
            files["groups"].append(np.array([packed.group.stop_token, num_pieces], dtype=np.uint64))
            windows, packs = windows + packed.windows, packs + packed.packs
        checksums = {name: file.seal() for name, file in files.items()}
        undo.pop_all()
    for file in files.values():
        file.publish()
    report = Report(
        context_len=context_len,
        num_documents=split.num_documents,
        num_tokens=split.num_tokens,
        num_packs=num_packs,
        windows=windows,
        packs=packs,
    )
    info = PacksInfo(
        corpus_fingerprint=split.corpus.fingerprint,
        split=split.name,
        context_len=context_len,
        num_packs=num_packs,
        num_pieces=num_pieces,
        num_groups=num_groups,
        num_tokens=split.num_tokens,
        checksums=checksums,
        report=report.to_json(),
        built={"command": shlex.join(sys.argv), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
    )
    write_packs(folder, info)
    return info


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except PermissionError as error:
        raise UsageError(
            "the pack index cannot be written beside its corpus",
            where=folder,
            got=error.strerror,
            fix="Link the corpus into a folder of yours (ln -s CORPUS mine/), and pack and train by that name",
        ) from error


def _made_already(folder: Path, corpus: Corpus) -> PacksInfo | None:
    """Return the index that is there; None where there is none, or it was stopped. Raises for another one."""
    if not (folder / MANIFEST).exists():
        return None
    info = read_packs(folder)
    if info.corpus_fingerprint != corpus.fingerprint:
        raise CorpusError(
            "the pack index that is there is of another corpus",
            where=folder,
            got=info.corpus_fingerprint,
            expected=corpus.fingerprint,
            fix="Add --overwrite to make it anew",
        )
    map_packs(folder, info)
    return info


def _packed(jobs: Iterator[GroupJob], num_tokens: int, num_workers: int | None) -> Iterator[PackedGroup]:
    """Yield the groups packed, in order; few wait. A bar on a terminal's stderr."""
    workers = num_workers or (len(os.sched_getaffinity(0)) if num_tokens > PROCESS_TOKENS else 1)
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(
            tqdm(total=num_tokens, unit="token", unit_scale=True, desc="pack", disable=None, leave=False)
        )
        for packed in map(pack_group, jobs) if workers == 1 else _packed_by_processes(jobs, workers):
            yield packed
            bar.update(packed.group.stop_token - packed.group.first_token)


def _packed_by_processes(jobs: Iterator[GroupJob], num_workers: int) -> Iterator[PackedGroup]:
    with ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn")) as pool:
        waiting: deque[Future[PackedGroup]] = deque()
        try:
            for job in jobs:
                with interrupts_ignored():  # a process may be started here
                    waiting.append(pool.submit(pack_group, job))
                if len(waiting) > 2 * num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise FlameError(
                "a process that packed documents was killed",
                fix="If memory was short, pack with fewer of them: --num_workers",
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
