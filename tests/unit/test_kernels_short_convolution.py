"""The short convolution of packed documents against its plain definition; its Triton kernels in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from flame.errors import UsageError
from flame.kernels import reference
from flame.kernels.dispatch import choose_convolution
from flame.kernels.short_convolution import OPERATOR, positions_in_documents, short_convolution
from tests.triton_interpreter import interpreted

LENGTHS = [1, 2, 3, 1, 9, 5]


def make_inputs(
    num_tokens: int, *, channels: int = 5, taps: int = 4, bias: bool = True, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    torch.manual_seed(num_tokens)
    shapes = [(1, num_tokens, channels), (channels, taps), (channels,)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes[: 2 + bias]]


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def with_gradients(inputs: list[Tensor], offsets: Tensor | None, **options: Any) -> list[Tensor]:
    positions = positions_in_documents(inputs[0], offsets)
    y = short_convolution(*inputs, positions_BT=positions, **options)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(y.shape, dtype=torch.float64, generator=generator).to(y.dtype)
    return [y, *torch.autograd.grad(y, inputs, weights)]


def expected_of(inputs: list[Tensor], offsets: Tensor, silu: bool) -> list[Tensor]:
    exact = [x.detach().double().requires_grad_() for x in inputs]
    y = reference.short_convolution(exact[0][0], *exact[1:], cu_seqlens=offsets, silu=silu)[None]
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(y.shape, dtype=torch.float64, generator=generator).to(inputs[0].dtype).double()
    return [y, *torch.autograd.grad(y, exact, weights)]


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    channels=st.integers(1, 7),
    taps=st.integers(1, 5),
    bias=st.booleans(),
    silu=st.booleans(),
)
def test_plain_torch_equals_the_reference(lengths: list[int], channels: int, taps: int, bias: bool, silu: bool) -> None:
    """Documents of no token too, shorter than the taps, and offsets that are padded."""
    inputs = make_inputs(sum(lengths), channels=channels, taps=taps, bias=bias)
    offsets = offsets_of([*lengths, 0, 0])
    ours = with_gradients(inputs, offsets, silu=silu, implementation="torch")
    torch.testing.assert_close(ours, expected_of(inputs, offsets, silu), rtol=1e-11, atol=1e-11)


def test_without_offsets_each_row_is_a_document() -> None:
    _, weight, bias = make_inputs(7)
    x = torch.randn(3, 7, 5, dtype=torch.float64)
    y = short_convolution(x, weight, bias, positions_BT=positions_in_documents(x, None), silu=True)
    expected = reference.short_convolution(x.flatten(0, 1), weight, bias, cu_seqlens=offsets_of([7, 7, 7]), silu=True)
    torch.testing.assert_close(y.flatten(0, 1), expected)


def test_positions_begin_with_each_document() -> None:
    positions = positions_in_documents(torch.empty(1, 6, 1), offsets_of([3, 0, 1, 2, 0]).long())
    assert positions.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert positions.dtype == torch.int32


def test_positions_are_looked_up_in_no_slice() -> None:
    """On a GPU torch 2.11 compiles a look-up in a slice as one in the whole tensor: every position would be wrong."""
    graph = make_fx(positions_in_documents)(torch.zeros(1, 6, 1), offsets_of([2, 4])).graph
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.bucketize.Tensor)
    assert node.args[1].op == "placeholder"


def test_half_precision_is_summed_in_fp32_and_rounded_once() -> None:
    inputs = [x.detach().bfloat16().requires_grad_() for x in make_inputs(21, channels=64)]
    for ours, expected in zip(
        with_gradients(inputs, offsets_of(LENGTHS), silu=True),
        expected_of(inputs, offsets_of(LENGTHS), silu=True),
        strict=True,
    ):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.double(), expected, rtol=2**-8, atol=1e-6)


def test_what_backward_keeps_are_the_inputs() -> None:
    kept: list[Tensor] = []
    inputs = make_inputs(21)
    positions = positions_in_documents(inputs[0], offsets_of(LENGTHS))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        short_convolution(*inputs, positions_BT=positions, silu=True)
    assert sorted(x.data_ptr() for x in kept) == sorted(x.data_ptr() for x in (*inputs, positions))


def test_a_compiled_caller_holds_it_in_one_graph_for_any_documents() -> None:
    inputs = make_inputs(21, dtype=torch.float32)

    def function(x: Tensor, weight: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
        return short_convolution(x * 2, weight, bias, positions_BT=positions_in_documents(x, offsets), silu=True) + 1

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in (LENGTHS, [2, 2, 2, 2, 12, 1]):
            arguments = (*inputs, offsets_of(lengths))
            for ours, expected in zip(
                torch.autograd.grad(compiled(*arguments).sum(), inputs),
                torch.autograd.grad(function(*arguments).sum(), inputs),
                strict=True,
            ):
                torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("bias", [True, False])
def test_the_operator_is_what_it_says_it_is(bias: bool) -> None:
    inputs = make_inputs(21, bias=bias, dtype=torch.float32)
    positions = positions_in_documents(inputs[0], offsets_of(LENGTHS)).flatten()
    x_TC = inputs[0].detach()[0].requires_grad_()
    arguments = (x_TC, inputs[1], inputs[2] if bias else None, positions, True, "torch")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OPERATOR, arguments, test_utils=checks)


def test_what_is_asked_for_and_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu = torch.device("cpu")
    assert choose_convolution("auto", device=cpu, dtype=torch.float32) == "torch"
    with pytest.raises(UsageError, match="short convolution implementation triton cannot be used here"):
        choose_convolution("triton", device=cpu, dtype=torch.float32)
    with pytest.raises(UsageError, match="no such implementation of short convolution"):
        choose_convolution("cuda", device=cpu, dtype=torch.float32)


# ---- in the interpreter ---------------------------------------------------------------------------------------------

IN_INTERPRETER = """
import random
import torch
from flame.kernels import short_convolution_triton
from flame.kernels.short_convolution import positions_in_documents, short_convolution
from tests.unit.test_kernels_short_convolution import expected_of, make_inputs, offsets_of, with_gradients

