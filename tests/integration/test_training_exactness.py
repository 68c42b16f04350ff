"""The same global batch gives the same loss and gradient, however it is dealt to ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flame.errors import TrainingError
from flame.train import loop, skips
from flame.train import step as training_step
from flame.train.__main__ import main
from flame.train.config import parse_train_config
from tests.faults import in_ranks, note_samples, samples_trained, signal_before_step
from tests.promises import (
    CPUS,
    an_export_is_its_checkpoint,
    train,
    two_ranks_then_one_then_more_train_the_same_samples,
)
from tests.ranks import train_in_ranks
from tests.runs import arguments, losses_and_norms, read_metrics, tensors_of
from tests.tiny_states import differences

STEPS = 6


@pytest.fixture(scope="module")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, four rows at once."""
    run = tmp_path_factory.mktemp("runs") / "straight"
    assert main(options(folder, run, training__batch_size=4)) == 0
    return run


def options(folder: Path, run: Path, **others: Any) -> list[str]:
    chosen: dict[str, Any] = {
        "training__steps": STEPS,
        "validation__dataset": f"{folder / 'web'}@val",
        "validation__freq": 3,
        "training__batch_size": 4,
    }
    return arguments(folder, run, **(chosen | others))


@pytest.mark.parametrize(
    ("ranks", "others"),
    [
        (1, {"training__batch_size": 1, "training__gradient_accumulation_steps": 4}),
        (2, {"training__batch_size": 2}),
        (2, {"training__batch_size": 2, "training__data_parallel_replicate_degree": 2}),
    ],
    ids=["accumulation", "ranks", "replicas"],
)
def test_ranks_and_accumulation_change_nothing(
    folder: Path, straight: Path, tmp_path: Path, ranks: int, others: dict[str, Any]
) -> None:
    argv = options(folder, tmp_path / "run", **others)
    train(argv, CPUS, ranks=ranks)
    expected, found = losses_and_norms(straight), losses_and_norms(tmp_path / "run")
    assert len(expected) == len(found) == STEPS
    for (step, loss, norm), (_, other_loss, other_norm) in zip(expected, found, strict=True):
        assert other_loss == pytest.approx(loss, rel=1e-6), f"step {step}"
        assert other_norm == pytest.approx(norm, rel=1e-5 if step > 1 else 1e-6), f"step {step}"
    lines = zip(read_metrics(straight), read_metrics(tmp_path / "run"), strict=True)
    scores = [
        (one["validation/web/loss"], other["validation/web/loss"])
        for one, other in lines
        if "validation/web/loss" in one
    ]
    assert len(scores) == 2
    for one, other in scores:
        assert other == pytest.approx(one, rel=1e-6)


def test_rows_without_document_masks(folder: Path, tmp_path: Path) -> None:
    plain = {"training__varlen": "false", "training__context_len": 128}
    assert main(options(folder, tmp_path / "run", **plain)) == 0
    losses = [loss for _, loss, _ in losses_and_norms(tmp_path / "run")]
    assert losses[-1] < losses[0]


def test_two_ranks_then_one_then_four_train_the_same_samples_in_the_same_order(
    folder: Path, tmp_path: Path, handlers_kept: None
) -> None:
    run = two_ranks_then_one_then_more_train_the_same_samples(folder, tmp_path, CPUS)
    an_export_is_its_checkpoint(run, tmp_path / "exported")


