"""The training loop: from a configuration to a trained model, top to bottom.

Every step is a pure function of the state before it: the samples from `consumed_samples` on, the learning rate of the
step, the random numbers of (training.seed, step, dp_rank). So a resumed run is the uninterrupted run.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from flame.errors import TrainingError
from flame.files import exclusive_lock
from flame.train.activations import offloading
from flame.train.checkpoint import save_checkpoint, small_files
from flame.train.checkpoint_files import retain_latest
from flame.train.checkpoint_saver import CheckpointSaver
from flame.train.config import TrainConfig, flatten, to_toml
from flame.train.distributed import World, join_world, raise_together, set_collective_timeout
from flame.train.due import agree, what_is_due
from flame.train.ending import end_early, failure_told, finish, tell_status
from flame.train.interval import IntervalClock
from flame.train.loader import StepLoader
from flame.train.log import configure_logging, live_line_erased, log
from flame.train.loggers import LoggedRun, open_loggers
from flame.train.parallelize import reshard
from flame.train.profiling import profiling
from flame.train.setup import Run, prepare
from flame.train.signals import StopRequest
from flame.train.skips import SkippedSteps
from flame.train.step import make_update, refuse_nan, train_step
from flame.train.step_log import StepLog
from flame.train.train_state import TrainState
from flame.train.validation import validate
from flame.train.watchdog import INIT_TIMEOUT, SHUTDOWN_TIMEOUT, TRAIN_TIMEOUT, Watchdog
from flame.words import counted


def train(config: TrainConfig, argv: Sequence[str] = ()) -> int:
    """Run a configuration to its end, or to a stop signal; returns the exit code (0 or 75).

    `argv` is kept in segments.jsonl. Every rank calls it. Raises `FlameError` for what a user can mend.
    """
    began = time.monotonic()
    stop = StopRequest()
    stop.install()
    with join_world(
        replicate=config.training.data_parallel_replicate_degree,
        shard=config.training.data_parallel_shard_degree,
        init_timeout_seconds=config.comm.init_timeout_seconds,
        shutdown_timeout_seconds=config.comm.shutdown_timeout_seconds,
    ) as world:
        configure_logging(world.rank, world.size, plain=config.metrics.disable_color_printing)
        if config.job.print_args:
            log.info("resolved configuration:\n%s", to_toml(config))
        if config.job.use_for_integration_test:
            log.info("job.use_for_integration_test has no effect")
        with _alone_in(config.job.dump_folder, world), _watched(config, world) as watchdog:
            run = prepare(config, world, argv)
            if config.checkpoint.create_seed_checkpoint:
                return save_seed(run)
            logged = LoggedRun(
                folder=config.job.dump_folder,
                run_id=run.segment.run_id,
                first_step=run.state.step + 1,
                rank=world.rank,
                options=config.metrics,
                config=flatten(config),
            )
            with open_loggers(logged) as log_elsewhere:
                return run_steps(run, stop, began, watchdog, log_elsewhere)


def run_steps(
    run: Run,
    stop: StopRequest,
    began: float,
    watchdog: Watchdog,
    log_elsewhere: Callable[[Mapping[str, Any]], None],
) -> int:
    """Train from `run.state` to the last step, or until a stop is asked for; `began` is when the process started.

    `log_elsewhere` is given every line of metrics.jsonl.
    """
    config, world, state, total_steps = run.config, run.world, run.state, run.total_steps
    _tell_size(run)
    loader, saver = _make_loader(run), _make_saver(run)
    update = make_update(run, saver)
    offload = offloading(config.activation_offload.mode, world.device)
    step_log = StepLog(run, log_elsewhere)
    elapsed_before, train_began = state.elapsed_seconds, time.monotonic()
    skipped_steps = SkippedSteps(state.skipped_steps)
    first_step, stopped = state.step + 1, False

    with (
        _garbage_by_hand(),
        failure_told(run, lambda: (state, saver.latest)),
        contextlib.closing(loader),
        contextlib.closing(saver),
        live_line_erased(),
        watchdog.explaining(),
        profiling(
            config.profiling, config.job.dump_folder, device=world.device, rank=world.rank, step=state.step
        ) as profiled_step,
    ):
        while state.step < total_steps:
            step = state.step + 1
            watchdog.begin(f"step {step}", INIT_TIMEOUT if step == first_step else TRAIN_TIMEOUT)
            batch = next(loader)
            agreed = agree(run, batch, stop, saver)
            if agreed.stops:
                stopped = True
                break
            done = train_step(run, step, batch, agreed.num_labels, update, offload)
            skipped_steps.add(step, done.skip)
            state = replace(
                state,
                step=step,
                consumed_samples=batch.consumed_samples,
                consumed_tokens=state.consumed_tokens + run.geometry.tokens_per_step,
                elapsed_seconds=elapsed_before + time.monotonic() - train_began,
            )
            step_log.count(done, wait_seconds=loader.wait_seconds, flops=agreed.flops)

            # ---- now and then: validate, log, save
            due = what_is_due(run, step, save_asked=agreed.saves, is_first=step == first_step)
            if due.saves or due.logs:
                state = replace(state, skipped_steps=skipped_steps.total())
                if not done.skip.read():
                    refuse_nan(done.grad_norm, step)
            if due.logs:
                scores = _validate(run, step_log.clock) if due.validates else {}
                keep, saves = due.validates or step == total_steps, saver.take_times()
                step_log.write(state, done, saves=saves, validation=scores, keep=keep)
            if step == first_step:  # logged, so that the device has done it
                set_collective_timeout(world, config.comm.train_timeout_seconds)
                log.info("first step done %.1f s after the start", time.monotonic() - began)
            with step_log.clock.paused():
                profiled_step()  # before the save, which is no part of the step's trace
            if due.saves:
                watchdog.begin(f"the save of step {step}", SHUTDOWN_TIMEOUT)
                with step_log.clock.paused(), record_function("flame: save"):
                    saver.save(state, wait=step == total_steps, weights_only=due.weights_only)
            saver.poll()
            if step % config.training.gc_freq == 0:
                gc.collect()

        watchdog.begin("the end", SHUTDOWN_TIMEOUT)
        if stopped and config.checkpoint.enable_checkpoint and state.step > 0:
            saver.save(replace(state, skipped_steps=skipped_steps.total()), wait=True)

    if stopped:
        return end_early(run, stop, state, saver.latest)
    finish(run, state, saver.latest)
    return 0


def _validate(run: Run, clock: IntervalClock) -> dict[str, dict[str, float | None]]:
    """Return the scores of every validation set, by its name; the clock of training stands still."""
    with clock.paused(), record_function("flame: validation"):
        scores = {chosen.name: validate(run.module, chosen, run.geometry, run.world) for chosen in run.validation_sets}
        reshard(run.module)
    return scores


def _tell_size(run: Run) -> None:
    geometry = run.geometry
    log.info(
        "%s of %s tokens: %s × %s × %s of %s tokens; warm-up %s",
        *(counted(run.total_steps, "step"), f"{geometry.tokens_per_step:,}", counted(run.world.size, "rank")),
        *(counted(geometry.micro_batch, "row"), counted(geometry.accumulation, "micro-batch", "es")),
        *(f"{geometry.seq_len:,}", counted(run.warmup_steps, "step")),
    )
    if run.state.step >= run.total_steps:
        log.info("nothing is left to train: the run is at step %d, and ends at %d", run.state.step, run.total_steps)


def _make_loader(run: Run) -> StepLoader:
    """Return what reads the run's steps, from the first that is still to come."""
    training = run.config.training
    return StepLoader(
        run.sampler,
        run.data.splits,
        run.geometry,
        dp_rank=run.world.dp_rank,
        consumed_samples=run.state.consumed_samples,
        num_embeddings=run.num_embeddings,
        device=run.world.device,
        num_threads=training.num_workers,
        prefetch_steps=max(1, training.num_workers) * training.prefetch_factor,
    )


