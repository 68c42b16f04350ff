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
from flame.kernels.linear_cross_entropy import linear_cross_entropy
from flame.kernels.varlen_attention import longest, pad_cu_seqlens

pytestmark = [
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
