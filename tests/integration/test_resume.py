"""Stopped and resumed, a run is the run that was never stopped: losses and gradient norms to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flame.train.__main__ import main
from flame.train.run import read_status
from tests.faults import note_samples, samples_trained, signal_before_step
from tests.promises import CPUS, a_killed_run_goes_on_to_the_last_bit
from tests.runs import arguments, read_metrics, read_segments


@pytest.mark.usefixtures("handlers_kept")
@pytest.mark.parametrize(("ranks", "chains"), [(1, [[10, 20], [7, 8, 20]]), (2, [[7, 8, 20]])], ids=["1", "2"])
def test_twenty_steps_are_ten_and_ten_are_seven_and_one_and_twelve(
    folder: Path, tmp_path: Path, ranks: int, chains: list[list[int]]
) -> None:
    a_killed_run_goes_on_to_the_last_bit(folder, tmp_path, CPUS, ranks=ranks, chains=chains)


STEPS = 9
CHAIN = {"training__steps": STEPS, "validation__freq": 3, "checkpoint__interval": 4}
COMPARED = ("step", "consumed_", "loss_metrics/", "optimizer/", "tokens/", "validation/")


def compared(run: Path) -> list[dict[str, Any]]:
    """All that a line of metrics.jsonl says of the training, and nothing of its speed."""
    return [{name: line[name] for name in line if name.startswith(COMPARED)} for line in read_metrics(run)]


@pytest.mark.usefixtures("handlers_kept")
@pytest.mark.parametrize("readers", [0, 1, 4])
def test_three_stops_in_a_chain_with_samples_read_ahead_lose_and_repeat_nothing(
    folder: Path, tmp_path: Path, readers: int
) -> None:
    chosen = {**CHAIN, "validation__dataset": f"{folder / 'web'}@val", "training__num_workers": readers}
    straight, run = tmp_path / "straight", tmp_path / "run"
    assert main(arguments(folder, straight, **chosen)) == 0
    argv = arguments(folder, run, **chosen)
    first = 1
    for stop in (3, 4, 8):  # step 4 is that of a save by itself, so that step-3 is not written twice
        with pytest.MonkeyPatch.context() as patch:
            note_samples(patch, tmp_path / "samples")
            signal_before_step(patch, stop + 1, first_step=first)
            assert main(argv) == 75
        told = read_status(run)
        assert (told["state"], told["step"], told["checkpoint"]) == ("preempted", stop, f"checkpoint/step-{stop}")
        first = stop + 1
    with pytest.MonkeyPatch.context() as patch:
        note_samples(patch, tmp_path / "samples")
        assert main(argv) == 0
    assert compared(run) == compared(straight)
    per_step = samples_trained(tmp_path / "samples")
    assert [sample for samples in per_step for sample in samples] == list(range(2 * STEPS))
    assert len((tmp_path / "samples").read_text().splitlines()) == STEPS, "no step was trained twice"
    segments = read_segments(run)
    assert [segment["step"] for segment in segments] == [0, 3, 4, 8]
    assert len({segment["run_id"] for segment in segments}) == 1

    before = (run / "metrics.jsonl").read_bytes()
    assert main(argv) == 0, "a finished run ends at once, and well"
    assert (run / "metrics.jsonl").read_bytes() == before
    told = read_status(run)
    assert (told["state"], told["step"], told["checkpoint"]) == ("finished", STEPS, f"checkpoint/step-{STEPS}")
