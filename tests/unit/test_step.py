"""The random numbers of a step: a function of seed, step and rank, and nothing that piles up."""

from __future__ import annotations

import torch

from flame.train.step import seed_random, step_seed


def test_every_step_and_rank_has_numbers_of_its_own() -> None:
    seeds = [step_seed(seed, step, rank) for seed in (42, 43) for step in (1, 2, 11) for rank in (0, 1)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


def test_seeding_draws_what_torch_draws_and_keeps_nothing_for_devices_that_are_not_used() -> None:
    waiting = len(torch.mtia._queued_calls)
    for seed in (step_seed(42, 1, 0), 2**63 - 1):
        torch.default_generator.manual_seed(seed)
        expected = torch.rand(4)
        seed_random(seed, torch.device("cpu"))
        assert torch.equal(torch.rand(4), expected)
    assert len(torch.mtia._queued_calls) == waiting
