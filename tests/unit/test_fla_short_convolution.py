"""fla's short convolutions by our operator: the same parameters and results, and models that plain fla loads."""

from __future__ import annotations

import copy
import logging

import pytest

pytest.importorskip("fla")

import torch
from fla.modules import ShortConvolution
from torch import nn

from flame.train.families import FAMILIES
from flame.train.family import from_config
from flame.train.fla_short_convolution import PackedShortConvolution, replace_short_convolutions
from flame.train.model import build_model
from tests.fla_families import tiny_config
from tests.triton_interpreter import interpreted


@pytest.mark.parametrize(("name", "options"), [("gated_deltanet", {}), ("gla", {"use_short_conv": True})])
def test_a_model_keeps_its_parameters_and_plain_fla_loads_it(name: str, options: dict[str, bool]) -> None:
    config = tiny_config(name, **options)
    torch.manual_seed(1)
    plain = from_config(config)
    torch.manual_seed(1)
    ours = FAMILIES[name].construct(config, "sdpa")
    assert any(type(module) is PackedShortConvolution for module in ours.modules())
    assert not any(type(module) is ShortConvolution for module in ours.modules())
    for (key, value), (expected_key, expected) in zip(
        ours.state_dict().items(), plain.state_dict().items(), strict=True
    ):
        assert key == expected_key and torch.equal(value, expected)
    plain.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(plain.state_dict(), strict=True)


def test_the_log_names_the_implementation(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flame.train.model.check_family", lambda *_, **__: None)  # which wants a GPU
    monkeypatch.setattr(logging.getLogger("flame"), "propagate", True)
    for name, told in (("gated_deltanet", True), ("mamba2", True), ("gla", False)):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="flame"):
            build_model(tiny_config(name), seed=1, rank=1, device=torch.device("cpu"), dtype=torch.float32, varlen=True)
        assert ("short convolutions: torch" in caplog.text) == told


def test_other_convolutions_are_left() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 3, groups=4), ShortConvolution(4, 3))
    weights = [copy.deepcopy(value) for value in model.parameters()]
    replace_short_convolutions(model)
    assert type(model[0]) is nn.Conv1d and type(model[1]) is PackedShortConvolution
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))


IN_INTERPRETER = """
import copy, torch
from fla.layers import GatedDeltaNet
from fla.modules import ShortConvolution
from flame.train.fla_short_convolution import replace_short_convolutions

torch.manual_seed(0)
offsets = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
for activation in ("silu", None):
    for arguments in ({"cu_seqlens": offsets}, {}):
        plain = ShortConvolution(8, 4, bias=True, activation=activation)
        ours = copy.deepcopy(plain)
        replace_short_convolutions(ours)
        x = torch.randn(1 if arguments else 2, 13, 8, requires_grad=True)
        weights, results = torch.randn_like(x), []
        for module in (plain, ours):
            y, state = module(x, **arguments)
            assert state is None
            results.append([y, *torch.autograd.grad((y * weights).sum(), [x, *module.parameters()])])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)

# without documents fla joins three convolutions in one call: that is ours too
layer = GatedDeltaNet(hidden_size=16, head_dim=8, num_heads=2, expand_v=1).train()
ours = copy.deepcopy(layer)
replace_short_convolutions(ours)
calls = []
for convolution in (ours.q_conv1d, ours.k_conv1d, ours.v_conv1d):
    convolution.register_forward_hook(lambda *_: calls.append(1))
x = torch.randn(1, 5, 16)
torch.testing.assert_close(ours(x)[0], layer(x)[0], rtol=1e-4, atol=1e-5)
assert len(calls) == 3
"""


def test_results_and_gradients_are_those_of_fla() -> None:
    interpreted(IN_INTERPRETER)
