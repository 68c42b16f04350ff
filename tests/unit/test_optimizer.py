"""Optimizers: who is decayed, hyperparameters that follow the configuration, clipping in one pass, sharded or not."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from flame.errors import UsageError
from flame.train.optimizer import (
    OPTIMIZERS,
    apply_hyperparameters,
    build_optimizer,
    clip_and_scale,
    parameter_groups,
)
from flame.train.options import OptimizerOptions
from tests.ranks import fork_ranks

CPU = torch.device("cpu")


class Toy(nn.Module):
    """Every kind of parameter that decay asks about. 5 rows: uneven on two ranks; `scalar` is empty on one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 5)
        self.norm = nn.LayerNorm(5)
        self.expert_bias = nn.Parameter(torch.randn(2, 5))
        self.marked = nn.Parameter(torch.randn(3, 5))
        self.marked._no_weight_decay = True  # type: ignore[attr-defined]
        self.scalar = nn.Parameter(torch.randn(1))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.norm(self.linear(self.embedding(ids)))
        return ((hidden * self.scalar) @ self.marked.T).sum() + (hidden[:2] * self.expert_bias).pow(2).sum()


def ids() -> Tensor:
    return torch.arange(6) % 7


def names_by_group(model: nn.Module, groups: list[dict[str, Any]], key: str = "name") -> dict[Any, set[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[Any, set[str]] = {}
    for group in groups:
        found.setdefault(group[key], set()).update(names[id(parameter)] for parameter in group["params"])
    return found


def test_norms_biases_vectors_and_marked_parameters_are_not_decayed() -> None:
    model = Toy()
    groups = parameter_groups(model, OptimizerOptions(weight_decay=0.3))
    assert names_by_group(model, groups) == {
        "decayed": {"embedding.weight", "linear.weight"},
        "not_decayed": {"linear.bias", "norm.weight", "norm.bias", "expert_bias", "marked", "scalar"},
    }
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]


def test_the_old_rule_decays_all() -> None:
    model = Toy()
    groups = parameter_groups(model, OptimizerOptions(decay_all=True))
    assert names_by_group(model, groups) == {"decayed": {name for name, _ in model.named_parameters()}}


def test_learning_rates_have_factors_by_parts_of_names() -> None:
    model = Toy()
    options = OptimizerOptions(lr=0.5, lr_factors=("embed*=0.1", "norm=0", "*.bias=2", "norm.bias=3"))
    optimizer = build_optimizer(model, options, CPU)
    assert names_by_group(model, optimizer.param_groups, "lr_factor") == {
        0.1: {"embedding.weight"},
        0.0: {"norm.weight"},
        2.0: {"linear.bias"},
        3.0: {"norm.bias"},  # the last pattern that matches
        1.0: {"linear.weight", "expert_bias", "marked", "scalar"},
    }
    apply_hyperparameters(optimizer, options, 0.25)
    assert all(group["lr"] == 0.25 * group["lr_factor"] for group in optimizer.param_groups)


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        (("embed=1",), "no parameter's name matches (got embed; expected whole parts of a name such as .*Did you mean"),
        (("norm=1", "q=1"), "(got q; .*q\\* also matches longer parts"),
    ],
)
def test_a_pattern_must_match_something(patterns: tuple[str, ...], told: str) -> None:
    with pytest.raises(UsageError, match=told.replace("(", "\\(")):
        build_optimizer(Toy(), OptimizerOptions(lr_factors=patterns), CPU)


@pytest.mark.parametrize("text", ["norm", "norm=", "=1", "norm=fast", "norm=-1", "norm=inf", "norm=nan"])
def test_what_is_no_factor_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="lr_factors cannot contain"):
        OptimizerOptions(lr_factors=(text,))


# ---- Muon


def test_muon_takes_the_matrices_between_embeddings_and_head() -> None:
    model = Toy()
    model.head = nn.Linear(5, 7)
    model.get_output_embeddings = lambda: model.head  # type: ignore[assignment]
    model.convolution = nn.Conv1d(5, 5, 3, bias=False)
    optimizer = build_optimizer(model, OptimizerOptions(name="Muon", decay_all=True), CPU)
    taken = names_by_group(model, optimizer.param_groups, "hidden_matrices")
    assert taken[True] == {"linear.weight"}
    assert taken[False] == {name for name, _ in model.named_parameters()} - taken[True]
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_muon_is_torchs_to_the_last_bit(shape: tuple[int, int], adjust: str) -> None:
    ours, theirs = nn.Linear(shape[1], shape[0], bias=False), nn.Linear(shape[1], shape[0], bias=False)
    theirs.load_state_dict(ours.state_dict())
    options = OptimizerOptions(name="Muon", lr=0.1, muon_momentum=0.8, weight_decay=0.3, muon_adjust_lr=adjust)
    optimizer = build_optimizer(ours, options, CPU)
    other = torch.optim.Muon(theirs.parameters(), lr=0.1, momentum=0.8, weight_decay=0.3, adjust_lr_fn=adjust)
    for _ in range(3):
        ours.weight.grad = torch.randn(shape)
        theirs.weight.grad = ours.weight.grad.clone()
        optimizer.step()
        other.step()
        assert torch.equal(ours.weight, theirs.weight)
    moments = (optimizer.state[ours.weight], other.state[theirs.weight])
    assert torch.equal(moments[0]["momentum_buffer"], moments[1]["momentum_buffer"])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("implementation", [None, "foreach", "for-loop", "fused"])
def test_every_optimizer_and_implementation_makes_the_same_update(name: str, implementation: str | None) -> None:
    options = OptimizerOptions(name=name, implementation=implementation, lr=0.01)
    expected = _updated(OptimizerOptions(name=name, implementation="for-loop", lr=0.01))
    torch.testing.assert_close(_updated(options), expected, rtol=1e-5, atol=1e-7)


