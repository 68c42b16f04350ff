"""Profiler traces of a run: what the last step of every period did, one Chrome trace a rank."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from flame.files import publish, temporary_path
from flame.train.log import log
from flame.train.options import ProfilingOptions
from flame.train.snapshots import SNAPSHOTS, memory_snapshots

WARMUP_STEPS = 3  # the profiler's own start is not in the trace


@contextlib.contextmanager
def profiling(
    options: ProfilingOptions, dump_folder: Path, *, device: torch.device, rank: int, step: int
) -> Iterator[Callable[[], None]]:
    """Yield what is to be called after each step; `step` is the last that was done before.

    Writes dump_folder/save_traces_folder/iteration_N/rankR_trace.json, and memory snapshots beside, as `options` ask.
    What cannot be written is told and left away: a run never ends for it. Nothing is started for what is off.
    """
    with contextlib.ExitStack() as stack:
        parts: list[Callable[[], None]] = []
        if options.enable_profiling:
            folder = dump_folder / options.save_traces_folder
            parts.append(stack.enter_context(_traces(folder, options.profile_freq, rank=rank, step=step)))
        if options.enable_memory_snapshot:
            folder = dump_folder / options.save_memory_snapshot_folder
            snapshots = memory_snapshots(
                SNAPSHOTS[device.type], folder, options.profile_freq, rank=rank, step=step, write=write_or_warn
            )
            parts.append(stack.enter_context(snapshots))

        def step_done() -> None:
            for part in parts:
                part()

        yield step_done


@contextlib.contextmanager
def _traces(folder: Path, period: int, *, rank: int, step: int) -> Iterator[Callable[[], None]]:
    # Each trace is of one step, which is what is wanted: torch warns that earlier ones are forgotten.
    warnings.filterwarnings("ignore", message=".*Profiler clears events", category=UserWarning)
    warmup, written = min(WARMUP_STEPS, period - 1), 0

    def export(profiler: torch.profiler.profile) -> None:
        nonlocal written
        done = profiler.step_num
        if done % period or done == written:  # the run ended within a period
            return
        written = done
        path = folder / f"iteration_{step + done}" / f"rank{rank}_trace.json"
        write_or_warn("the trace", path, lambda temporary: _export_whole(profiler, temporary))

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=period - 1 - warmup, warmup=warmup, active=1)
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=export) as profiler:
        yield profiler.step


def _export_whole(profiler: torch.profiler.profile, path: Path) -> None:
    """Write the trace; `OSError` where the disk did not take all of it, of which torch says nothing."""
    profiler.export_chrome_trace(str(path))
    with open(path, "rb") as file:
        file.seek(max(path.stat().st_size - 16, 0))
        if not file.read().rstrip().endswith(b"}"):
            raise OSError("only a part of it was written: is the disk full?")


def write_or_warn(what: str, path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make the file `path`, whole or not at all; where it cannot, say so and go on."""
    temporary = temporary_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        publish(temporary, path)
    except (OSError, RuntimeError) as error:  # torch's writers raise either
        log.warning("%s is not written, training goes on: %s: %s", what, path, error)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        return
    log.info("wrote %s %s", what, path)
