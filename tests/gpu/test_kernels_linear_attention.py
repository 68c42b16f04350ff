"""Linear attention's operators on a GPU: fla's bits or near fp64, in bf16, and no wait after a batch's first call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("fla")

from flame.kernels.fla_functions import KERNELS
from flame.kernels.linear_attention import linear_attention
from tests.linear_attention_cases import (
    RECURRENCES,
    Case,
    differentiated,
    make_cases,
    recurrence,
    relative_error,
    same_bits,
)

pytestmark = [
    pytest.mark.usefixtures("tuned_configurations"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES: dict[str, dict[str, int]] = {
    # those of configs/, so that what is tried is what these kernels are tuned to
    "gla": {"heads": 4, "key_width": 128, "value_width": 256},
    "gated_delta_rule": {"heads": 6, "key_width": 256, "value_width": 512},
    "simple_gla": {"heads": 6, "key_width": 128, "value_width": 64},
}
OTHERS = {"heads": 2, "key_width": 64, "value_width": 128}


def offsets_of(*ends: int) -> Tensor:
    return torch.tensor([0, *ends, ends[-1], ends[-1]], dtype=torch.int32, device="cuda")


def case_of(name: str, offsets: Tensor) -> Case:
    return make_cases(offsets, **SIZES.get(name, OTHERS), dtype=torch.bfloat16)[name]


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in SIZES])
def test_an_operator_has_the_bits_of_flas_function(name: str) -> None:
    offsets = offsets_of(65, 66, 300, 512)
    case = case_of(name, offsets)
    assert all(same_bits(case, lambda *x: linear_attention(name, *x, cu_seqlens=offsets, **case.settings)))


def test_gla_is_as_near_to_its_recurrence_as_flas() -> None:
    offsets = offsets_of(65, 66, 300, 512)
    case = case_of("gla", offsets)
    theirs = differentiated(lambda *x: case.theirs(*x)[0], case.inputs)
    errors = [relative_error(x, exact) for x, exact in zip(theirs, exact_of("gla", case, offsets), strict=True)]
    ours = errors_of("gla", case, offsets)
    print("gla, errors of o, q, k, v, g: fla", *map("{:.2e}".format, errors))
    print("gla, errors of o, q, k, v, g: ours", *map("{:.2e}".format, ours))
    assert all(own <= 1.1 * fla for fla, own in zip(errors, ours, strict=True)) and max(ours) < 2e-2


@pytest.mark.parametrize("name", [name for name in RECURRENCES if name != "gla"])
def test_kernels_are_their_recurrence(name: str) -> None:
    """With compilers, too, that are known to miscompile some of fla's for Hopper: bits alone would tell nothing."""
    offsets = offsets_of(65, 66, 300, 512)
    errors = errors_of(name, case_of(name, offsets), offsets)
    print(name, *map("{:.2e}".format, errors))
    assert max(errors[:6]) < 1e-2 and max(errors) < 3e-2  # the last are sums of many numbers of both signs


@pytest.mark.parametrize("kernel", ["walk_forward", "walk_backward", "chunk_gradients"])
def test_all_that_a_kernel_may_be_tuned_to_has_the_same_bits(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of o and the gradients of q, k and v; and but for what has no room on this device."""
    from triton.runtime.errors import OutOfResources

    from flame.kernels import gated_delta_rule_triton

    tuner = getattr(gated_delta_rule_triton, kernel)
    offsets = offsets_of(65, 66, 300, 512)
    case = case_of("gated_delta_rule", offsets)
    found = []
    for config in tuner.configs:
        monkeypatch.setattr(tuner, "configs", [config])
        try:
            found.append(
                differentiated(
                    lambda *x: linear_attention("gated_delta_rule", *x, cu_seqlens=offsets, **case.settings),
                    case.inputs,
                )
            )
        except OutOfResources as error:
            print(kernel, config, error)
    assert len(found) > 1
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0][:4], other[:4], strict=True))


def exact_of(name: str, case: Case, offsets: Tensor) -> list[Tensor]:
    return differentiated(lambda *x: recurrence(name, *x, offsets=offsets), tuple(x.double() for x in case.inputs))


def errors_of(name: str, case: Case, offsets: Tensor) -> list[float]:
    ours = differentiated(lambda *x: linear_attention(name, *x, cu_seqlens=offsets, **case.settings), case.inputs)
    return [relative_error(x, exact) for x, exact in zip(ours, exact_of(name, case, offsets), strict=True)]


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
