"""fla's families on a CPU, their kernels in Triton's interpreter: forward, backward, isolation, one optimizer step."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fla")

from flame.train.families import FAMILIES
from tests.fla_families import HYBRID, NAMES
from tests.triton_interpreter import interpreted

PACKED = [name for name in NAMES if name == HYBRID or FAMILIES[name].packed_refusal is None]
# One process for all: its imports cost more than a family does. It builds below `check_family`, which wants a GPU.
PROGRAM = """
import copy, json, sys, time, warnings
import torch
warnings.simplefilter("ignore")
import fla
from flame.kernels import varlen_attention
from flame.train.families import FAMILIES
from flame.train.model import CausalLMLoss
from tests.fla_families import tiny_config
from tests.unit.test_model import packed_batch

LENGTHS = [9, 1, 6]
varlen_attention.MIN_PADDED_OFFSETS = 4  # a program interpreted for each of 256 sequences would take minutes


def module_of(name):
    config = tiny_config(name)
    family = FAMILIES[config.model_type]
    torch.manual_seed(1)
    model = family.construct(config, "sdpa").train()
    for key, value in model.named_parameters():
        if value.ndim > 1 and not value.any():  # what begins at zero hides what comes before it
            torch.nn.init.normal_(value, std=0.1)
    return CausalLMLoss(model, family, "torch")


def losses_of(module, batch):
    return module(**batch)[2]


def alone(batch, start, stop):
    # a document of a batch as a batch of its own, without cu_seqlens
    return {name: batch[name][:, start:stop] for name in ("input_ids", "labels", "positions")}


def facts_of(name, packed):
    module = module_of(name)
    batch = packed_batch(LENGTHS)
    if not packed:
        batch = {name: batch[name] for name in ("input_ids", "labels", "positions")}
    loss, num_labels, before, _ = module(**batch)
    loss.backward()
    gradients = {key: value.grad for key, value in module.named_parameters()}
    facts = {"loss": loss.item(), "num_labels": int(num_labels), "without_gradient": [
        key for key, value in gradients.items() if value is None or not value.isfinite().all() or not value.any()
    ]}
    if packed:
        ends = [0, 9, 10, 16]
        each = [losses_of(module, alone(batch, *limits)) for limits in zip(ends, ends[1:])]
        facts["apart"] = (torch.cat(each) - before).abs().max().item()
        other = {**batch, "input_ids": batch["input_ids"].clone()}
        other["input_ids"][0, :9] = (other["input_ids"][0, :9] + 1) % 64
        changed = losses_of(module, other) != before
        facts["own_changed"], facts["others_changed"] = bool(changed[:8].all()), int(changed[9:].sum())
    if module.family.traceable is not None:
        facts["traceable"] = traceable_beside(module, batch, loss, gradients)
    torch.optim.SGD(module.parameters(), lr=0.1 / (max(gradient.norm() for gradient in gradients.values()
                    if gradient is not None))).step()
    facts["step_down"] = loss.item() - module(**batch)[0].item()
    return facts


def traceable_beside(module, batch, loss, gradients):
    # in the forms for compiled blocks: how far loss and gradients are from those of fla's own modules
    other = copy.deepcopy(module)
    other.zero_grad()
    assert other.family.traceable(other.blocks()) is None
    other_loss, *_ = other(**batch)
    other_loss.backward()
    apart = [
        ((value.grad - gradients[key]).norm() / gradients[key].norm()).item() for key, value in other.named_parameters()
    ]
    return {"loss": other_loss.item() / loss.item() - 1, "gradients": max(apart)}


def mamba2_by_recurrence():
    # a layer of two groups of heads beside its definition, one token after the other; outputs and gradients
    from fla.layers import Mamba2
    from flame.train.fla_mamba2 import PackedMamba2

    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 2}
    layer = PackedMamba2(Mamba2(**sizes, dt_limit=(0.01, 0.2), D_has_hdim=True))
    torch.nn.init.normal_(layer.D)
    x = torch.randn(1, 12, 32)
    out = layer(x, cu_seqlens=torch.tensor([0, 7, 12], dtype=torch.int32))[0]
    rows = []
    for document in (x[0, :7], x[0, 7:]):
        gate, mixed, dt = layer.in_proj(document).split(layer.widths, dim=-1)
        mixed = torch.nn.functional.silu(layer.conv1d(mixed.T)[:, : len(document)].T)
        v, b, c = mixed.split([64, 32, 32], dim=-1)
        dt = torch.nn.functional.softplus(dt + layer.dt_bias).clamp(0.01, 0.2)
        state = torch.zeros(4, 16, 16)  # heads, state, channels
        own = []
        for t in range(len(document)):
            v_t, group = v[t].view(4, 16), torch.arange(4) // 2
            b_t, c_t = b[t].view(2, 16)[group], c[t].view(2, 16)[group]
            state = (-layer.A_log.exp() * dt[t]).exp()[:, None, None] * state
            state = state + dt[t][:, None, None] * b_t[:, :, None] * v_t[:, None]
            own.append((c_t[:, None] @ state)[:, 0] + layer.D.view(4, 16) * v_t)
        rows.append(layer.out_proj(layer.norm(torch.stack(own).flatten(1), gate)))
    expected = torch.cat(rows)[None]
    weight = torch.randn_like(out)
    parameters = list(layer.parameters())
    gradients = [torch.autograd.grad((y * weight).sum(), parameters) for y in (out, expected)]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


found = {}
mamba2_by_recurrence()
packed_names = json.loads(sys.argv[2])
for name in json.loads(sys.argv[1]):
    start = time.monotonic()
    found[name] = facts_of(name, name in packed_names) | {"seconds": time.monotonic() - start}
print("FACTS" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, dict[str, Any]]:
    printed = interpreted(PROGRAM, json.dumps(NAMES), json.dumps(PACKED))
    found: dict[str, dict[str, Any]] = json.loads(printed.partition("FACTS")[2])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_a_gradient_and_a_step_lowers_the_loss(facts: dict[str, dict[str, Any]], name: str) -> None:
    found = facts[name]
    assert found["num_labels"] == 13 and found["loss"] / 13 == pytest.approx(4.16, abs=0.4)
    assert found["without_gradient"] == []
    assert found["step_down"] > 0


@pytest.mark.parametrize("name", [name for name in NAMES if name == HYBRID or FAMILIES[name].traceable is not None])
def test_forms_for_compiled_blocks_are_flas_modules_within_rounding(facts: dict[str, Any], name: str) -> None:
    apart = facts[name]["traceable"]
    assert abs(apart["loss"]) < 1e-6 and apart["gradients"] < 1e-4


def test_mamba2_by_another_kernel_is_its_recurrence(facts: dict[str, dict[str, Any]]) -> None:
    """`mamba2_by_recurrence` fails the program where it is not."""
    assert "mamba2" in facts


@pytest.mark.parametrize("name", PACKED)
def test_packed_documents_are_those_alone(facts: dict[str, dict[str, Any]], name: str) -> None:
    """The loss of each token is that of its document alone; another document changes no bit of it."""
    found = facts[name]
    assert found["apart"] < 1e-5
    assert found["own_changed"] and found["others_changed"] == 0