# short runs, narrow programs and groups of two or four rows, so that all their edges fall among few tokens
walk = short_convolution_triton.Walk(run=8, depth=2, width=4, lanes=1)
short_convolution_triton._NARROWEST = 4
for function in (short_convolution_triton.triton_forward, short_convolution_triton.triton_backward):
    function.__defaults__ = (walk,)


def draw(seed):
    rng = random.Random(seed)
    lengths = rng.choices([0, 1, 2, 3, 7, 13], k=rng.randint(1, 5)) + [rng.choice([1, 5, 8])]
    return lengths, {"channels": rng.choice([1, 3, 4, 6]), "taps": 1 + seed % 5, "bias": rng.random() < 0.5}


for seed in range(12):
    lengths, shape = draw(seed)
    silu, dtype, tolerance = (seed % 3 > 0, torch.float32, 1e-5) if seed % 4 else (True, torch.bfloat16, 2**-8)
    inputs = make_inputs(sum(lengths), dtype=dtype, **shape)
    offsets = offsets_of([*lengths, 0])
    ours = with_gradients(inputs, offsets, silu=silu, implementation="triton")
    assert all(x.dtype == dtype for x in ours)
    expected = expected_of(inputs, offsets, silu)
    torch.testing.assert_close([x.double() for x in ours], expected, rtol=tolerance, atol=10 * tolerance)

# a document's bits are those that it has alone, wherever it lies in a row, and whatever the others hold
lengths = [3, 11, 2, 5]
inputs = make_inputs(21, dtype=torch.float32)
y, d_x, *_ = with_gradients(inputs, offsets_of(lengths), silu=True)
own = slice(3, 14)
changed = inputs[0].detach().clone()
changed[:, :3], changed[:, 14:] = float("nan"), float("inf")
beside = with_gradients([changed.requires_grad_(), *inputs[1:]], offsets_of(lengths), silu=True)
assert torch.equal(beside[0][:, own], y[:, own]) and torch.equal(beside[1][:, own], d_x[:, own])
x = inputs[0].detach()[:, own].clone().requires_grad_()
alone = short_convolution(x, *inputs[1:], positions_BT=positions_in_documents(x, None), silu=True)
weights = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).float()
assert torch.equal(alone, y[:, own])
assert torch.equal(torch.autograd.grad(alone, x, weights[:, own])[0], d_x[:, own])

# rows apart in memory, as parts of a projection; positions as the loader has them, int64
wide = torch.randn(1, 21, 12)
part = wide[..., 4:9]
positions = positions_in_documents(part, offsets_of(lengths))
y = short_convolution(part, *inputs[1:], positions_BT=positions.long())
assert torch.equal(y, short_convolution(part.contiguous(), *inputs[1:], positions_BT=positions))
"""


def test_the_triton_kernels_in_their_interpreter_equal_the_reference_and_keep_documents_apart() -> None:
    pytest.importorskip("triton")
    interpreted(IN_INTERPRETER)
