"""Linear attention's operators on a GPU: fla's bits in bf16, GLA near fp64, no wait after a batch's first call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("fla")

from flame.kernels import reference
from flame.kernels.fla_functions import KERNELS
from flame.kernels.linear_attention import linear_attention
from tests.linear_attention_cases import Case, differentiated, make_cases, same_bits

pytestmark = [
    pytest.mark.usefixtures("tuned_configurations"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES: dict[str, dict[str, int]] = {
    # gla_374M's, so that what is tried is what its kernels are tuned to
    "gla": {"heads": 4, "key_width": 128, "value_width": 256},
    # keys 64 wide are those for which that compiler is known to be wrong (flame/kernels/hopper_check.py)
    **{name: {"heads": 2, "key_width": 128, "value_width": 128} for name in ("gated_delta_rule", "simple_gla")},
}
OTHERS = {"heads": 2, "key_width": 64, "value_width": 128}


@pytest.fixture(autouse=True)
def not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fla's gated backward run on Hopper with an older Triton: both sides of a comparison are that kernel."""
    from fla.ops.common import chunk_o

    monkeypatch.setattr(chunk_o, "TRITON_ABOVE_3_7_1", True)


def offsets_of(*ends: int) -> Tensor:
    return torch.tensor([0, *ends, ends[-1], ends[-1]], dtype=torch.int32, device="cuda")


def case_of(name: str, offsets: Tensor) -> Case:
    return make_cases(offsets, **SIZES.get(name, OTHERS), dtype=torch.bfloat16)[name]


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "gla"])
def test_an_operator_has_the_bits_of_flas_function(name: str) -> None:
    offsets = offsets_of(65, 66, 300, 512)
    case = case_of(name, offsets)
    assert all(same_bits(case, lambda *x: linear_attention(name, *x, cu_seqlens=offsets, **case.settings)))


def test_gla_is_as_near_to_its_recurrence_as_flas() -> None:
    offsets = offsets_of(65, 66, 300, 512)
    case = case_of("gla", offsets)
    theirs = differentiated(lambda *x: case.theirs(*x)[0], case.inputs)
    ours = differentiated(lambda *x: linear_attention("gla", *x, cu_seqlens=offsets), case.inputs)
    doubles = tuple(x.double() for x in case.inputs)
    exact = differentiated(
        lambda *x: reference.gated_linear_attention(*x, offsets, scale=SIZES["gla"]["key_width"] ** -0.5), doubles
    )
    errors = [[float((a - b).norm() / b.norm()) for a, b in zip(x, exact, strict=True)] for x in (theirs, ours)]
    print("gla, errors of o, q, k, v, g: fla", *map("{:.2e}".format, errors[0]))
    print("gla, errors of o, q, k, v, g: ours", *map("{:.2e}".format, errors[1]))
    assert all(own <= 1.1 * fla for fla, own in zip(*errors, strict=True)) and max(errors[1]) < 2e-2


@pytest.mark.parametrize("name", KERNELS)
def test_only_a_batchs_first_call_waits_for_the_device(name: str) -> None:
    """As the layers of a model call it, forward and backward, with the same offsets."""
    offsets = offsets_of(65, 66, 300, 512)
    case = case_of(name, offsets)

    def layer() -> list[Tensor]:
        return differentiated(
            lambda *x: linear_attention(name, *x, cu_seqlens=offsets.detach(), **case.settings), case.inputs
        )

    first = layer()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
