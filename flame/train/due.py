"""What the ranks agree on before a step, and what follows it: a save, a validation, a logged line."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flame.train.checkpoint_saver import CheckpointSaver
from flame.train.distributed import sum_across_ranks
from flame.train.loader import StepBatch
from flame.train.setup import Run
from flame.train.signals import StopRequest
from flame.train.step import count_flops


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all ranks say together of a step: sums over the global batch, and what any rank asks for."""

    num_labels: int
    flops: int
    stops: bool
    saves: bool


def agree(run: Run, batch: StepBatch, stop: StopRequest, saver: CheckpointSaver) -> Agreed:
    """Sum up a step's batch over all ranks and hear whether any was signalled: one all-reduce on the CPU."""
    options = run.config.checkpoint
    save_seconds = options.interval if options.interval_type == "seconds" else math.inf
    save_is_due = run.world.is_main and saver.seconds_since_save >= save_seconds  # rank 0's clock counts
    num_labels, flops, stop_votes, save_votes = sum_across_ranks(
        [batch.num_labels, count_flops(run.flops, batch), int(stop.received is not None), int(save_is_due)]
    )
    return Agreed(num_labels=num_labels, flops=flops, stops=stop_votes > 0, saves=save_votes > 0)


@dataclass(frozen=True, kw_only=True)
class Due:
    """What follows a step."""

    saves: bool
    weights_only: bool
    validates: bool
    logs: bool


def what_is_due(run: Run, step: int, *, save_asked: bool, is_first: bool) -> Due:
    """Tell what follows a step; `save_asked`: rank 0's clock says so; `is_first` of this process."""
    config, is_last = run.config, step == run.total_steps
    options = config.checkpoint
    at_interval = save_asked if options.interval_type == "seconds" else step % options.interval == 0
    validates = bool(run.validation_sets) and (is_last or step % config.validation.freq == 0)
    return Due(
        saves=options.enable_checkpoint and (is_last or at_interval),
        weights_only=is_last and options.model_weights_only,
        validates=validates,
        logs=validates or is_last or is_first or step % config.metrics.log_freq == 0,
    )
