"""Gated backward on Hopper: tried at start where the compiler is suspected, and refused where it is wrong."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("fla")

from flame.errors import TrainingError
from flame.kernels import hopper_check
from flame.kernels.hopper_check import GatedHeads, check_gated_backward, gated_heads
from flame.train.families import FAMILIES
from tests.fla_families import tiny_config
from tests.triton_interpreter import interpreted

CPU = torch.device("cpu")
HEADS = GatedHeads(kernel="gated_delta_rule", key_heads=1, value_heads=2, key_dim=16, value_dim=16)


def test_the_log_says_whose_kernels_carry_states(caplog: pytest.LogCaptureFixture) -> None:
    shapes = [HEADS, GatedHeads(kernel="simple_gla", key_heads=2, value_heads=2, key_dim=16, value_dim=64)]
    with caplog.at_level("INFO", logger="flame"):
        hopper_check.log_walks(shapes, CPU, torch.bfloat16)
    assert caplog.messages == [
        "gated_delta_rule, 1 key and 2 value heads of 16 and 16: states by fla, for ours need a CUDA device, and this "
        "one is cpu"
    ]


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_check, "is_suspect", lambda device: True)


@pytest.mark.parametrize(
    ("kind", "major", "version", "suspect"),
    [
        *(("cuda", 9, version, True) for version in ("3.4.0", "3.6.0", "3.7.0")),
        *(("cuda", 9, version, False) for version in ("3.3.1", "3.7.1", "4.0.0+git1234")),
        ("cuda", 8, "3.6.0", False),
        ("cpu", 9, "3.6.0", False),
    ],
)
def test_what_is_suspected(monkeypatch: pytest.MonkeyPatch, kind: str, major: int, version: str, suspect: bool) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(triton, "__version__", version)
    assert hopper_check.is_suspect(torch.device(kind)) == suspect


def test_the_shapes_of_a_models_layers_are_found() -> None:
    found = {name: gated_heads(FAMILIES[name].construct(tiny_config(name), "sdpa")) for name in ("mamba2", "gla")}
    assert found["mamba2"] == [
        GatedHeads(kernel="simple_gla", key_heads=4, value_heads=4, key_dim=16, value_dim=16),
    ]
    assert found["gla"] == []
    config = tiny_config("gated_deltanet", num_hidden_layers=2, expand_v=2, num_v_heads=4)
    assert gated_heads(FAMILIES["gated_deltanet"].construct(config, "sdpa")) == [
        GatedHeads(kernel="gated_delta_rule", key_heads=2, value_heads=4, key_dim=16, value_dim=32)
    ]


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("error", [0.5, float("nan"), float("inf")])
def test_one_wrong_gradient_ends_it(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    monkeypatch.setattr(hopper_check, "relative_errors", lambda *_: {"o": 0.001, "dk": error})
    with pytest.raises(TrainingError, match=r"gated backward is wrong on this GPU.*got dk off by.*Install Triton"):
        check_gated_backward([HEADS], CPU, torch.bfloat16)


@pytest.mark.usefixtures("on_hopper")
def test_what_is_right_for_one_shape_and_wrong_for_another_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = GatedHeads(kernel="gated_delta_rule", key_heads=1, value_heads=1, key_dim=64, value_dim=16)
    monkeypatch.setattr(hopper_check, "relative_errors", lambda heads, *_: {"dk": 0.5 if heads == narrow else 0.001})
    with pytest.raises(TrainingError, match="value heads of 64 and 16"):
        check_gated_backward([HEADS, narrow], CPU, torch.bfloat16)


def test_models_without_it_and_other_compilers_are_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_check, "relative_errors", lambda *_: pytest.fail("nothing is to be tried"))
    monkeypatch.setattr(hopper_check, "is_suspect", lambda device: True)
    check_gated_backward([], CPU, torch.bfloat16)
    monkeypatch.setattr(hopper_check, "is_suspect", lambda device: False)
    check_gated_backward([HEADS], CPU, torch.bfloat16)


IN_INTERPRETER = """
import logging, torch
from flame.errors import TrainingError
from flame.kernels import gated_delta_rule, hopper_check, simple_gla
from flame.kernels.hopper_check import GatedHeads, check_gated_backward

hopper_check.is_suspect = lambda device: True
hopper_check._LENGTHS = (66, 1, 5)
hopper_check._further = lambda device: (9, 7)  # as on a GPU, where kernels are tuned here
logging.basicConfig(level=logging.INFO)
cpu = torch.device("cpu")
shapes = [
    GatedHeads(kernel="gated_delta_rule", key_heads=1, value_heads=2, key_dim=16, value_dim=16),
    GatedHeads(kernel="simple_gla", key_heads=2, value_heads=2, key_dim=16, value_dim=16),
]
check_gated_backward(shapes, cpu, torch.float32)

# a gradient that is wrong in a quarter of one head's channels
for module, heads in ((gated_delta_rule, shapes[0]), (simple_gla, shapes[1])):
    right = module.chunk_gradients

    def faulty(*arguments, **named):
        dq, dk, *others = right(*arguments, **named)
        dk[:, :, -1, ::4] = -dk[:, :, -1, ::4]
        return dq, dk, *others

    module.chunk_gradients = faulty
    try:
        check_gated_backward([heads], cpu, torch.float32)
        raise AssertionError("the fault was not seen")
    except TrainingError as error:
        assert "dk off by" in str(error), error
        assert "dv off by" not in str(error) and "o off by" not in str(error), error
    module.chunk_gradients = right
"""


def test_the_kernels_are_the_recurrence_and_a_fault_in_one_head_is_seen() -> None:
    interpreted(IN_INTERPRETER)