def _updated(options: OptimizerOptions) -> dict[str, Tensor]:
    model = Toy()
    optimizer = build_optimizer(model, options, CPU)
    for _ in range(3):
        model(ids()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_adamw_decays_what_it_should_by_lr_times_weight_decay() -> None:
    model = Toy()
    before = copy.deepcopy(model.state_dict())
    optimizer = build_optimizer(model, OptimizerOptions(lr=0.5, weight_decay=0.1), CPU)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        kept = 0.95 if name in ("embedding.weight", "linear.weight") else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * kept)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hyperparameters_come_from_the_configuration_and_not_from_what_was_loaded(name: str) -> None:
    optimizer = build_optimizer(Toy(), OptimizerOptions(name=name), CPU)
    other = OptimizerOptions(name=name, lr=1.0, beta1=0.7, beta2=0.8, eps=1e-3, weight_decay=0.4, muon_momentum=0.6)
    optimizer.load_state_dict(build_optimizer(Toy(), other, CPU).state_dict())
    changed = OptimizerOptions(name=name, beta1=0.5, beta2=0.6, eps=1e-15, weight_decay=0.2)
    apply_hyperparameters(optimizer, changed, 0.125)
    fresh = build_optimizer(Toy(), dataclasses.replace(changed, lr=0.125), CPU)
    assert [_hyperparameters(group) for group in optimizer.param_groups] == [
        _hyperparameters(group) for group in fresh.param_groups
    ]
    assert {group["name"]: group["weight_decay"] for group in optimizer.param_groups} == {
        "decayed": 0.2,
        "not_decayed": 0.0,
    }
    assert all(group["lr"] == 0.125 for group in optimizer.param_groups)


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


# ---- scaling and clipping


@given(
    shapes=st.lists(st.lists(st.integers(1, 4), min_size=0, max_size=3), min_size=1, max_size=5),
    scale=st.floats(1e-6, 10),
    max_norm=st.none() | st.just(float("inf")) | st.floats(1e-3, 100),
    seed=st.integers(0, 1000),
)
def test_as_torch_clips_scaled_gradients(
    shapes: list[list[int]], scale: float, max_norm: float | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ours = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    theirs = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    for own, other in zip(ours, theirs, strict=True):
        own.grad = torch.randn(own.shape, generator=generator) * 10
        other.grad = own.grad * scale
    norm = clip_and_scale(ours, scale, max_norm)
    expected = nn.utils.clip_grad_norm_(theirs, float("inf") if max_norm is None else max_norm)
    assert norm.dtype == torch.float32 and norm.ndim == 0
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=0)


def test_parameters_without_a_gradient_are_passed_over() -> None:
    used, unused = torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)
    used.grad = torch.tensor([3.0, 4.0])
    assert clip_and_scale([unused, used], 2.0, None) == 10
    assert used.grad.tolist() == [6, 8] and unused.grad is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(bad: float) -> None:
    parameter = torch.zeros(2, requires_grad=True)
    parameter.grad = torch.tensor([1.0, bad])
    assert not torch.isfinite(clip_and_scale([parameter], 0.5, 1.0))


def _sharded(shape: tuple[int, int]) -> Toy:
    """Toy over (dp_replicate, dp_shard), its gradients summed over ranks as training sums them."""
    model = Toy()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    fully_shard(model, mesh=mesh if shape[0] > 1 else mesh["dp_shard"])
    model.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    model.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    return model


def _check_sharded_step(shape: tuple[int, int], max_norm: float, name: str, implementation: str | None = None) -> None:
    """One step of the sharded model is that of the plain one, to the norm, the gradients and the weights."""
    world_size = shape[0] * shape[1]
    options = OptimizerOptions(lr=0.01, name=name, weight_decay=0.1, implementation=implementation)
    sharded, plain = _sharded(shape), Toy()
    optimizers = [build_optimizer(model, options, CPU) for model in (sharded, plain)]
    sharded(ids()).backward()
    (plain(ids()) * world_size).backward()
    norms = [clip_and_scale(list(model.parameters()), 0.25, max_norm) for model in (sharded, plain)]
    assert not isinstance(norms[0], DTensor)
    torch.testing.assert_close(norms[0], norms[1])
    everyone = [torch.empty(()) for _ in range(world_size)]
    dist.all_gather(everyone, norms[0])
    assert all(torch.equal(norm, norms[0]) for norm in everyone)
    for optimizer in optimizers:
        optimizer.step()
    whole = dict(plain.named_parameters())
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), whole[name].grad)
        if name != "marked":  # fully_shard makes new parameters; parallelize, not this test, carries marks over
            torch.testing.assert_close(parameter.full_tensor(), whole[name].detach())


def test_sharded_on_one_rank() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        for name in OPTIMIZERS:
            for implementation in ("fused", "foreach", "for-loop"):
                _check_sharded_step((1, 1), max_norm=0.5, name=name, implementation=implementation)
    finally:
        dist.destroy_process_group()


def _rank_of_two(rank: int, store: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        for shape in ((1, 2), (2, 1)):
            for max_norm, name in ((0.5, "SGD"), (1e6, "SGD"), (0.5, "Muon")):
                _check_sharded_step(shape, max_norm, name)
            for name in ("AdamW", "SGD", "Muon"):
                _check_sharded_step(shape, 0.5, name, "fused")
    finally:
        dist.destroy_process_group()


def test_sharded_and_replicated_on_two_ranks(tmp_path: Path) -> None:
    fork_ranks(2, _rank_of_two, tmp_path / "store")
