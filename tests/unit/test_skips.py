"""Updates that are skipped: what they leave alone, and when they are counted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from flame.errors import TrainingError
from flame.train import skips
from flame.train.optimizer import build_optimizer
from flame.train.options import OptimizerOptions
from flame.train.skips import Skip, SkippedSteps
from flame.train.update import UpdateAfterBackward


class Watched(Skip):
    """A skip that notes whether it was read."""

    was_read = False

    def read(self) -> bool:
        self.was_read = True
        return super().read()


def test_a_skip_is_counted_once_the_next_step_is_queued() -> None:
    counted = SkippedSteps(5)
    first, second, third = Watched(torch.ones(())), Watched(False), Watched(True)
    counted.add(1, first)
    assert not first.was_read
    counted.add(2, second)
    assert first.was_read and not second.was_read
    counted.add(3, third)
    assert counted.total() == 7 and third.was_read
    assert counted.total() == 7, "each is counted once"


def test_a_run_that_only_skips_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skips, "MAX_SKIPPED_IN_A_ROW", 2)
    counted = SkippedSteps(0)
    for step, skipped in enumerate([True, False, True, True], 1):
        counted.add(step, Skip(skipped))
    with pytest.raises(TrainingError, match=r"2 updates in a row were skipped \(in step 4\)"):
        counted.total()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))


class Trained:
    """A model that steps are taken of, with gradients of all `value`s."""

    def __init__(self, options: OptimizerOptions, *, skip_not_finite: bool) -> None:
        self.model = model()
        self.optimizer = build_optimizer(self.model, options, torch.device("cpu"))
        self.parameters = list(self.model.parameters())
        self.update = UpdateAfterBackward(
            self.optimizer, self.parameters, max_norm=1.0, skip_not_finite=skip_not_finite, before_update=lambda: None
        )

    def step(self, value: float, num_labels: int = 1) -> Skip:
        self.update.begin(num_labels)
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, value)
        _, skip = self.update.finish()
        assert all(parameter.grad is None for parameter in self.parameters)
        return skip

    def tensors(self) -> dict[str, Any]:
        return copy.deepcopy({"model": self.model.state_dict(), "moments": self.optimizer.state_dict()["state"]})


OPTIMIZERS = [
    *(("AdamW", implementation) for implementation in ("fused", "foreach", "for-loop")),
    *(("Adam", "fused"), ("SGD", "fused"), ("SGD", "foreach"), ("Muon", "fused")),
]


@pytest.mark.parametrize(("name", "implementation"), OPTIMIZERS)
def test_what_is_skipped_leaves_no_trace(name: str, implementation: str) -> None:
    """The first update too, before which there are no moments."""
    options = OptimizerOptions(name=name, implementation=implementation)
    skipping, straight = Trained(options, skip_not_finite=True), Trained(options, skip_not_finite=False)
    values = [(float("nan"), 1), (2.0, 1), (float("inf"), 1), (3.0, 0), (-1.0, 1)]
    assert [skipping.step(*value).read() for value in values] == [True, False, True, True, False]
    assert [straight.step(value).read() for value in (2.0, -1.0)] == [False, False]
    torch.testing.assert_close(skipping.tensors(), straight.tensors(), rtol=0, atol=0)


@pytest.mark.parametrize(("name", "implementation"), OPTIMIZERS)
def test_only_a_fused_adam_leaves_the_looking_to_the_device(
    name: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(OptimizerOptions(name=name, implementation=implementation), skip_not_finite=True)
    reads: list[Skip] = []
    monkeypatch.setattr(Skip, "read", lambda skip: bool(reads.append(skip)))
    trained.step(1.0)
    assert len(reads) == (0 if name.startswith("Adam") and implementation == "fused" else 1)
