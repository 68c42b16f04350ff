"""The processes of a conversion: each runs tasks, dies with its parent, and holds the workers' lock while it lives."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

from flame.errors import FlameError, TokenizerError
from flame.preprocess.convert_task import ConvertSettings, Decoder, run_task
from flame.preprocess.plan import Task
from flame.preprocess.task import Progress
from flame.preprocess.workers import ENVIRONMENT, die_with_parent


class _Worker(NamedTuple):
    settings: ConvertSettings
    decoder: Decoder
    lock: int


_worker: _Worker | None = None  # of a worker's process: what it was started with


def load_decoder(tokenizer_json: bytes, settings: ConvertSettings) -> Decoder:
    """Load the tokenizer; `TokenizerError` if it cannot be."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise TokenizerError("`tokenizers` cannot load the tokenizer.json", got=str(error)) from error
    tokenizer.encode_special_tokens = not settings.parse_special
    return Decoder(
        tokenizer,
        eos_id=settings.build.eos_id,
        bos_id=settings.build.bos_id,
        parse_special=settings.parse_special,
    )


def run_tasks(
    tasks: Sequence[Task],
    settings: ConvertSettings,
    tokenizer_json: bytes,
    *,
    num_workers: int,
    lock: Path,
    report: Callable[[Progress], None],
) -> None:
    """Run every task, in this process where one worker is asked for; raises the first failure.

    After an error, or Ctrl-C, no worker is left: each is killed, and its unfinished task leaves only temporary files.
    """
    num_workers = min(num_workers, len(tasks))
    if num_workers <= 1:
        decoder = load_decoder(tokenizer_json, settings)
        for task in tasks:
            report(run_task(task, settings, decoder))
        return
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(os.getpid(), settings, tokenizer_json, lock),
    )
    try:
        for done in as_completed([pool.submit(_work, task) for task in tasks]):
            report(done.result())
    except BaseException as error:
        for child in multiprocessing.active_children():
            child.kill()
        if isinstance(error, BrokenProcessPool):
            raise FlameError(
                "a worker died",
                where=settings.build.corpus,
                fix="If memory ran out, use fewer --num_workers; run the same command again: finished tasks are kept",
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start(parent: int, settings: ConvertSettings, tokenizer_json: bytes, lock: Path) -> None:
    """Make this process a worker."""
    global _worker
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends its workers
    os.environ.update(ENVIRONMENT)
    held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    fcntl.flock(held, fcntl.LOCK_SH)  # shared by the workers: who would have it alone waits for all of them
    _worker = _Worker(settings=settings, decoder=load_decoder(tokenizer_json, settings), lock=held)


def _work(task: Task) -> Progress:
    assert _worker is not None, "the pool starts its workers"
    return run_task(task, _worker.settings, _worker.decoder)
