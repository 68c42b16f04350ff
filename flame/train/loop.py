"""The training loop: from a configuration to a trained model, top to bottom.

Every step is a pure function of the state before it: the samples from `consumed_samples` on, the learning rate of the
step, the random numbers of (training.seed, step, dp_rank). So a resumed run is the uninterrupted run.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flame.errors import TrainingError
from flame.files import exclusive_lock
from flame.sampling.history import METRICS
from flame.train.activations import offloading
from flame.train.checkpoint import TrainState, save_checkpoint, small_files
from flame.train.checkpoint_files import retain_latest
from flame.train.checkpoint_saver import CheckpointSaver
from flame.train.config import TrainConfig, flatten, to_toml
from flame.train.devices import peak_flops
from flame.train.distributed import World, join_world, raise_together, set_collective_timeout, sum_across_ranks
from flame.train.flops import ModelFlops
from flame.train.loader import StepBatch, StepLoader
from flame.train.log import configure_logging, live_line_erased, log
from flame.train.loggers import LoggedRun, open_loggers
from flame.train.losses import (
    MAX_STEPS_KEPT,
    StepLosses,
    gather_losses,
    keep_losses,
    spike_rule_of,
    spike_told,
    sum_by_sample,
)
from flame.train.metrics import IntervalClock, MetricsFile, StepMetrics, memory_use, tell_step, use_color
from flame.train.model import CausalLMLoss
from flame.train.optimizer import JoinedOptimizer, apply_hyperparameters
from flame.train.parallelize import reduce_gradients, reshard
from flame.train.run import State, write_status
from flame.train.schedule import lr_factor
from flame.train.setup import Run, prepare
from flame.train.signals import EXIT_PREEMPTED, StopRequest
from flame.train.update import Update, UpdateAfterBackward, UpdateInBackward
from flame.train.validation import validate

MAX_SKIPPED_IN_A_ROW = 100


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
        with _alone_in(config.job.dump_folder, world):
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
                return run_steps(run, stop, began, log_elsewhere)


def run_steps(run: Run, stop: StopRequest, began: float, log_elsewhere: Callable[[Mapping[str, Any]], None]) -> int:
    """Train from `run.state` to the last step, or until a stop is asked for; `began` is when the process started.

    `log_elsewhere` is given every line of metrics.jsonl.
    """
    config, world, geometry, state = run.config, run.world, run.geometry, run.state
    training, folder, total_steps = config.training, config.job.dump_folder, run.total_steps
    log.info(
        "%d steps of %s tokens: %d ranks × %d rows × %d micro-batches of %d tokens; warm-up %d steps",
        *(total_steps, f"{geometry.tokens_per_step:,}", world.size, geometry.micro_batch, geometry.accumulation),
        *(geometry.seq_len, run.warmup_steps),
    )
    loader, saver = _make_loader(run), _make_saver(run)
    in_seconds = config.checkpoint.interval_type == "seconds"
    save_seconds = config.checkpoint.interval if in_seconds else math.inf
    offload = offloading(config.activation_offload.mode, world.device)
    update = _make_update(run, saver)
    metrics_file = MetricsFile(folder / METRICS if world.is_main else None)
    color = use_color(disabled=config.metrics.disable_color_printing)
    source_names = [source.name for source in run.data.mixture.sources]
    peak = None if run.flops is None else peak_flops(world.device, config.metrics.peak_tflops)
    clock = IntervalClock()
    spike_rule, kept_losses = spike_rule_of(folder, world), deque[StepLosses](maxlen=MAX_STEPS_KEPT)
    elapsed_before, train_began = state.elapsed_seconds, time.monotonic()
    first_step, skipped_in_a_row, stopped = state.step + 1, 0, False

    with (
        _garbage_by_hand(),
        _failure_told(run, lambda: (state, saver.latest)),
        contextlib.closing(loader),
        contextlib.closing(saver),
        live_line_erased(),
    ):
        while state.step < total_steps:
            step = state.step + 1
            last_step = step == total_steps

            # ---- what all ranks agree on: the labels of the global batch, and whether to stop
            batch = next(loader)
            own_flops = 0 if run.flops is None else _count_flops(run.flops, batch)
            save_is_due = world.is_main and saver.seconds_since_save >= save_seconds  # rank 0's clock counts
            num_labels, step_flops, stop_votes, save_votes = sum_across_ranks(
                [batch.num_labels, own_flops, int(stop.received is not None), int(save_is_due)]
            )
            if stop_votes:
                stopped = True
                break

            # ---- forward, backward, update
            lr = config.optimizer.lr * lr_factor(
                step - 1,
                warmup_steps=run.warmup_steps,
                total_steps=total_steps,
                decay_ratio=config.lr_scheduler.decay_ratio,
                decay_type=config.lr_scheduler.decay_type,
                lr_min=config.lr_scheduler.lr_min,
            )
            apply_hyperparameters(run.optimizer, config.optimizer, lr)
            torch.manual_seed(step_seed(training.seed, step, world.dp_rank))
            update.begin(num_labels)
            own_loss, sample_losses = _backward(run.module, batch, offload, geometry.window_len)
            kept_losses.append(keep_losses(step, batch, num_labels, own_loss, sample_losses))
            grad_norm, skipped = update.finish()

            # ---- the state after the step
            state = replace(
                state,
                step=step,
                consumed_samples=batch.consumed_samples,
                consumed_tokens=state.consumed_tokens + geometry.tokens_per_step,
                skipped_steps=state.skipped_steps + int(skipped),
                elapsed_seconds=elapsed_before + time.monotonic() - train_began,
            )
            clock.count_step(
                num_tokens=geometry.tokens_per_step,
                wait_seconds=loader.wait_seconds,
                flops=None if run.flops is None else step_flops,
            )
            skipped_in_a_row = skipped_in_a_row + 1 if skipped else 0
            if skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                raise TrainingError(
                    f"{skipped_in_a_row} updates in a row were skipped",
                    where=f"step {step}",
                    fix="Lower optimizer.lr, lengthen the warm-up, or look at the data with flame-mix samples",
                )
            # ---- now and then: validate, log, save
            at_interval = save_votes > 0 if in_seconds else step % config.checkpoint.interval == 0
            saves = config.checkpoint.enable_checkpoint and (last_step or at_interval)
            validates = bool(run.validation_sets) and (last_step or step % config.validation.freq == 0)
            logs = validates or last_step or step == first_step or step % config.metrics.log_freq == 0
            if (saves or logs) and not skipped:
                _refuse_nan(grad_norm, step)
            scores: dict[str, dict[str, float | None]] = {}
            if validates:
                with clock.paused():
                    scores = {c.name: validate(run.module, c, geometry, world) for c in run.validation_sets}
                    reshard(run.module)
            if logs:
                losses = gather_losses(kept_losses, spike_rule, geometry, len(source_names), world)
                kept_losses.clear()
                line = StepMetrics(
                    step=step,
                    consumed_samples=state.consumed_samples,
                    consumed_tokens=state.consumed_tokens,
                    segment=run.segment.number,
                    stage=run.sampler.stage_at(batch.consumed_samples - 1),
                    losses=losses,
                    source_names=source_names,
                    lr=lr,
                    grad_norm=float(grad_norm),
                    skipped_steps=state.skipped_steps,
                    interval=clock.next_interval(),
                    world_size=world.size,
                    peak_flops=peak,
                    memory=memory_use(world.device),
                    validation=scores,
                ).to_json()
                metrics_file.write(line)
                log_elsewhere(line)
                elapsed = state.elapsed_seconds
                keep = validates or last_step
                tell_step(line, total_steps=total_steps, elapsed_seconds=elapsed, color=color, keep=keep)
                for spike in losses.spikes:
                    log.info(spike_told(spike, folder))
            if step == first_step:  # logged, so that the device has done it
                set_collective_timeout(world, config.comm.train_timeout_seconds)
                log.info("first step done %.1f s after the start", time.monotonic() - began)
            if saves:
                with clock.paused():
                    weights_only = last_step and config.checkpoint.model_weights_only
                    saver.save(state, wait=last_step, weights_only=weights_only)
            saver.poll()
            if step % training.gc_freq == 0:
                gc.collect(1)

        if stopped and config.checkpoint.enable_checkpoint and state.step > 0:
            saver.save(state, wait=True)

    if stopped:
        return _end_early(run, stop, state, saver.latest)
    _finish(run, state, saver.latest)
    return 0


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
            _tell(run, "running", state, path)

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


def _make_update(run: Run, saver: CheckpointSaver) -> Update:
    """Return what updates the run's weights once a step."""
    if run.config.optimizer.early_step_in_backward:
        assert isinstance(run.optimizer, JoinedOptimizer), "build_optimizer made one"
        return UpdateInBackward(run.optimizer, before_update=saver.before_update)
    return UpdateAfterBackward(
        run.optimizer,
        list(run.module.parameters()),
        max_norm=run.config.training.max_norm,
        skip_not_finite=run.config.training.skip_nan_inf,
        before_update=saver.before_update,
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
        _tell(run, "finished", TrainState(), path)
    log.info("saved the seed checkpoint %s; the same command without create_seed_checkpoint trains from it", path)
    return 0


def step_seed(seed: int, step: int, dp_rank: int) -> int:
    """Return the seed of all random numbers that one rank draws in one step: no RNG state is ever saved."""
    digest = hashlib.blake2b(f"{seed}|{step}|{dp_rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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


def _backward(
    module: CausalLMLoss,
    batch: StepBatch,
    offload: Callable[[], contextlib.AbstractContextManager[Any]],
    window_len: int,
) -> tuple[Tensor, list[Tensor]]:
    """Add the gradients of a rank's micro-batches, as sums over labels.

    Returns the sum of its losses (fp32), and those of each micro-batch's samples. Forward runs in `offload()`.
    """
    own_loss: Tensor | None = None
    sample_losses: list[Tensor] = []
    for index, micro in enumerate(batch.micro_batches):
        reduce_gradients(module, index == len(batch.micro_batches) - 1)
        with offload():
            loss_sum, _, token_losses = module(
                micro.input_ids, micro.labels, micro.positions, micro.cu_seqlens, micro.max_seqlen
            )
        loss_sum.backward()
        sample_losses.append(sum_by_sample(token_losses, window_len))
        own_loss = loss_sum.detach() if own_loss is None else own_loss + loss_sum.detach()
    assert own_loss is not None, "a step has a micro-batch"
    return own_loss, sample_losses


def _count_flops(flops: ModelFlops, batch: StepBatch) -> int:
    return sum(flops.count(micro.input_ids.numel(), micro.lengths) for micro in batch.micro_batches)


def _refuse_nan(grad_norm: Tensor, step: int) -> None:
    """Stop before weights that are no numbers are logged or saved as if they were."""
    if not bool(torch.isfinite(grad_norm)):
        raise TrainingError(
            f"the gradient of step {step} is not finite",
            got=f"a norm of {float(grad_norm)}",
            fix="Resume from the last checkpoint with a lower optimizer.lr, or with --training.skip_nan_inf, "
            "which skips such updates",
        )


@contextlib.contextmanager
def _garbage_by_hand() -> Iterator[None]:
    """Keep Python's collector from pausing some rank in the middle of a step."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _failure_told(run: Run, where: Callable[[], tuple[TrainState, Path | None]]) -> Iterator[None]:
    """Write status.json when the block fails, whoever asks next why the run is gone."""
    try:
        yield
    except BaseException as error:
        if run.world.is_main:
            state, checkpoint = where()
            _tell(run, "failed", state, checkpoint, str(error) or type(error).__name__)
        raise


def _tell(
    run: Run, status: State, state: TrainState, checkpoint: Path | None = None, reason: str | None = None
) -> None:
    """Write status.json: where the run stands, in steps and in its data (rank 0)."""
    folder, data = run.config.job.dump_folder, run.position_at(state).to_json()
    write_status(folder, status, step=state.step, checkpoint=checkpoint, reason=reason, data=data)


def _end_early(run: Run, stop: StopRequest, state: TrainState, latest: Path | None) -> int:
    """Say that the run was stopped, and where it can go on; 75 promises that nothing trained is lost."""
    reason = stop.received.name if stop.received is not None else "a signal to another rank"
    if not run.config.checkpoint.enable_checkpoint and state.step > 0:
        error = TrainingError(
            f"the run was stopped by {reason} after step {state.step}, and nothing was saved",
            fix="checkpoint.enable_checkpoint is off; leave it on to go on from where a run was stopped",
        )
        if run.world.is_main:
            _tell(run, "failed", state, reason=str(error))
        raise error
    if run.world.is_main:
        _tell(run, "preempted", state, latest, reason)
    log.info("stopped by %s after step %d; the same command goes on from there", reason, state.step)
    return EXIT_PREEMPTED


def _finish(run: Run, state: TrainState, latest: Path | None) -> None:
    """Export the last checkpoint (rank 0) and say that the run is finished; all ranks leave together."""
    folder, checkpoint = run.config.job.dump_folder, run.config.checkpoint
    error: Exception | None = None
    if run.world.is_main:
        try:
            if checkpoint.export_hf and latest is not None:
                from flame.export.hf import export_checkpoint  # the exporter reads our checkpoints: not at the top

                export_checkpoint(latest, folder / "hf", dtype=checkpoint.export_dtype, fast_open=True, replace=True)
                log.info("exported %s", folder / "hf")
            _tell(run, "finished", state, latest)
        except Exception as caught:
            _tell(run, "failed", state, latest, f"the export failed: {caught}")
            error = caught
    raise_together(error, run.world, "the final export")
    log.info("finished: %d steps, %s tokens", state.step, f"{state.consumed_tokens:,}")
