"""Losses by source and by row: exact sums of the samples', over ranks; and which steps are spikes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.sampling.geometry import BatchGeometry, sample_indices
from flame.train.losses import (
    LossSums,
    Row,
    Spike,
    SpikeRule,
    StepLosses,
    _highest,
    gather_losses,
    spike_rule_of,
    spike_told,
    sum_by_sample,
)
from tests.tiny_states import one_rank

GEOMETRY = BatchGeometry(seq_len=8, window_len=4, context_len=8, micro_batch=2, accumulation=2, dp_size=1, varlen=True)
NUM_SAMPLES = 8


def step_losses(
    step: int, values: list[float], labels: list[int], *, first: int = 0, balance: float | None = None
) -> StepLosses:
    sums = torch.tensor(values)
    return StepLosses(
        step=step,
        num_labels=sum(labels),
        sums=LossSums(loss=sums.sum(), balance=None if balance is None else torch.tensor(balance), samples=sums),
        samples=np.arange(first, first + len(values)),
        labels=np.array(labels),
        sources=np.array([0, 1] * (len(values) // 2), dtype=np.int32),
    )


def test_losses_of_sources_and_rows_by_hand() -> None:
    values, labels = [4.0, 8.0, 1.0, 0.0, 2.0, 6.0, 0.0, 0.0], [4, 2, 1, 0, 4, 2, 0, 0]
    with one_rank() as world:
        kept = [step_losses(9, values, labels, first=2**60)]
        report = gather_losses(kept, SpikeRule(), GEOMETRY, 3, world)
    assert report.avg_loss == report.max_loss == 21 / 13 and report.balance_loss is None
    assert report.by_source == (7 / 9, 14 / 4, None) and report.tokens_by_source == (16, 16, 0)
    # rows: (4 + 8) / 6, (1 + 0) / 1, (2 + 6) / 6, and one without labels
    assert [(row.micro_step, row.batch_row, row.loss) for row in report.rows] == [
        (0, 0, 2.0),
        (1, 0, 8 / 6),
        (0, 1, 1.0),
    ]
    assert [(row.first_sample, row.stop_sample) for row in report.rows] == [
        (2**60 + first, 2**60 + first + 2) for first in (0, 4, 2)
    ]
    assert report.spikes == ()


def test_the_load_balancing_loss_is_the_last_steps_by_label() -> None:
    with one_rank() as world:
        for labels, expected in (([2] * 8, 24 / 16), ([0] * 8, math.nan)):
            kept = [step_losses(step, [1.0] * 8, labels, balance=8.0 * step) for step in (2, 3)]
            report = gather_losses(kept, SpikeRule(), GEOMETRY, 2, world)
            assert report.balance_loss == pytest.approx(expected, nan_ok=True)
            assert report.avg_loss == (8 / 16 if expected == 1.5 else None), "the loss is the cross entropy's"


def test_rows_of_all_ranks_have_the_samples_that_they_are_made_of() -> None:
    geometry = BatchGeometry(**{**vars(GEOMETRY), "dp_size": 2})
    candidates = [[[9.0, 3], [1.0, 0], [-math.inf, 0]], [[8.0, 1], [7.0, 2], [6.0, 0]]]
    rows = _highest(candidates, 100, geometry)
    assert [(row.rank, row.micro_step, row.batch_row, row.loss) for row in rows] == [
        (0, 1, 1, 9.0),
        (1, 0, 1, 8.0),
        (1, 1, 0, 7.0),
    ]
    for row in rows:
        samples = sample_indices(geometry, 100, row.rank)[row.micro_step, row.batch_row]
        assert [row.first_sample, row.stop_sample] == [samples[0], samples[-1] + 1]


def test_a_sample_s_loss_is_the_sum_of_its_tokens() -> None:
    sums = sum_by_sample(torch.arange(12.0, requires_grad=True) * 1.0, 4)
    assert sums.tolist() == [6.0, 22.0, 38.0] and not sums.requires_grad


def test_a_spike_between_logged_steps_is_told_with_its_rows() -> None:
    rule = SpikeRule([3.0] * 16)
    with one_rank() as world:
        kept = [
            step_losses(step, [3.0 + 9 * (step == 18) * (i == 2) for i in range(8)], [1] * 8) for step in (17, 18, 19)
        ]
        report = gather_losses(kept, rule, GEOMETRY, 2, world)
    (spike,) = report.spikes
    assert (spike.step, spike.loss) == (18, 3.0 + 9 / 8) and spike.limit == pytest.approx(3.18)
    assert (spike.rows[0].batch_row, spike.rows[0].loss) == (1, 7.5) and len(spike.rows) == 3
    assert report.avg_loss == 3.0 and {row.loss for row in report.rows} == {3.0}


def test_losses_that_are_no_numbers_are_spikes_with_their_rows_first() -> None:
    with one_rank() as world:
        kept = [step_losses(17, [3.0, 3.0, math.nan, 3.0, 3.0, 3.0, 3.0, 3.0], [1] * 8)]
        report = gather_losses(kept, SpikeRule([3.0] * 16), GEOMETRY, 2, world)
    (spike,) = report.spikes
    assert (spike.rows[0].batch_row, spike.rows[0].to_json()["loss"]) == (1, None)
    assert spike.to_json()["loss"] is None
    json.dumps(spike.to_json(), allow_nan=False)


def test_no_more_than_the_highest_spikes_are_told() -> None:
    with one_rank() as world:
        kept = [step_losses(20 + i, [9.0 + i % 4] * 8, [1] * 8) for i in range(8)]
        report = gather_losses(kept, SpikeRule([3.0] * 60), GEOMETRY, 2, world)
    assert [spike.step for spike in report.spikes] == [23, 26, 27]


def test_a_step_without_labels_has_no_loss() -> None:
    with one_rank() as world:
        report = gather_losses([step_losses(1, [0.0] * 8, [0] * 8)], SpikeRule(), GEOMETRY, 2, world)
    assert report.avg_loss is report.max_loss is None and report.by_source == (None, None)
    assert report.rows == report.spikes == ()


def test_start_up_and_a_falling_loss_have_no_spikes() -> None:
    rule = SpikeRule()
    assert [rule.see(step, 11.0 - 0.1 * step) for step in range(1, 80)] == [None] * 79
    assert SpikeRule([3.0] * 15).see(16, 100.0) is None and SpikeRule([3.0] * 16).see(17, 100.0) is not None


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), deviation=st.floats(0.01, 0.5))
def test_noise_has_no_spikes_and_ten_deviations_are_one(seed: int, deviation: float) -> None:
    noise = np.random.default_rng(seed).uniform(-1, 1, 64) * deviation * math.sqrt(3)
    rule = SpikeRule((4.0 + noise).tolist())
    assert rule.see(65, 4.0 + deviation * math.sqrt(3)) is None
    assert rule.see(66, 4.0 + 12 * max(deviation, 0.04)) is not None


def test_a_loss_that_stays_high_is_a_spike_no_more() -> None:
    rule = SpikeRule([3.0, 3.1] * 32)
    found = [rule.see(step, 5.0 + 0.1 * (step % 2)) is not None for step in range(64)]
    assert found[0] and found[20] and not any(found[40:])


def test_a_resume_goes_on_from_the_logged_steps(tmp_path: Path) -> None:
    lines = [{"step": i, "loss_metrics/global_avg_loss": 3.0 + i / 100 if i % 9 else None} for i in range(1, 101)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 101, "lo')
    straight = SpikeRule()
    for step, line in enumerate(lines, start=1):
        loss = line["loss_metrics/global_avg_loss"]
        if loss is not None:
            straight.see(step, loss)
    with one_rank() as world:
        assert spike_rule_of(tmp_path, world).limit() == straight.limit() < math.inf
        assert spike_rule_of(tmp_path / "new", world).limit() == math.inf


def test_what_is_told_of_a_spike_can_be_typed() -> None:
    row = Row(rank=3, micro_step=1, batch_row=2, first_sample=40, stop_sample=42, loss=7.25)
    told = spike_told(Spike(step=12, loss=5.0, limit=4.0, rows=(row,)), Path("exp/my run"))
    assert told.splitlines() == [
        "the loss of step 12 is a spike: 5.0000, the limit was 4.0000",
        "  7.2500 in rank 3, micro-step 1, row 2 (samples 40:42): "
        "flame-mix trace --run 'exp/my run' --step 12 --rank 3",
    ]
