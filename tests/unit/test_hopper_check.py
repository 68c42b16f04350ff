"""fla's refusal of its gated backward on Hopper: lifted where the kernel is right, kept where it is not."""

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


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fla asks before it refuses, as it is on an H200 with Triton 3.6 and without tilelang."""
    from fla.ops.common import chunk_o
    from fla.ops.common.backends import CommonTileLangBackend

    monkeypatch.setattr(chunk_o, "IS_NVIDIA_HOPPER", True)
    monkeypatch.setattr(chunk_o, "TRITON_ABOVE_3_4_0", True)
    monkeypatch.setattr(chunk_o, "TRITON_ABOVE_3_7_1", False)
    monkeypatch.setattr(CommonTileLangBackend, "can_use", lambda: False)


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
def test_one_wrong_gradient_keeps_the_refusal(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    monkeypatch.setattr(hopper_check, "relative_errors", lambda *_: {"o": 0.001, "dk": error})
    with pytest.raises(
        TrainingError, match=r"gated backward is wrong on this GPU.*got dk off by.*pip install tilelang"
    ):
        check_gated_backward([HEADS], CPU, torch.bfloat16)
    assert hopper_check.fla_refuses()


@pytest.mark.usefixtures("on_hopper")
def test_what_is_right_for_one_shape_and_wrong_for_another_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = GatedHeads(kernel="gated_delta_rule", key_heads=1, value_heads=1, key_dim=64, value_dim=16)
    monkeypatch.setattr(hopper_check, "relative_errors", lambda heads, *_: {"dk": 0.5 if heads == narrow else 0.001})
    with pytest.raises(TrainingError, match="value heads of 64 and 16"):
        check_gated_backward([HEADS, narrow], CPU, torch.bfloat16)
    assert hopper_check.fla_refuses()


@pytest.mark.usefixtures("on_hopper")
def test_a_kernel_that_cannot_run_keeps_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(hopper_check, "relative_errors", fails)
    with pytest.raises(RuntimeError, match="illegal"):
        check_gated_backward([HEADS], CPU, torch.bfloat16)
    assert hopper_check.fla_refuses()


@pytest.mark.usefixtures("on_hopper")
def test_models_without_it_and_packages_that_replace_it_are_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_check, "relative_errors", lambda *_: pytest.fail("nothing is to be tried"))
    check_gated_backward([], CPU, torch.bfloat16)
    assert hopper_check.fla_refuses()
    from fla.ops.common.backends import CommonTileLangBackend

    monkeypatch.setattr(CommonTileLangBackend, "can_use", lambda: True)
    check_gated_backward([HEADS], CPU, torch.bfloat16)


IN_INTERPRETER = """
import logging, torch
from fla.ops.common import chunk_o
from fla.ops.gated_delta_rule import chunk as delta
from fla.ops.simple_gla import chunk as gla
from flame.errors import TrainingError
from flame.kernels import hopper_check
from flame.kernels.hopper_check import GatedHeads, check_gated_backward, relative_errors

chunk_o.IS_NVIDIA_HOPPER, chunk_o.TRITON_ABOVE_3_4_0, chunk_o.TRITON_ABOVE_3_7_1 = True, True, False
hopper_check._LENGTHS = (66, 1, 5)
hopper_check._further = lambda device: (9, 7)  # as on a GPU, where kernels are tuned here
logging.basicConfig(level=logging.INFO)
cpu = torch.device("cpu")
shapes = [
    GatedHeads(kernel="gated_delta_rule", key_heads=1, value_heads=2, key_dim=16, value_dim=16),
    GatedHeads(kernel="simple_gla", key_heads=2, value_heads=2, key_dim=16, value_dim=16),
]
try:
    relative_errors(shapes[0], cpu, torch.float32)
    raise AssertionError("fla refuses, or what is lifted here is not what it asks")
except RuntimeError as error:
    assert "640" in str(error), error
check_gated_backward(shapes, cpu, torch.float32)
assert not hopper_check.fla_refuses()

# a gradient that is wrong in a quarter of one head's channels
for module, heads in ((delta, shapes[0]), (gla, shapes[1])):
    chunk_o.TRITON_ABOVE_3_7_1, right = False, module.chunk_bwd_dqkwg

    def faulty(*arguments, **named):
        dq, dk, *others = right(*arguments, **named)
        dk[:, :, -1, ::4] = -dk[:, :, -1, ::4]
        return dq, dk, *others

    module.chunk_bwd_dqkwg = faulty
    try:
        check_gated_backward([heads], cpu, torch.float32)
        raise AssertionError("the fault was not seen")
    except TrainingError as error:
        assert "dk off by" in str(error), error
        assert "dv off by" not in str(error) and "o off by" not in str(error), error
    assert hopper_check.fla_refuses()
    module.chunk_bwd_dqkwg = right
"""


def test_the_kernels_are_the_recurrence_and_a_fault_in_one_head_is_seen() -> None:
    interpreted(IN_INTERPRETER)
