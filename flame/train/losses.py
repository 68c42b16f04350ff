"""The loss of each sample: from it that of every source, the rows that a step lost most on, and whether it is a spike.

A step keeps its losses on the device, a number a sample. They are looked at when a step is logged, with those of the
steps since the last logged one: so a spike between two logged steps is found, and no other step waits for the device.
"""

from __future__ import annotations

import math
import shlex
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from flame.sampling.geometry import BatchGeometry
from flame.sampling.history import METRICS, read_logged
from flame.train.distributed import World, broadcast_from_main
from flame.train.loader import StepBatch

MAX_ROWS, MAX_SPIKES = 3, 3
"""How many rows are told of a step, and how many spikes of the steps since the last logged one: the highest."""
MAX_STEPS_KEPT = 1000

_WINDOW_STEPS, _LEAST_STEPS = 64, 16
_DEVIATIONS = 6.0
_TAIL_BYTES = 2**20  # of metrics.jsonl: more than 64 lines
_NORMAL = 1.4826  # times the median deviation: the standard deviation, were losses normally distributed
_LEAST_DEVIATION = 0.01  # of the median: a loss that hardly moves has no spikes of a hundredth


@dataclass(frozen=True, kw_only=True)
class LossSums:
    """A rank's losses in a step, summed over labels, on the device: all, and of each sample.

    `balance` is the load balancing loss of a mixture of experts (`experts.py`), None of other models.
    """

    loss: Tensor
    balance: Tensor | None
    samples: Tensor


