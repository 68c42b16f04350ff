"""How a run ends: finished, stopped, or failed; and what status.json says of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from flame.errors import TrainingError
from flame.train.distributed import raise_together
from flame.train.log import log
from flame.train.run import State, write_status
from flame.train.setup import Run
from flame.train.signals import EXIT_PREEMPTED, StopRequest
from flame.train.train_state import TrainState
from flame.words import counted


def tell_status(
    run: Run, status: State, state: TrainState, checkpoint: Path | None = None, reason: str | None = None
) -> None:
    """Write status.json: where the run stands, in steps and in its data (rank 0)."""
    folder, data = run.config.job.dump_folder, run.position_at(state).to_json()
    write_status(folder, status, step=state.step, checkpoint=checkpoint, reason=reason, data=data)


@contextlib.contextmanager
def failure_told(run: Run, where: Callable[[], tuple[TrainState, Path | None]]) -> Iterator[None]:
    """Write status.json when the block fails, whoever asks next why the run is gone."""
    try:
        yield
    except BaseException as error:
        if run.world.is_main:
            state, checkpoint = where()
            tell_status(run, "failed", state, checkpoint, str(error) or type(error).__name__)
        raise


def end_early(run: Run, stop: StopRequest, state: TrainState, latest: Path | None) -> int:
    """Say that the run was stopped, and where it can go on; 75 promises that nothing trained is lost."""
    reason = stop.received.name if stop.received is not None else "a signal to another rank"
    if not run.config.checkpoint.enable_checkpoint and state.step > 0:
        error = TrainingError(
            f"the run was stopped by {reason} after step {state.step}, and nothing was saved",
            fix="checkpoint.enable_checkpoint is off; leave it on to go on from where a run was stopped",
        )
        if run.world.is_main:
            tell_status(run, "failed", state, reason=str(error))
        raise error
    if run.world.is_main:
        tell_status(run, "preempted", state, latest, reason)
    log.info("stopped by %s after step %d; the same command goes on from there", reason, state.step)
    return EXIT_PREEMPTED


def finish(run: Run, state: TrainState, latest: Path | None) -> None:
    """Export the last checkpoint (rank 0) and say that the run is finished; all ranks leave together."""
    folder, checkpoint = run.config.job.dump_folder, run.config.checkpoint
    error: Exception | None = None
    if run.world.is_main:
        try:
            if checkpoint.export_hf and latest is not None:
                from flame.export.hf import export_checkpoint  # the exporter reads our checkpoints: not at the top

                export_checkpoint(latest, folder / "hf", dtype=checkpoint.export_dtype, fast_open=True, replace=True)
                log.info("exported %s", folder / "hf")
            tell_status(run, "finished", state, latest)
        except Exception as caught:
            tell_status(run, "failed", state, latest, f"the export failed: {caught}")
            error = caught
    raise_together(error, run.world, "the final export")
    log.info("finished: %s, %s tokens", counted(state.step, "step"), f"{state.consumed_tokens:,}")
