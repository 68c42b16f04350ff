"""Optimizers in whole runs: each resumes to the last bit, and updating in backward is updating after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flame.train.__main__ import main
from tests.faults import signal_before_step
from tests.runs import arguments, losses_and_norms, tensors_of
from tests.tiny_states import differences

SHORT: dict[str, Any] = {"training__steps": 6, "training__batch_size": 1, "lr_scheduler__warmup_steps": 2}
IN_BACKWARD = {"optimizer__early_step_in_backward": "true", "training__max_norm": "inf"}
WAYS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer__name": "SGD", "optimizer__implementation": "for-loop"},
    "fused SGD": {"optimizer__name": "SGD", "optimizer__implementation": "fused"},
    "Muon": {"optimizer__name": "Muon", "optimizer__lr_factors": "embed*=0.5,layers.1=2"},
    "in backward": IN_BACKWARD,
}


def result(run: Path) -> dict[str, Any]:
    return tensors_of(run / "checkpoint" / "step-6")


@pytest.mark.usefixtures("handlers_kept")
@pytest.mark.parametrize("way", WAYS)
def test_every_optimizer_resumes_to_the_last_bit(folder: Path, tmp_path: Path, way: str) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert main(arguments(folder, straight, **SHORT, **WAYS[way])) == 0
    with pytest.MonkeyPatch.context() as patch:
        signal_before_step(patch, 4)
        assert main(arguments(folder, run, **SHORT, **WAYS[way])) == 75
    assert main(arguments(folder, run, **SHORT, **WAYS[way])) == 0
    losses = losses_and_norms(run)
    assert losses == losses_and_norms(straight) and losses[-1][1] < losses[0][1]
    assert not differences(result(run), result(straight))


@pytest.mark.parametrize(
    "others", [{}, {"training__enable_cpu_offload": "true"}], ids=["on the device", "in host memory"]
)
def test_updates_in_backward_are_those_after_it(folder: Path, tmp_path: Path, others: dict[str, Any]) -> None:
    within, after = tmp_path / "within", tmp_path / "after"
    assert main(arguments(folder, within, **SHORT, **IN_BACKWARD, **others)) == 0
    assert main(arguments(folder, after, **SHORT, training__max_norm="inf")) == 0
    for one, other in zip(losses_and_norms(within), losses_and_norms(after), strict=True):
        assert one[:2] == other[:2] and one[2] == pytest.approx(other[2], rel=1e-6)
    assert not differences(result(within), result(after))
