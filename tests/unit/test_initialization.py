"""Weights from scratch of every fla family: a plain CPU construction's, the gates' by their formulas, on any ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

pytest.importorskip("fla")

from flame.train.families import FAMILIES
from flame.train.fla_modules import flash_attention_not_needed
from flame.train.model import CausalLMLoss
from flame.train.parallelize import KEPT_MARKS, parallelize
from tests.fla_families import NAMES, SIZES, tiny_config
from tests.ranks import fork_ranks
from tests.unit.test_parallelize import process_group

CPU = torch.device("cpu")
SEED = 5


def construct(name: str, device: str = "cpu", **options: Any) -> PreTrainedModel:
    """Build a tiny model as a run does, on rank 0 (cpu) or another (meta)."""
    config = tiny_config(name, **options)
    torch.manual_seed(SEED)
    with torch.device(device):
        return FAMILIES[config.model_type].construct(config, "sdpa")


def plain(name: str) -> PreTrainedModel:
    """Build it as its library does by itself: nothing replaced, no device chosen, no factory of transformers."""
    config = tiny_config(name)
    torch.manual_seed(SEED)
    with flash_attention_not_needed():
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)


def statistics(value: Tensor) -> tuple[float, ...]:
    value = value.detach().double()
    return value.mean().item(), value.std(correction=0).item(), value.min().item(), value.max().item()


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_a_plain_construction(name: str) -> None:
    ours, expected = dict(construct(name).named_parameters()), dict(plain(name).named_parameters())
    assert ours.keys() == expected.keys()
    for key, value in ours.items():
        assert value.dtype == torch.float32 and torch.isfinite(value).all(), key
        assert statistics(value) == statistics(expected[key]), key
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("name", NAMES)
def test_other_ranks_have_the_same_names_shapes_and_marks_and_no_stray_tensor(name: str) -> None:
    """What the optimizer is told must not depend on the rank; a tensor outside of parameters would stay meta."""
    first, other = construct(name), construct(name, "meta")
    for kind in ("named_parameters", "named_buffers"):
        here, there = dict(getattr(first, kind)()), dict(getattr(other, kind)())
        assert here.keys() == there.keys()
        for key, value in here.items():
            assert there[key].is_meta and (there[key].shape, there[key].dtype) == (value.shape, value.dtype), key
            assert marks(there[key]) == marks(value), key
    for model in (first, other):
        stray = [(key, part) for key, part in model.named_modules() if any(map(torch.is_tensor, vars(part).values()))]
        assert not stray


def marks(value: Tensor) -> dict[str, Any]:
    return {mark: getattr(value, mark, None) for mark in KEPT_MARKS}


@pytest.mark.parametrize("name", NAMES)
def test_tied_weights_are_one_tensor_and_a_head_of_its_own_another(name: str) -> None:
    for tied in (True, False):
        for device in ("cpu", "meta"):
            model = construct(name, device, tie_word_embeddings=tied)
            assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied


def build_on_rank(rank: int, folder: Path) -> None:
    """One of two ranks: every family spread over both, put together again and left in a file."""
    torch.set_num_threads(1)
    with process_group(rank, 2, folder / "store"):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        found = {}
        for name in NAMES:
            model = construct(name, "cpu" if rank == 0 else "meta")
            module = CausalLMLoss(model, FAMILIES[model.config.model_type], "torch")
            parallelize(module, mesh, device=CPU, param_dtype=torch.float32)
            parameters = {key: value.detach().full_tensor() for key, value in model.named_parameters()}
            told = {key: marks(value) for key, value in model.named_parameters()}
            found[name] = (parameters, dict(model.named_buffers()), told)
        torch.save(found, folder / f"rank-{rank}.pt")


def test_two_ranks_hold_the_weights_of_a_plain_construction(tmp_path: Path) -> None:
    fork_ranks(2, build_on_rank, tmp_path)
    for rank in (0, 1):
        found = torch.load(tmp_path / f"rank-{rank}.pt")
        for name in NAMES:
            parameters, buffers, told = found[name]
            expected = plain(name)
            for key, value in expected.named_parameters():
                assert torch.equal(parameters[key], value), (name, key)
                assert told[key] == marks(value), (name, key)
            for key, value in construct(name).named_buffers():
                assert torch.equal(buffers[key], value), (name, key)


HEADS = 512
DT = (0.001, 0.1)
GATED: dict[str, tuple[dict[str, Any], tuple[float, float]]] = {
    # the bounds of exp(A_log), drawn evenly
    "gated_deltanet": ({"num_heads": HEADS, "head_dim": 2}, (0, 16)),
    "kda": ({"num_heads": HEADS, "head_dim": 2}, (1, 16)),
    "mamba2": ({"hidden_size": HEADS, "head_dim": 2, "num_heads": HEADS}, (1, 16)),
}


@pytest.mark.parametrize("name", GATED)
def test_gates_are_drawn_by_their_formulas(name: str) -> None:
    """A is uniform, and so is the logarithm of softplus(dt_bias): of `HEADS` and more draws, within 5 deviations."""
    options, bounds = GATED[name]
    gates = gates_of(construct(name, **options))
    check_uniform(gates["A_log"].exp(), *bounds)
    check_uniform(F.softplus(gates["dt_bias"]).log(), *map(math.log, DT))


def test_the_gates_of_mamba_by_their_formulas() -> None:
    for name in ("mamba", "samba"):
        model = construct(name, hidden_size=256, intermediate_size=512)  # twice the width, as always in mamba
        mixer = next(part for part in model.modules() if hasattr(part, "A_log"))
        states = torch.arange(1, mixer.A_log.shape[1] + 1).log().expand_as(mixer.A_log)
        torch.testing.assert_close(mixer.A_log.detach(), states)
        assert (mixer.D == 1).all()
        check_uniform(F.softplus(mixer.dt_proj.bias).log(), *map(math.log, DT))
        check_uniform(mixer.dt_proj.weight, -(16**-0.5), 16**-0.5)  # dt_rank is 256 / 16


def check_uniform(drawn: Tensor, low: float, high: float) -> None:
    drawn = drawn.detach().flatten().double()
    assert len(drawn) >= HEADS
    slack = 1e-4 * (high - low)
    assert low - slack <= drawn.min() and drawn.max() <= high + slack
    width, error = high - low, 5 / len(drawn) ** 0.5
    assert drawn.mean().item() == pytest.approx((low + high) / 2, abs=width * 0.29 * error)
    assert drawn.std().item() == pytest.approx(width / 12**0.5, abs=width * 0.29 * error)


def gates_of(model: nn.Module) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    return {kind: next(named[key] for key in named if key.endswith(kind)) for kind in ("A_log", "dt_bias")}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "rwkv7"])
def test_matrices_are_normal_and_norms_are_one(name: str) -> None:
    model = construct(name, hidden_size=64, vocab_size=512)
    embedding = model.get_input_embeddings().weight
    assert embedding.mean().item() == pytest.approx(0, abs=1e-3)
    assert embedding.std().item() == pytest.approx(model.config.initializer_range, rel=0.05)
    norms = [value for key, value in model.named_parameters() if "norm" in key and key.endswith("weight")]
    assert len(norms) > SIZES["num_hidden_layers"] and all((norm == 1).all() for norm in norms)
