"""A sweep over the configurations of a Triton kernel: compiled on all cores first, then timed one after the other."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

log = logging.getLogger("flame")

REPORT_SECONDS = 10.0
STALL_SECONDS = 300.0
"""Compilers of which none finishes anything for so long are ended; what they lack is compiled when it is timed."""


class Sweeps:
    """The sweeps that this process had to run: how many, and for how long. `bench` times one configuration."""

    def __init__(self, bench: Callable[..., Any]) -> None:
        self.bench = bench
        self.count = 0
        self.seconds = 0.0

    def run(self, autotuner: Any, candidates: Sequence[Any], key: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the fastest candidate for the call that the autotuner is in; says what it does and how far it is."""
        self.count += 1
        kernel = autotuner.base_fn.__name__
        workers = num_compilers(len(candidates))
        log.info(
            f"tuning {kernel}, the {_ordinal(self.count)} sweep of this start: {len(candidates)} configurations for "
            f"{key}, compiled on {workers} core{'s' if workers > 1 else ''}; the outcome is kept"
        )
        began = time.monotonic()

        def report(done: int) -> None:
            log.info(f"tuning {kernel}: {done} of {len(candidates)} compiled, {time.monotonic() - began:.0f} s")

        args = tuple(autotuner.nargs.values())
        if workers > 1:
            compile_in_parallel(autotuner, args, kwargs, candidates, workers, report)
        compiled = time.monotonic()
        timings = {candidate: self.bench(autotuner, *args, config=candidate, **kwargs) for candidate in candidates}
        best = min(timings, key=lambda candidate: timings[candidate])
        # as after a sweep of Triton's own: what the kernel adds to begins at zero again
        autotuner.pre_hook({**autotuner.nargs, **kwargs, **best.all_kwargs()}, reset_only=True)
        ended = time.monotonic()
        self.seconds += ended - began
        log.info(
            f"tuned {kernel}: {best}; compiled in {compiled - began:.1f} s, timed in {ended - compiled:.1f} s, "
            f"{self.seconds:.0f} s of tuning so far"
        )
        return best


def num_compilers(num_candidates: int) -> int:
    """Return how many processes compile at once: this rank's share of the cores that the host's ranks may use."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(cores, num_candidates))


def compile_in_parallel(
    autotuner: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    candidates: Sequence[Any],
    num_workers: int,
    report: Callable[[int], None],
) -> int:
    """Compile every candidate into Triton's cache by forks of this process; return how many were done.

    A fork has the kernel, its arguments and what they import; it touches no device. What fails or is missing is no
    error here: it is compiled again when it is timed, and then raises what it raises.
    """
    device = prepare_for_forks(autotuner)
    # ranks begin at different places, so that what one has compiled another finds
    first = int(os.environ.get("LOCAL_RANK", "0")) * len(candidates) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    order = [(first + number) % len(candidates) for number in range(len(candidates))]
    jobs, jobs_end = os.pipe()
    os.write(jobs_end, b"".join(number.to_bytes(2, "little") for number in order))
    done_end, done = os.pipe()
    workers = []
    for _ in range(num_workers):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads beside a fork: the fork waits for none
            worker = os.fork()
        if worker == 0:
            with contextlib.suppress(BaseException):
                os.close(jobs_end)
                _compile_jobs(autotuner, args, kwargs, candidates, device, jobs, done)
            os._exit(0)
        workers.append(worker)
    for end in (jobs, jobs_end, done):
        os.close(end)
    try:
        return _await(done_end, report)
    finally:
        os.close(done_end)
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(worker, 0)


def prepare_for_forks(autotuner: Any) -> int:
    """Ask the device all that compiling asks it, as a fork cannot; return its number."""
    from triton.runtime.driver import driver

    function = autotuner.fn
    while not hasattr(function, "device_caches"):
        function = function.fn
    device: int = driver.active.get_current_device()
    function.device_caches[device]  # holds the target from now on
    function.cache_key  # noqa: B018 # takes a lock, and is then known
    return device


def _compile_jobs(
    autotuner: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    candidates: Sequence[Any],
    device: int,
    jobs: int,
    done: int,
) -> None:
    from triton.runtime.driver import driver

    gc.disable()  # frees nothing that belongs to the device
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    driver.active.get_current_device = lambda: device
    driver.active.get_current_stream = lambda _: 0
    while job := os.read(jobs, 2):
        candidate = candidates[int.from_bytes(job, "little")]
        with contextlib.suppress(Exception):
            autotuner.fn.run(*args, **{**kwargs, **candidate.all_kwargs(), "warmup": True})
        os.write(done, b".")


def _await(done_end: int, report: Callable[[int], None]) -> int:
    num_done, reported, heard = 0, time.monotonic(), time.monotonic()
    while True:
        ready, _, _ = select.select([done_end], [], [], 1.0)
        now = time.monotonic()
        if ready:
            finished = os.read(done_end, 4096)
            if not finished:
                return num_done
            num_done += len(finished)
            heard = now
        if now - reported >= REPORT_SECONDS:
            report(num_done)
            reported = now
        if now - heard >= STALL_SECONDS:
            log.warning(f"compilers of a kernel did nothing for {STALL_SECONDS:.0f} s and are ended")
            return num_done


def _ordinal(number: int) -> str:
    suffix = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
