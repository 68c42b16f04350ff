"""The random numbers of a step: a function of seed, step and rank."""

from __future__ import annotations

import traceback

import pytest
import torch

from flame.train.step import seed_random, step_seed


def test_every_step_and_rank_has_numbers_of_its_own() -> None:
    seeds = [step_seed(seed, step, rank) for seed in (42, 43) for step in (1, 2, 11) for rank in (0, 1)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


def test_seeding_draws_what_torch_draws_and_formats_no_stack_for_devices_that_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in (step_seed(42, 1, 0), 2**63 - 1):
        torch.manual_seed(seed)
        expected = torch.rand(4)
        with monkeypatch.context() as patch:
            patch.setattr(traceback, "format_stack", None)  # whoever calls it fails
            seed_random(seed, torch.device("cpu"))
        assert torch.equal(torch.rand(4), expected)
