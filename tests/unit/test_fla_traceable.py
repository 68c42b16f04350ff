"""Blocks of fla's linear families that are to be compiled: one graph each, which layers share; the same parameters."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

pytest.importorskip("fla")

from flame.kernels.varlen_attention import longest, pad_cu_seqlens
from flame.train.activations import _KEPT_NAMES
from flame.train.families import FAMILIES
from flame.train.fla_traceable import make_traceable
from flame.train.model import CausalLMLoss
from flame.train.parallelize import _compile
from tests.fla_families import tiny_config

META = torch.device("meta")
LAYERS = 4
# What differs from layer to layer: hgrn2's first has no lower bound, rwkv7's first gives its values to the others.
GRAPHS = dict.fromkeys(("gla", "gsa", "delta_net", "gated_deltanet", "kda", "retnet", "mamba2"), 1) | {
    "hgrn2": 2,
    "rwkv7": 2,
}


def module_of(name: str, **options: Any) -> CausalLMLoss:
    config = tiny_config(name, **{"num_hidden_layers": LAYERS, **options})
    family = FAMILIES[config.model_type]
    with META:
        return CausalLMLoss(family.construct(config, "sdpa").train(), family)


def through_blocks(blocks: list[nn.Module], lengths: list[int], *, lower_bounds: bool, v_first: bool) -> Tensor:
    """Return what the blocks make of a batch without values, called as fla's models call them."""
    hidden = torch.zeros(1, sum(lengths), 32, device=META, requires_grad=True)
    first = torch.zeros_like(hidden)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    arguments: dict[str, Any] = {
        "cu_seqlens": pad_cu_seqlens(offsets).to(META),
        "max_seqlen": longest(max(lengths)),
        "positions": torch.zeros(1, sum(lengths), dtype=torch.int32, device=META),
        "use_cache": False,
    }
    for block in blocks:
        if lower_bounds:
            arguments["lower_bound"] = torch.zeros(32, device=META)
        if v_first:
            arguments["v_first"] = first
        hidden, *others = block(hidden, **arguments)
        first = others[-1] if v_first else first
    return hidden


@pytest.fixture
def quick_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """`training.compile` without its code generator: the same graphs, guards and recompilations."""
    in_place = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda block: in_place(block, backend="eager"))
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("name", GRAPHS)
def test_a_block_is_one_graph_for_all_layers_and_batches(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """On the meta device no kernel runs: what is traced, and what operators tell of shapes, is all there is."""
    module = module_of(name)
    keys = list(module.state_dict())
    with caplog.at_level(logging.INFO, logger="flame"):
        _compile(module, module.blocks())
    assert "linear attention by flame's operators" in caplog.text
    assert list(module.state_dict()) == keys
    compiled = []
    for lengths in ([40], [3, 37], [1] * 40):
        hidden = through_blocks(module.blocks(), lengths, lower_bounds=name == "hgrn2", v_first=name == "rwkv7")
        hidden.sum().backward()
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled == [GRAPHS[name]] * 3
    assert not counters["graph_break"]
    for block in module.blocks():
        assert all(value.grad.shape == value.shape for value in block.parameters() if value.grad is not None)


def test_families_that_compile_are_these() -> None:
    from_fla = {name for name, family in FAMILIES.items() if family.traceable is not None}
    assert from_fla == set(GRAPHS)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("gla", {"attnres_block_size": 2}, "each takes another number of residuals"),
        ("gla", {"attn_mode": "fused_recurrent"}, "the mode of a layer is fused_recurrent"),
        ("delta_net", {"qk_norm": "sum"}, "qk_norm is sum"),
        ("gla", {"feature_map": "gelu"}, "a layer's feature_map_fn has no form"),
    ],
)
def test_what_has_no_form_for_graphs_stays_as_it_is(
    name: str, options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = module_of(name, **options)
    kinds = [type(part) for part in module.modules()]
    with caplog.at_level(logging.INFO):
        _compile(module, module.blocks())
    assert [type(part) for part in module.modules()] == kinds
    assert all(block._compiled_call_impl is None for block in module.blocks())
    assert f"the blocks stay as they are, for {reason}" in caplog.text


def test_settings_are_followed_in_one_graph() -> None:
    options = {"num_kv_heads": 1, "feature_map": "relu", "clamp_min": -1.0, "fuse_norm": False, "fuse_swiglu": False}
    module = module_of("gla", **options, elementwise_affine=False)
    assert make_traceable(module.blocks()) is None
    hidden = through_blocks(module.blocks(), [4, 3], lower_bounds=False, v_first=False)
    assert hidden.shape == (1, 7, 32)


def test_selective_checkpointing_keeps_what_the_kernels_made() -> None:
    assert "flame::linear_gla" in _KEPT_NAMES and "flame::linear_gla_backward" not in _KEPT_NAMES


@pytest.mark.usefixtures("quick_compile")
def test_rows_of_other_lengths_are_one_further_graph() -> None:
    module = module_of("gla")
    _compile(module, module.blocks())
    compiled = []
    for length in (40, 90, 130, 70):
        through_blocks(module.blocks(), [length], lower_bounds=False, v_first=False).sum().backward()
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled == [1, 2, 2, 2]
