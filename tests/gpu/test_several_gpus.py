"""Runs on two and four GPUs, through NCCL: the promises that tests/integration holds on CPUs.

The bodies are those of tests/promises.py. Every run is in processes of its own, so this one never uses a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.promises import (
    GPUS,
    SIGNALLED_STEPS,
    a_killed_rank_stops_the_others,
    a_killed_run_goes_on_to_the_last_bit,
    an_export_is_its_checkpoint,
    ranks_resume_from_what_was_saved_beside,
    ranks_save_one_step_whatever_signals_come,
    two_ranks_then_one_then_more_train_the_same_samples,
)
from tests.runs import arguments, losses_and_norms, run_training

pytestmark = pytest.mark.gpu
NUM_GPUS = torch.cuda.device_count()
DETERMINISTIC: dict[str, Any] = {"training__deterministic": "true"}


def needs(num_gpus: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(num_gpus > NUM_GPUS, reason=f"needs {num_gpus} GPUs, of which there are {NUM_GPUS}")


TWO_OR_FOUR = pytest.mark.parametrize("ranks", [pytest.param(2, marks=needs(2)), pytest.param(4, marks=needs(4))])


@pytest.mark.parametrize(
    ("ranks", "replicas"),
    [
        pytest.param(2, 1, marks=needs(2), id="fsdp-2"),
        pytest.param(2, 2, marks=needs(2), id="ddp-2"),
        pytest.param(4, 2, marks=needs(4), id="hsdp-4"),
    ],
)
def test_a_killed_run_is_resumed_to_the_last_bit(folder: Path, tmp_path: Path, ranks: int, replicas: int) -> None:
    layout = {"training__data_parallel_replicate_degree": replicas}
    chains = [[7, 8, 20]]
    a_killed_run_goes_on_to_the_last_bit(folder, tmp_path, GPUS, ranks=ranks, chains=chains, **DETERMINISTIC, **layout)


@TWO_OR_FOUR
def test_two_gpus_then_one_then_more_train_the_same_samples_and_export(
    folder: Path, tmp_path: Path, ranks: int
) -> None:
    run = two_ranks_then_one_then_more_train_the_same_samples(folder, tmp_path, GPUS, ranks=ranks)
    an_export_is_its_checkpoint(run, tmp_path / "exported")


@TWO_OR_FOUR
def test_a_signal_saves_one_complete_checkpoint(folder: Path, tmp_path: Path, ranks: int) -> None:
    alone = tmp_path / "alone"
    run_training(arguments(folder, alone, training__batch_size=ranks, training__steps=SIGNALLED_STEPS))
    losses = [loss for _, loss, _ in losses_and_norms(alone)]
    ranks_save_one_step_whatever_signals_come(folder, tmp_path, losses, GPUS, ranks=ranks)


@TWO_OR_FOUR
def test_a_killed_rank_stops_the_others_in_time(folder: Path, tmp_path: Path, ranks: int) -> None:
    a_killed_rank_stops_the_others(folder, tmp_path, ranks=ranks)


@needs(2)
@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_saves_beside_training_are_those_that_it_would_have_waited_for(folder: Path, tmp_path: Path, mode: str) -> None:
    ranks_resume_from_what_was_saved_beside(folder, tmp_path, GPUS, mode=mode, **DETERMINISTIC)