def _make_saver(run: Run) -> CheckpointSaver:
    """Return what saves the run's checkpoints, and lets older ones go as newer ones are whole."""
    options, folder = run.config.checkpoint, run.config.checkpoint_folder

    def published(state: TrainState, path: Path) -> None:
        if run.world.is_main:
            retain_latest(folder, options.keep_latest_k)
            tell_status(run, "running", state, path)

    return CheckpointSaver(
        folder,
        world=run.world,
        mode=options.async_mode,
        model=run.module.model,
        optimizer=run.optimizer,
        published=published,
        latest=run.latest,
        shutdown_timeout_seconds=run.config.comm.shutdown_timeout_seconds,
        identity=run.identity,
        small_files=small_files(to_toml(run.config), run.hf_files),
    )


def save_seed(run: Run) -> int:
    """Save the weights that the run would begin with as its step 0, for any number of ranks; returns 0."""
    if run.state.step > 0 or run.latest is not None:
        raise TrainingError(
            "the run has begun: checkpoint.create_seed_checkpoint would make its weights again",
            where=run.latest,
            fix="Leave it away to go on, or choose another job.dump_folder",
        )
    path = save_checkpoint(
        run.config.checkpoint_folder,
        model=run.module.model,
        optimizer=None,
        state=TrainState(),
        identity=None,
        config_toml=to_toml(run.config),
        hf_files=run.hf_files,
        world=run.world,
    )
    if run.world.is_main:
        tell_status(run, "finished", TrainState(), path)
    log.info("saved the seed checkpoint %s; the same command without create_seed_checkpoint trains from it", path)
    return 0


@contextlib.contextmanager
def _alone_in(folder: Path, world: World) -> Iterator[None]:
    """Keep a second run out of the folder for as long as this one lives, however it ends."""
    with contextlib.ExitStack() as held:
        error: Exception | None = None
        try:
            if world.is_main:
                held.enter_context(exclusive_lock(folder / ".lock", what="this run"))
        except OSError as caught:
            error = TrainingError(
                f"the run folder cannot be written into: {caught.strerror or caught}",
                where=caught.filename or folder,
                fix="Name another folder in --job.dump_folder, or make this one writable",
            )
        except Exception as caught:
            error = caught
        raise_together(error, world, "opening the run folder")
        yield


@contextlib.contextmanager
def _watched(config: TrainConfig, world: World) -> Iterator[Watchdog]:
    """Have a thread look at how long this rank takes, from its start to its end."""
    timeouts = {
        INIT_TIMEOUT: config.comm.init_timeout_seconds,
        TRAIN_TIMEOUT: config.comm.train_timeout_seconds,
        SHUTDOWN_TIMEOUT: config.comm.shutdown_timeout_seconds,
    }
    watchdog = Watchdog(config.job.dump_folder, rank=world.rank, world_size=world.size, timeouts=timeouts)
    with contextlib.closing(watchdog), watchdog.explaining():
        yield watchdog


@contextlib.contextmanager
def _garbage_by_hand() -> Iterator[None]:
    """Keep Python's collector from pausing some rank in the middle of a step.

    What is there before the first step is never looked at again, so that a whole collection takes but milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