def test_another_global_batch_draws_on_from_the_same_sample(folder: Path, tmp_path: Path, handlers_kept: None) -> None:
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        note_samples(patch, tmp_path / "samples")
        for first, rows, stop in ((1, 4, 2), (3, 1, 5), (6, 8, None)):
            with pytest.MonkeyPatch.context() as signals:
                if stop is not None:
                    signal_before_step(signals, stop + 1, first_step=first)
                code = main(options(folder, run, training__batch_size=rows, training__steps=7))
            assert code == (0 if stop is None else 75)
    per_step = samples_trained(tmp_path / "samples")
    assert [len(samples) for samples in per_step] == [4, 4, 1, 1, 1, 8, 8]
    assert [sample for samples in per_step for sample in samples] == list(range(27))
    assert [line["consumed_samples"] for line in read_metrics(run)] == [4, 8, 9, 10, 11, 19, 27]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Steps, counted from 1 in this process, whose gradients are made not finite."""
    steps: set[int] = set()
    original = training_step.backward
    calls = 0

    def backward(module: Any, batch: Any, *others: Any) -> Any:
        nonlocal calls
        calls += 1
        sums = original(module, batch, *others)
        if calls in steps:
            parameter = next(p for p in module.parameters() if p.grad is not None)
            parameter.grad.to_local().view(-1)[0] = float("nan") if calls % 2 else float("inf")
        return sums

    monkeypatch.setattr(training_step, "backward", backward)
    yield steps


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_an_update_that_is_not_finite_is_skipped_and_counted(
    folder: Path, tmp_path: Path, poisoned: set[int], implementation: str
) -> None:
    poisoned |= {3, 4}
    run = tmp_path / "run"
    chosen = {"training__skip_nan_inf": "true", "optimizer__implementation": implementation}
    assert main(options(folder, run, **chosen, checkpoint__interval=1)) == 0
    lines = read_metrics(run)
    assert [line["optimizer/skipped_step"] for line in lines] == [0, 0, 1, 2, 2, 2]
    assert [line["optimizer/grad_norm"] is None for line in lines] == [False, False, True, True, False, False]
    before, after = (tensors_of(run / "checkpoint" / f"step-{step}") for step in (2, 4))
    assert differences(before, after) == []
    assert differences(before, tensors_of(run / "checkpoint" / "step-5")) != []


def test_a_skip_that_no_line_tells_of_is_counted_where_a_run_stops(
    folder: Path, tmp_path: Path, poisoned: set[int], handlers_kept: None
) -> None:
    poisoned |= {3}
    often = {"metrics__log_freq": 100, "validation__freq": 100}
    argv = options(folder, tmp_path / "run", training__skip_nan_inf="true", **often)
    with pytest.MonkeyPatch.context() as signals:
        signal_before_step(signals, 4)
        assert main(argv) == 75
    poisoned.clear()
    assert main(argv) == 0
    lines = read_metrics(tmp_path / "run")
    assert [(line["step"], line["optimizer/skipped_step"]) for line in lines] == [(1, 0), (4, 1), (STEPS, 1)]


def test_one_rank_that_is_not_finite_makes_all_ranks_skip(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = arguments(folder, run, training__batch_size=1, training__steps=6, checkpoint__interval=1)
    not_finite = in_ranks(tmp_path / "notes", not_finite=(3, 4))
    train_in_ranks([*argv, "--training.skip_nan_inf"], ranks=2, variables=not_finite)
    lines = read_metrics(run)
    assert [line["optimizer/skipped_step"] for line in lines] == [0, 0, 1, 2, 2, 2]
    assert [line["loss_metrics/global_avg_loss"] is None for line in lines] == [step in (3, 4) for step in range(1, 7)]
    before, after, later = (tensors_of(run / "checkpoint" / f"step-{step}") for step in (2, 4, 5))
    assert differences(before, after) == [], "weights and moments of both ranks"
    assert differences(before, later) != []


def test_too_many_skips_in_a_row_stop_the_run(
    folder: Path, tmp_path: Path, poisoned: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skips, "MAX_SKIPPED_IN_A_ROW", 3)
    poisoned |= {2, 3, 4, 5, 6}
    often = {"metrics__log_freq": 100, "validation__freq": 100}
    config = parse_train_config(options(folder, tmp_path / "run", training__skip_nan_inf="true", **often))
    with pytest.raises(TrainingError, match=r"3 updates in a row were skipped \(in step 4\)"):
        loop.train(config)


def test_without_leave_to_skip_a_nan_stops_the_run_and_saves_nothing(
    folder: Path, tmp_path: Path, poisoned: set[int]
) -> None:
    poisoned |= {2}
    config = parse_train_config(options(folder, tmp_path / "run"))
    with pytest.raises(TrainingError, match="gradient of step 2 is not finite"):
        loop.train(config)
    assert not list((tmp_path / "run" / "checkpoint").glob("step-*"))
