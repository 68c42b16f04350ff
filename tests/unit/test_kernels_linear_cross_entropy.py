"""The chunked linear cross entropy against its plain definition, at every edge of its chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flame.kernels import reference
from flame.kernels.linear_cross_entropy import linear_cross_entropy

SMALLEST_CHUNK = 1  # bytes: a chunk is never less than 128 tokens


def make_inputs(
    num_tokens: int, *, width: int = 8, vocabulary: int = 11, ignored: float = 0.3, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    bias = torch.randn(vocabulary, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, vocabulary, (num_tokens,), dtype=torch.int32)
    labels[torch.rand(num_tokens) < ignored] = -100
    return hidden, weight, labels, bias


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 256, 300])
@pytest.mark.parametrize("with_bias", [False, True])
def test_losses_and_gradients_equal_the_reference(num_tokens: int, with_bias: bool) -> None:
    hidden, weight, labels, bias = make_inputs(num_tokens)
    inputs = (hidden, weight, bias) if with_bias else (hidden, weight)
    results = []
    for function, options in (
        (linear_cross_entropy, {"chunk_bytes": SMALLEST_CHUNK}),
        (reference.linear_cross_entropy, {}),
    ):
        loss, num_labels, losses = function(hidden, weight, labels, bias if with_bias else None, **options)
        results.append((loss, num_labels, losses, *torch.autograd.grad(loss * 0.37, inputs)))
    for ours, expected in zip(*results, strict=True):
        assert ours.dtype == expected.dtype
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=25)
@given(num_tokens=st.integers(1, 400), vocabulary=st.integers(2, 40), chunk_bytes=st.integers(1, 60_000))
def test_any_chunk_size_gives_the_same_loss(num_tokens: int, vocabulary: int, chunk_bytes: int) -> None:
    hidden, weight, labels, _ = make_inputs(num_tokens, vocabulary=vocabulary)
    loss, num_labels, losses = linear_cross_entropy(hidden, weight, labels, chunk_bytes=chunk_bytes)
    expected, expected_labels, expected_losses = reference.linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close((loss, losses), (expected, expected_losses), rtol=1e-12, atol=1e-12)
    assert int(num_labels) == int(expected_labels) == int((labels != -100).sum())


def test_gradcheck_over_two_chunks() -> None:
    hidden, weight, labels, bias = make_inputs(131, width=2, vocabulary=3)

    def loss_of(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, bias, chunk_bytes=SMALLEST_CHUNK).loss_sum

    assert torch.autograd.gradcheck(loss_of, (hidden, weight, bias))


def test_without_labels_all_is_zero() -> None:
    hidden, weight, labels, bias = make_inputs(200, ignored=2.0)
    loss, num_labels, losses = linear_cross_entropy(hidden, weight, labels, bias, chunk_bytes=SMALLEST_CHUNK)
    gradients = torch.autograd.grad(loss, (hidden, weight, bias))
    assert int(num_labels) == 0
    assert all(not x.any() for x in (loss, losses, *gradients))


def test_an_ignored_token_takes_no_part() -> None:
    hidden, weight, labels, _ = make_inputs(200)
    (gradient,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels).loss_sum, (hidden,))
    ignored = labels == -100
    assert not gradient[ignored].any()
    assert gradient[~ignored].any(dim=1).all()


def test_another_ignore_index_and_wider_labels() -> None:
    hidden, weight, labels, _ = make_inputs(150)
    ours = linear_cross_entropy(hidden, weight, labels.long().where(labels != -100, 7), ignore_index=7)
    expected = reference.linear_cross_entropy(hidden, weight, labels.where(labels != -100, 7), ignore_index=7)
    torch.testing.assert_close(tuple(ours), expected)


def test_without_gradients_the_values_are_the_same() -> None:
    hidden, weight, labels, _ = make_inputs(300, dtype=torch.float32)
    with_gradients = linear_cross_entropy(hidden, weight, labels, chunk_bytes=SMALLEST_CHUNK)
    with torch.no_grad():
        without = linear_cross_entropy(hidden, weight, labels, chunk_bytes=SMALLEST_CHUNK)
    assert with_gradients.loss_sum.requires_grad and not with_gradients.token_losses.requires_grad
    assert not without.loss_sum.requires_grad
    for a, b in zip(with_gradients, without, strict=True):
        assert torch.equal(a, b)


def test_a_frozen_weight_gets_no_gradient() -> None:
    hidden, weight, labels, _ = make_inputs(150)
    loss = linear_cross_entropy(hidden, weight.detach(), labels).loss_sum
    loss.backward()
    assert hidden.grad is not None and weight.grad is None


def test_half_precision_sums_in_fp32_and_returns_gradients_in_kind() -> None:
    hidden, weight, labels, _ = make_inputs(2000, width=16, vocabulary=50, dtype=torch.float32)
    half_hidden, half_weight = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight))
    loss, _, losses = linear_cross_entropy(half_hidden, half_weight, labels, chunk_bytes=SMALLEST_CHUNK)
    loss.backward()
    exact = reference.linear_cross_entropy(half_hidden.detach().double(), half_weight.detach().double(), labels)
    assert loss.dtype == losses.dtype == torch.float32
    assert half_hidden.grad is not None and half_weight.grad is not None
    assert half_hidden.grad.dtype == half_weight.grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(float(exact[0]), rel=2e-3)


def test_backward_leaves_what_it_stored_for_a_second_time() -> None:
    hidden, weight, labels, _ = make_inputs(150)
    loss = linear_cross_entropy(hidden, weight, labels).loss_sum
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True, grad_outputs=torch.tensor(3.0).double())
    second = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(tuple(x * 3 for x in second), first)


def test_memory_is_bounded_by_the_chunk() -> None:
    """The largest tensor made on the way is a chunk's logits, not the row's."""
    sizes = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, Tensor))
            return out

    hidden, weight, labels, _ = make_inputs(4096, width=4, vocabulary=1000, dtype=torch.float32)
    with Record():
        linear_cross_entropy(hidden, weight, labels, chunk_bytes=4 * 1000 * 256).loss_sum.backward()
    assert max(sizes) == 256 * 1000
