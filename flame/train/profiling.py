"""Profiler traces of a run: what the last step of every period did, one Chrome trace a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from flame.errors import UsageError
from flame.train.log import log
from flame.train.options import ProfilingOptions

WARMUP_STEPS = 3  # the profiler's own start is not in the trace


@contextlib.contextmanager
def profiling(options: ProfilingOptions, dump_folder: Path, *, rank: int, step: int) -> Iterator[Callable[[], None]]:
    """Yield what is to be called after each step; `step` is the last that was done before.

    Writes dump_folder/save_traces_folder/iteration_N/rankR_trace.json. Nothing is started when it is off.
    """
    if not options.enable_profiling:
        yield lambda: None
        return
    period = options.profile_freq
    if period < 2:  # the profiler needs a step to warm up in
        raise UsageError(f"--profiling.profile_freq cannot be {period}", expected="at least 2 steps")
    warmup = min(WARMUP_STEPS, period - 1)
    folder, written = dump_folder / options.save_traces_folder, 0

    def write(profiler: torch.profiler.profile) -> None:
        nonlocal written
        done = profiler.step_num
        if done % period or done == written:  # the run ended within a period
            return
        path = folder / f"iteration_{step + done}" / f"rank{rank}_trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        written = done
        log.info("wrote the trace %s", path)

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=period - 1 - warmup, warmup=warmup, active=1)
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write) as profiler:
        yield profiler.step
