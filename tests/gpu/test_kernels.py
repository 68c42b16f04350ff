"""The kernels on a GPU: exact, isolated, deterministic where `dispatch.py` says so, and without waiting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from flame.errors import UsageError
from flame.kernels import reference
from flame.kernels.dispatch import ATTENTION, choose_attention
from flame.kernels.hopper_check import GatedHeads, relative_errors
from flame.kernels.linear_cross_entropy import linear_cross_entropy
from flame.kernels.short_convolution import positions_in_documents, short_convolution
from flame.kernels.varlen_attention import longest, pad_cu_seqlens

pytestmark = [
    pytest.mark.usefixtures("tuned_configurations"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda")
LENGTHS = [700, 1, 33, 1290, 24]


@pytest.fixture
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make_qkv(num_tokens: int, key_heads: int, *, heads: int = 8, dim: int = 64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(num_tokens, n, dim) for n in (heads, key_heads, key_heads)]
    return [torch.randn(shape, device=GPU, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().to(GPU)


def usable(attention: str, **options: Any) -> None:
    """Skip where it cannot run; what is asked for by name is an error in training."""
    asked = {"device": GPU, "dtype": torch.bfloat16, "head_dim": 64, "deterministic": False, **options}
    try:
        choose_attention(attention, **asked)
    except UsageError as error:
        pytest.skip(str(error))


def with_gradients(attention: str, qkv: list[Tensor], lengths: list[int], **limits: Any) -> tuple[Tensor, ...]:
    offsets = pad_cu_seqlens(offsets_of(lengths))
    out = ATTENTION[attention].run(*qkv, offsets, longest(max(lengths)), scale=0.125, **limits)
    generator = torch.Generator(GPU).manual_seed(1)
    weights = torch.randn(out.shape, device=GPU, dtype=out.dtype, generator=generator)
    return (out, *torch.autograd.grad(out, qkv, weights))


def test_auto_chooses_a_kernel() -> None:
    chosen = choose_attention("auto", device=GPU, dtype=torch.bfloat16, head_dim=64, deterministic=True)
    assert chosen in ("fa4", "torch_varlen")


LIMITS: list[dict[str, Any]] = [{}, {"window": 100}, {"window": 1}, {"softcap": 5.0}, {"softcap": 5.0, "window": 100}]


@pytest.mark.parametrize("attention", list(ATTENTION))
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize(("key_heads", "dim"), [(8, 64), (2, 64), (2, 128), (4, 256)])
def test_attention_equals_the_reference(attention: str, key_heads: int, dim: int, limits: dict[str, Any]) -> None:
    usable(attention, head_dim=dim, softcap="softcap" in limits)
    qkv = make_qkv(sum(LENGTHS), key_heads, dim=dim)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    out = reference.varlen_attention(*exact, offsets_of(LENGTHS), scale=0.125, **limits)
    generator = torch.Generator(GPU).manual_seed(1)
    weights = torch.randn(out.shape, device=GPU, dtype=torch.bfloat16, generator=generator)
    expected = (out, *torch.autograd.grad(out, exact, weights.double()))
    for ours, reference_value in zip(with_gradients(attention, qkv, LENGTHS, **limits), expected, strict=True):
        error = (ours.double() - reference_value).norm() / max(reference_value.norm(), weights.double().norm() * 1e-2)
        assert error < 1e-2


@pytest.mark.usefixtures("deterministic_algorithms")
@pytest.mark.parametrize("attention", [name for name, made in ATTENTION.items() if made.deterministic])
@pytest.mark.parametrize("key_heads", [8, 2])
def test_what_is_called_deterministic_gives_the_same_bits(attention: str, key_heads: int) -> None:
    usable(attention, deterministic=True)
    lengths = LENGTHS * 8
    qkv = make_qkv(sum(lengths), key_heads)
    first = with_gradients(attention, qkv, lengths)
    for _ in range(5):
        for a, b in zip(first, with_gradients(attention, qkv, lengths), strict=True):
            assert torch.equal(a, b)


@pytest.mark.usefixtures("deterministic_algorithms")
@pytest.mark.parametrize("attention", list(ATTENTION))
def test_changing_one_sequence_leaves_the_others(attention: str) -> None:
    usable(attention)
    before = make_qkv(sum(LENGTHS), 2)
    own = slice(700 + 1 + 33, 700 + 1 + 33 + 1290)
    after = [x.detach().clone() for x in before]
    for x in after:
        x[own] += 1
        x.requires_grad_()
    others = torch.ones(sum(LENGTHS), dtype=torch.bool, device=GPU)
    others[own] = False
    pairs = zip(with_gradients(attention, before, LENGTHS), with_gradients(attention, after, LENGTHS), strict=True)
    for a, b in pairs:
        assert torch.equal(a[others], b[others])
        assert not torch.equal(a[own], b[own])


LOSS_TERMS: list[dict[str, Any]] = [
    {},
    {"softcap": 3.0, "z_loss": 1e-3, "label_smoothing": 0.1},
    {"z_loss": 1e-2},
    {"softcap": 3.0},
]


@pytest.mark.parametrize("implementation", ["triton", "torch"])
@pytest.mark.parametrize("terms", LOSS_TERMS, ids=str)
@pytest.mark.parametrize("vocabulary", [3000, 50_257])
def test_linear_cross_entropy_in_bf16_is_near_fp64_and_waits_for_nothing(
    implementation: str, terms: dict[str, Any], vocabulary: int
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3000, 256, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocabulary, 256, device=GPU) * 0.1).bfloat16().requires_grad_()
    labels = torch.randint(0, vocabulary, (3000,), device=GPU, dtype=torch.int32)
    labels[::7] = -100
    options: dict[str, Any] = {"implementation": implementation, "chunk_bytes": 2 * vocabulary * 1024, **terms}
    linear_cross_entropy(hidden, weight, labels, **options)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, num_labels, _ = linear_cross_entropy(hidden, weight, labels, **options)
        gradients = torch.autograd.grad(loss, (hidden, weight))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected, expected_labels, _ = reference.linear_cross_entropy(*exact, labels, **terms)
    assert int(num_labels) == int(expected_labels)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    for ours, exact_gradient in zip(gradients, torch.autograd.grad(expected, exact), strict=True):
        assert (ours.double() - exact_gradient).norm() / exact_gradient.norm() < 6e-3
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, weight, labels, **options).loss_sum, loss)


@pytest.mark.parametrize("attention", ["fa4", "torch_varlen"])
def test_a_compiled_block_is_one_graph_whatever_the_longest_sequence(attention: str) -> None:
    usable(attention)
    counters.clear()
    attend = ATTENTION[attention].run

    def block(qkv: list[Tensor], offsets: Tensor, max_seqlen: Tensor) -> Tensor:
        return (attend(*qkv, offsets, max_seqlen, scale=0.125, window=100) * 2).relu()

    compiled = torch.compile(block, fullgraph=True)
    for lengths in (LENGTHS, [1000, 1048], [2048]):
        qkv = make_qkv(2048, 2)
        arguments = (qkv, pad_cu_seqlens(offsets_of(lengths)), longest(max(lengths)))
        for ours, expected in zip(
            torch.autograd.grad(compiled(*arguments).sum(), qkv),
            torch.autograd.grad(block(*arguments).sum(), qkv),
            strict=True,
        ):
            assert (ours.float() - expected.float()).norm() / expected.float().norm() < 1e-2
    assert counters["stats"]["unique_graphs"] == 1


# ---- short convolution ----------------------------------------------------------------------------------------------

SHORT = [700, 1, 33, 2, 3, 1290, 4, 15]


def convolved(inputs: list[Tensor], lengths: list[int], **options: Any) -> list[Tensor]:
    """Return the result and the gradients of x, the taps and, where there is one, the bias."""
    positions = positions_in_documents(inputs[0], pad_cu_seqlens(offsets_of(lengths)))
    y = short_convolution(*inputs, positions_BT=positions, **options)
    generator = torch.Generator(GPU).manual_seed(1)
    weights = torch.randn(y.shape, device=GPU, generator=generator).to(y.dtype)
    return [y, *torch.autograd.grad(y, inputs, weights)]


def convolution_inputs(channels: int, taps: int, *, bias: bool, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(1, sum(SHORT), channels), (channels, taps), (channels,)]
    return [torch.randn(shape, device=GPU).to(dtype).requires_grad_() for shape in shapes[: 2 + bias]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize(
    ("channels", "taps", "bias"), [(1536, 4, False), (200, 4, True), (37, 2, True), (64, 3, False)]
)
def test_short_convolution_is_near_fp64_and_waits_for_nothing(
    channels: int, taps: int, bias: bool, silu: bool, dtype: torch.dtype
) -> None:
    inputs = convolution_inputs(channels, taps, bias=bias, dtype=dtype)
    convolved(inputs, SHORT, silu=silu)  # compiles
    offsets = pad_cu_seqlens(offsets_of(SHORT))
    weights = torch.randn(inputs[0].shape, device=GPU).to(dtype)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        positions = positions_in_documents(inputs[0], offsets)
        y = short_convolution(*inputs, positions_BT=positions, silu=silu, implementation="triton")
        ours = [y, *torch.autograd.grad(y, inputs, weights)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = reference.short_convolution(exact[0][0], *exact[1:], cu_seqlens=offsets, silu=silu)[None]
    bound = 3e-3 if dtype == torch.bfloat16 else 1e-5
    for value, exact_value in zip(
        ours, [expected, *torch.autograd.grad(expected, exact, weights.double())], strict=True
    ):
        assert value.dtype == dtype
        assert (value.double() - exact_value).norm() / exact_value.norm() < bound


def test_short_convolution_gives_the_same_bits_and_keeps_documents_apart() -> None:
    inputs = convolution_inputs(1536, 4, bias=True)
    first = convolved(inputs, SHORT, silu=True)
    for a, b in zip(first, convolved(inputs, SHORT, silu=True), strict=True):
        assert torch.equal(a, b)
    own = slice(734, 739)
    changed = inputs[0].detach().clone()
    changed[:, own] = float("nan")
    beside = convolved([changed.requires_grad_(), *inputs[1:]], SHORT, silu=True)
    others = torch.ones(sum(SHORT), dtype=torch.bool, device=GPU)
    others[own] = False
    assert torch.equal(beside[0][:, others], first[0][:, others])
    assert torch.equal(beside[1][:, others], first[1][:, others])
    weights = torch.randn(first[0].shape, device=GPU, generator=torch.Generator(GPU).manual_seed(1)).bfloat16()
    for start, stop in ((701, 734), (739, 2029)):  # each alone, elsewhere in its run and group
        x = inputs[0].detach()[:, start:stop].clone().requires_grad_()
        y = short_convolution(x, *inputs[1:], positions_BT=positions_in_documents(x, None), silu=True)
        assert torch.equal(y, first[0][:, start:stop])
        assert torch.equal(torch.autograd.grad(y, x, weights[:, start:stop])[0], first[1][:, start:stop])


def test_a_compiled_short_convolution_is_one_graph_for_any_documents() -> None:
    counters.clear()
    inputs = convolution_inputs(256, 4, bias=False)

    def function(x: Tensor, taps: Tensor, offsets: Tensor) -> Tensor:
        return short_convolution(x * 2, taps, positions_BT=positions_in_documents(x, offsets), silu=True) + 1

    compiled = torch.compile(function, fullgraph=True)
    for lengths in (SHORT, [1000, 1048], [2048]):
        arguments = (*inputs, pad_cu_seqlens(offsets_of(lengths)))
        for ours, expected in zip(
            torch.autograd.grad(compiled(*arguments).sum(), inputs),
            torch.autograd.grad(function(*arguments).sum(), inputs),
            strict=True,
        ):
            assert (ours.float() - expected.float()).norm() / expected.float().norm() < 1e-2
    assert counters["stats"]["unique_graphs"] == 1


# ---- what fla refuses on Hopper -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "key_heads", "key_dim", "value_dim"),
    [
        ("gated_delta_rule", 6, 256, 512),  # gated_deltanet_512M
        ("gated_delta_rule", 6, 128, 128),
        ("gated_delta_rule", 3, 64, 128),  # keys 64 wide are those for which that compiler is known to be wrong
        ("simple_gla", 6, 128, 64),
    ],
)
def test_gated_backward_is_the_recurrence_on_this_gpu(
    kernel: str, key_heads: int, key_dim: int, value_dim: int
) -> None:
    pytest.importorskip("fla")
    heads = GatedHeads(kernel=kernel, key_heads=key_heads, value_heads=6, key_dim=key_dim, value_dim=value_dim)
    errors = relative_errors(heads, GPU, torch.bfloat16)
    print(heads, errors)
    assert max(errors.values()) < 1e-2
