"""The table at the start: what is loaded, what is not, and which options have other values now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flame.train.beginning import Beginning, beginning_told, loads_moments
from flame.train.checkpoint_files import Choice, Complete
from flame.train.initial import InitialWeights
from flame.train.train_state import DataSegment, TrainState

STATE = TrainState(
    step=500,
    consumed_samples=4000,
    consumed_tokens=16_384_000,
    data_segments=(DataSegment(number=2, mixture_fingerprint="sha256:a", data_seed=1, first_step=1),),
)


def choice(step: int = 500, *, has_optimizer: bool = True) -> Choice:
    complete = Complete(step=step, consumed_samples=4000, has_optimizer=has_optimizer, identity=None, files={})
    return Choice(path=Path("exp/a/checkpoint/step-500"), complete=complete)


OWN = Beginning(choice=choice(), initial=None, is_own=True, left_out=frozenset(), changed={})


def test_the_table_of_a_resume() -> None:
    beginning = replace(
        OWN, left_out=frozenset({"optimizer"}), changed={"optimizer.lr": (0.001, 0.0003), "a.flag": (True, None)}
    )
    assert beginning_told(beginning, STATE, moments_loaded=False, load_seconds=1.26).splitlines() == [
        "resumed from exp/a/checkpoint/step-500: step 500, 4,000 samples consumed, loaded in 1.3 s",
        "  model         weights loaded",
        "  optimizer     left out: moments begin at zero",
        "  lr_scheduler  never kept: the learning rate is the configuration's, at the run's step",
        "  dataloader    4,000 samples consumed, data segment 2",
        "  train_state   step 500, 16,384,000 tokens",
        "  optimizer.lr  was 0.001, is 0.0003",
        "  a.flag        was true, is absent",
    ]


def test_the_tables_of_other_beginnings() -> None:
    assert "optimizer     moments loaded" in beginning_told(OWN, STATE, moments_loaded=True, load_seconds=0.0)
    seed = replace(OWN, choice=choice(0, has_optimizer=False))
    assert "optimizer     none kept yet: moments begin at zero" in beginning_told(
        seed, TrainState(), moments_loaded=True, load_seconds=0.0
    )
    weights = InitialWeights(path=Path("hf"), choice=None, hf_folder=Path("hf"))
    begun = replace(OWN, choice=None, initial=weights, is_own=False)
    told = beginning_told(begun, TrainState(), moments_loaded=False, load_seconds=0.0)
    assert told.startswith("beginning with hf: step 0") and "optimizer     not taken: moments begin at zero" in told
    fresh = replace(OWN, choice=None, is_own=False)
    assert beginning_told(fresh, TrainState(), moments_loaded=False, load_seconds=None).count("\n") == 0


@pytest.mark.parametrize(
    ("step", "has_optimizer", "expected"), [(10, False, False), (10, True, True), (5, False, True), (0, False, True)]
)
def test_only_a_finished_run_needs_no_moments(step: int, has_optimizer: bool, expected: bool) -> None:
    beginning = replace(OWN, choice=choice(step, has_optimizer=has_optimizer))
    assert loads_moments(beginning, total_steps=10) is expected, "where they lack, loading refuses"
    assert not loads_moments(replace(beginning, left_out=frozenset({"optimizer"})), total_steps=10)