@dataclass(frozen=True, kw_only=True)
class StepLosses:
    """What one rank keeps of a step: its losses, and which samples they belong to.

    `sums.samples` is `[accumulation · micro_batch · windows_per_row]`, as are `samples`, `labels` (how many each has)
    and `sources`. `num_labels` is of all ranks.
    """

    step: int
    num_labels: int
    sums: LossSums
    samples: NDArray[np.int64]
    labels: NDArray[np.int64]
    sources: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a step, its samples from `first_sample` up to `stop_sample`, and its loss a label."""

    rank: int
    micro_step: int
    batch_row: int
    first_sample: int
    stop_sample: int
    loss: float

    def to_json(self) -> dict[str, Any]:
        """Return the object of metrics.jsonl; the end of `samples` is not in them, as in `flame-mix trace`."""
        return {
            "rank": self.rank,
            "micro_step": self.micro_step,
            "batch_row": self.batch_row,
            "samples": [self.first_sample, self.stop_sample],
            "loss": self.loss if math.isfinite(self.loss) else None,
        }


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A step whose loss was above `limit`, and its rows."""

    step: int
    loss: float
    limit: float
    rows: tuple[Row, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the object of metrics.jsonl."""
        loss = self.loss if math.isfinite(self.loss) else None
        return {"step": self.step, "loss": loss, "limit": self.limit, "rows": [row.to_json() for row in self.rows]}


@dataclass(frozen=True, kw_only=True)
class LossReport:
    """The losses of a logged step over all ranks, in nats a label, and the spikes since the one before.

    `max_loss` is the largest of the ranks' own. None where there are no labels. `balance_loss` is the load balancing
    loss of a mixture of experts, of which it is NaN without labels; None of other models.
    """

    avg_loss: float | None
    max_loss: float | None
    balance_loss: float | None
    by_source: tuple[float | None, ...]
    tokens_by_source: tuple[int, ...]
    rows: tuple[Row, ...]
    spikes: tuple[Spike, ...]


class SpikeRule:
    """Tells whether a step's loss is a spike against the 64 steps before it.

    It is where it is no number, or above the median of their losses by more than 6 standard deviations. Those are
    taken as 1.4826 times the median distance from the median, which no spike moves, and at least as 1% of the median.
    Nothing is a spike before 16 steps are known. A loss that stays high is none any more after 32 steps.
    """

    def __init__(self, losses: Sequence[float] = ()) -> None:
        self._losses: deque[float] = deque(losses, maxlen=_WINDOW_STEPS)

    def limit(self) -> float:
        """Return what the next loss must not be above."""
        if len(self._losses) < _LEAST_STEPS:
            return math.inf
        middle = median(self._losses)
        distance = median(abs(loss - middle) for loss in self._losses)
        return middle + _DEVIATIONS * max(_NORMAL * distance, _LEAST_DEVIATION * abs(middle))

    def see(self, step: int, loss: float) -> Spike | None:
        """Take in the next step's loss; returns the spike that it is, or None."""
        limit = self.limit()
        if math.isfinite(loss):
            self._losses.append(loss)
            return Spike(step=step, loss=loss, limit=limit) if loss > limit else None
        return Spike(step=step, loss=loss, limit=limit) if math.isfinite(limit) else None


def spike_rule_of(run: Path, world: World) -> SpikeRule:
    """Return the rule as the run's logged steps have left it (rank 0 reads them; every rank must call it).

    With metrics.log_freq 1 a resumed run goes on as if it had never stopped; else it has seen the logged steps only.
    """
    losses: list[float] = []
    if world.is_main:
        logged = (
            line.get("loss_metrics/global_avg_loss") for line in read_logged(run / METRICS, last_bytes=_TAIL_BYTES)
        )
        losses = [loss for loss in logged if isinstance(loss, float)][-_WINDOW_STEPS:]
    return SpikeRule(broadcast_from_main(losses, world))


def sum_by_sample(token_losses_T: Tensor, window_len: int) -> Tensor:
    """Return the sums of a micro-batch's token losses over its samples, `[num_samples]`; stays on the device."""
    return token_losses_T.detach().view(-1, window_len).sum(1)


def keep_losses(step: int, batch: StepBatch, num_labels: int, sums: LossSums) -> StepLosses:
    """Return what is kept of a step."""
    return StepLosses(
        step=step,
        num_labels=num_labels,
        sums=sums,
        samples=batch.samples,
        labels=batch.labels_by_sample,
        sources=batch.sources,
    )


def gather_losses(
    kept: Sequence[StepLosses], rule: SpikeRule, geometry: BatchGeometry, num_sources: int, world: World
) -> LossReport:
    """Report the last of these steps, and the spikes among all of them; every rank calls it with the same steps.

    Waits for the device once. Ranks' sums are added in order of rank, in fp64.
    """
    last = kept[-1]
    balance = torch.zeros_like(last.sums.loss) if last.sums.balance is None else last.sums.balance
    *sums, own_balance = torch.stack([*(step.sums.loss for step in kept), balance]).double().cpu().tolist()
    sample_losses = np.split(
        torch.cat([step.sums.samples for step in kept]).double().cpu().numpy(),
        np.cumsum([len(step.samples) for step in kept])[:-1],
    )
    own_labels = int(last.labels.sum())
    by_source = [
        np.bincount(last.sources, weights=weights, minlength=num_sources).tolist()
        for weights in (sample_losses[-1], last.labels, np.full(len(last.samples), geometry.window_len))
    ]
    highest = _own_highest_rows(last, sample_losses[-1], geometry)
    own = [own_labels, own_balance, *by_source[0], *by_source[1], *by_source[2], *highest, *sums]
    ranks = _from_all_ranks(own, world)
    first_row = 2 + 3 * num_sources
    first_sum = first_row + len(highest)
    step_sums = [math.fsum(values) for values in zip(*(rank[first_sum:] for rank in ranks), strict=True)]
    means = [total / step.num_labels if step.num_labels else None for total, step in zip(step_sums, kept, strict=True)]
    found = [rule.see(step.step, loss) for step, loss in zip(kept, means, strict=True) if loss is not None]
    spikes = sorted((spike for spike in found if spike is not None), key=_height)[-MAX_SPIKES:]
    spikes.sort(key=lambda spike: spike.step)
    rows = _highest_of_ranks([rank[first_row:first_sum] for rank in ranks], last, geometry, world)
    totals = [math.fsum(column) for column in zip(*(rank[2:first_row] for rank in ranks), strict=True)]
    losses, labels, tokens = (totals[i * num_sources : (i + 1) * num_sources] for i in range(3))
    return LossReport(
        avg_loss=means[-1],
        max_loss=max((rank[-1] / rank[0] for rank in ranks if rank[0]), default=None),
        balance_loss=_mean_balance([rank[1] for rank in ranks], last),
        by_source=tuple(loss / count if count else None for loss, count in zip(losses, labels, strict=True)),
        tokens_by_source=tuple(int(count) for count in tokens),
        rows=rows,
        spikes=_with_rows(spikes, kept, sample_losses, geometry, world) if spikes else (),
    )


def _mean_balance(sums: Sequence[float], step: StepLosses) -> float | None:
    if step.sums.balance is None:
        return None
    return math.fsum(sums) / step.num_labels if step.num_labels else math.nan


def _with_rows(
    spikes: Sequence[Spike],
    kept: Sequence[StepLosses],
    sample_losses: Sequence[NDArray[np.float64]],
    geometry: BatchGeometry,
    world: World,
) -> tuple[Spike, ...]:
    """Return the spikes with their rows: one more all-gather, in the few steps that have a spike."""
    place_of = {step.step: place for place, step in enumerate(kept)}
    places = [place_of[spike.step] for spike in spikes]
    own = [_own_highest_rows(kept[place], sample_losses[place], geometry) for place in places]
    flat = [value for rows in own for value in rows]
    ranks = [np.array(rank).reshape(len(spikes), -1).tolist() for rank in _from_all_ranks(flat, world)]
    return tuple(
        replace(spike, rows=_highest_of_ranks([rank[i] for rank in ranks], kept[place], geometry, world))
        for i, (spike, place) in enumerate(zip(spikes, places, strict=True))
    )


def _height(spike: Spike) -> float:
    return spike.loss - spike.limit if math.isfinite(spike.loss) else math.inf


def _own_highest_rows(step: StepLosses, sample_losses: NDArray[np.float64], geometry: BatchGeometry) -> list[float]:
    """Return this rank's rows with the highest loss a label: MAX_ROWS times a loss and its place among the rows.

    A loss that is no number is highest. −∞ stands for a row without labels, and where there are not so many rows.
    """
    shape = (geometry.accumulation, geometry.micro_batch, geometry.windows_per_row)
    labels = step.labels.reshape(shape).sum(2).reshape(-1)
    sums = sample_losses.reshape(shape).sum(2).reshape(-1)
    means = np.where(np.isfinite(sums), sums / np.maximum(labels, 1), np.inf)
    means[labels == 0] = -np.inf
    own: list[float] = []
    for place in np.argsort(-means, kind="stable")[:MAX_ROWS].tolist():
        own += [float(means[place]), place]
    return own + [-math.inf, 0] * (MAX_ROWS - len(own) // 2)


def _highest_of_ranks(
    ranks: Sequence[Sequence[float]], step: StepLosses, geometry: BatchGeometry, world: World
) -> tuple[Row, ...]:
    """Return the highest rows of a step, from what each rank's `_own_highest_rows` told."""
    pairs = [list(zip(own[::2], own[1::2], strict=True)) for own in ranks]
    per_rank = geometry.micro_batch * geometry.windows_per_row
    return _highest(pairs, int(step.samples[0]) - world.dp_rank * per_rank, geometry)


def _highest(candidates: Sequence[Any], first_of_step: int, geometry: BatchGeometry) -> tuple[Row, ...]:
    """Return the highest of the ranks' rows, each given as its loss and its place among the rows of its rank."""
    rows = []
    for rank, of_rank in enumerate(candidates):
        for loss, place in of_rank:
            micro_step, row = divmod(int(place), geometry.micro_batch)
            before = (micro_step * geometry.dp_size + rank) * geometry.micro_batch + row
            first = first_of_step + before * geometry.windows_per_row
            rows.append(
                Row(
                    rank=rank,
                    micro_step=micro_step,
                    batch_row=row,
                    first_sample=first,
                    stop_sample=first + geometry.windows_per_row,
                    loss=loss,
                )
            )
    counted = [row for row in rows if row.loss > -math.inf]  # the others have no labels
    return tuple(sorted(counted, key=lambda row: -row.loss)[:MAX_ROWS])


def _from_all_ranks(values: Sequence[float], world: World) -> list[list[float]]:
    """Return every rank's list of numbers, all as long, in order of rank: one gloo all-gather."""
    own = torch.tensor(values, dtype=torch.float64)
    gathered = [torch.empty_like(own) for _ in range(world.size)]
    dist.all_gather(gathered, own)
    return [rank.tolist() for rank in gathered]


def spike_told(spike: Spike, run: Path) -> str:
    """Return the lines that tell people of a spike, with the commands that show the texts of its rows."""
    lines = [f"the loss of step {spike.step} is a spike: {spike.loss:.4f}, the limit was {spike.limit:.4f}"]
    for row in spike.rows:
        place = f"rank {row.rank}, micro-step {row.micro_step}, row {row.batch_row}"
        samples = f"samples {row.first_sample}:{row.stop_sample}"
        command = f"flame-mix trace --run {shlex.quote(str(run))} --step {spike.step} --rank {row.rank}"
        lines.append(f"  {row.loss:.4f} in {place} ({samples}): {command}")
    return "\n".join(lines)
