"""One step: forward and backward over the micro-batches, and the update."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flame.errors import TrainingError
from flame.train.checkpoint_saver import CheckpointSaver
from flame.train.flops import ModelFlops
from flame.train.loader import StepBatch
from flame.train.losses import LossSums, StepLosses, keep_losses, sum_by_sample
from flame.train.model import CausalLMLoss
from flame.train.optimizer import JoinedOptimizer, apply_hyperparameters
from flame.train.parallelize import reduce_gradients
from flame.train.schedule import lr_factor
from flame.train.setup import Run
from flame.train.skips import Skip
from flame.train.update import Update, UpdateAfterBackward, UpdateInBackward


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """What a step leaves behind besides the weights. Its tensors stay on the device: reading one waits for it."""

    lr: float
    losses: StepLosses
    grad_norm: Tensor
    skip: Skip


def make_update(run: Run, saver: CheckpointSaver) -> Update:
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


def train_step(
    run: Run,
    step: int,
    batch: StepBatch,
    num_labels: int,
    update: Update,
    offload: Callable[[], contextlib.AbstractContextManager[Any]],
) -> StepDone:
    """Train this rank's part of a global batch of `num_labels` labels; every rank calls it."""
    lr = learning_rate(run, step)
    apply_hyperparameters(run.optimizer, run.config.optimizer, lr)
    seed_random(step_seed(run.config.training.seed, step, run.world.dp_rank), run.world.device)
    update.begin(num_labels)
    sums = backward(run.module, batch, offload, run.geometry.window_len)
    losses = keep_losses(step, batch, num_labels, sums)
    grad_norm, skip = update.finish()
    return StepDone(lr=lr, losses=losses, grad_norm=grad_norm, skip=skip)


def learning_rate(run: Run, step: int) -> float:
    """Return the learning rate of a step, counted from 1."""
    schedule = run.config.lr_scheduler
    return run.config.optimizer.lr * lr_factor(
        step - 1,
        warmup_steps=run.warmup_steps,
        total_steps=run.total_steps,
        decay_ratio=schedule.decay_ratio,
        decay_type=schedule.decay_type,
        lr_min=schedule.lr_min,
    )


def step_seed(seed: int, step: int, dp_rank: int) -> int:
    """Return the seed of all random numbers that one rank draws in one step: no RNG state is ever saved."""
    digest = hashlib.blake2b(f"{seed}|{step}|{dp_rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_random(seed: int, device: torch.device) -> None:
    """Seed all that this rank draws from.

    `torch.manual_seed` seeds every kind of device; for each that is not in use it formats the Python stack, 0.4 ms
    in all.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def backward(
    module: CausalLMLoss,
    batch: StepBatch,
    offload: Callable[[], contextlib.AbstractContextManager[Any]],
    window_len: int,
) -> LossSums:
    """Add the gradients of a rank's micro-batches, as sums over labels; returns their losses.

    Forward runs in `offload()`.
    """
    loss_sums: list[Tensor] = []
    balance_sums: list[Tensor] = []
    sample_losses: list[Tensor] = []
    for index, micro in enumerate(batch.micro_batches):
        reduce_gradients(module, index == len(batch.micro_batches) - 1)
        with offload():
            losses = module(
                micro.input_ids, micro.labels, micro.positions, micro.cu_seqlens, micro.max_seqlen, window_len
            )
        losses.loss_sum.backward()
        sample_losses.append(sum_by_sample(losses.token_losses, window_len))
        loss_sums.append(losses.loss_sum.detach())
        if losses.balance_sum is not None:
            balance_sums.append(losses.balance_sum)
    return LossSums(
        loss=sum(loss_sums[1:], start=loss_sums[0]),
        balance=sum(balance_sums[1:], start=balance_sums[0]) if balance_sums else None,
        samples=torch.cat(sample_losses),
    )


def count_flops(flops: ModelFlops | None, batch: StepBatch) -> int:
    """Return the operations that a rank's part of a step takes; 0 where no formula tells them."""
    if flops is None:
        return 0
    return sum(flops.count(micro.input_ids.numel(), micro.lengths) for micro in batch.micro_batches)


def refuse_nan(grad_norm: Tensor, step: int) -> None:
    """Stop before weights that are no numbers are logged or saved as if they were."""
    if not bool(torch.isfinite(grad_norm)):
        raise TrainingError(
            f"the gradient of step {step} is not finite",
            got=f"a norm of {float(grad_norm)}",
            fix="Resume from the last checkpoint with a lower optimizer.lr, or with --training.skip_nan_inf, "
            "which skips such updates",
        )
