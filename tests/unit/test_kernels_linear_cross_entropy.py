"""The chunked linear cross entropy against its plain definition, at every edge of its chunks."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flame.kernels import reference
from flame.kernels.linear_cross_entropy import (
    OPERATOR,
    chunked_losses,
    default_chunk_bytes,
    linear_cross_entropy,
    scaled_in_place,
)
from flame.kernels.loss_rows import LossTerms, RowStatistics, row_statistics, torch_losses

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
    with Record(), torch.no_grad():
        chunked_losses(hidden, weight, None, labels, LossTerms(), torch_losses, 256, [True, True, False])
    assert max(sizes) == 256 * 1000


TERMS = st.fixed_dictionaries(
    {
        "softcap": st.sampled_from([None, 0.5, 3.0]),
        "z_loss": st.sampled_from([0.0, 0.01]),
        "label_smoothing": st.sampled_from([0.0, 0.1]),
    }
)


@settings(max_examples=25)
@given(terms=TERMS, num_tokens=st.integers(1, 300), vocabulary=st.integers(2, 40))
def test_terms_of_the_loss_equal_the_reference(terms: dict[str, Any], num_tokens: int, vocabulary: int) -> None:
    hidden, weight, labels, bias = make_inputs(num_tokens, vocabulary=vocabulary)
    results = []
    for function, options in (
        (linear_cross_entropy, {"chunk_bytes": SMALLEST_CHUNK}),
        (reference.linear_cross_entropy, {}),
    ):
        loss, _, losses = function(hidden, weight, labels, bias, **terms, **options)
        results.append((loss, losses, *torch.autograd.grad(loss, (hidden, weight, bias))))
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)


def test_losses_of_tokens_add_up_to_the_sum_whatever_its_terms() -> None:
    hidden, weight, labels, _ = make_inputs(300)
    loss, _, losses = linear_cross_entropy(hidden, weight, labels, softcap=2.0, z_loss=0.1, label_smoothing=0.2)
    torch.testing.assert_close(losses.sum(), loss)
    assert not losses[labels == -100].any()


def test_statistics_of_parts_of_a_vocabulary_join_to_those_of_all() -> None:
    """What ranks would do that hold a part of the vocabulary each: join four numbers a row between the two halves."""
    torch.manual_seed(0)
    terms = LossTerms(softcap=2.0, z_loss=0.01, label_smoothing=0.1)
    logits, labels = torch.randn(9, 12, dtype=torch.float64), torch.arange(9)
    whole = row_statistics(logits, labels, terms)
    parts = []
    for start in (0, 6):
        inside = (labels >= start) & (labels < start + 6)
        part = row_statistics(logits[:, start : start + 6].clone(), (labels - start).where(inside, 0), terms)
        parts.append(part._replace(target=part.target * inside))
    largest = torch.maximum(parts[0].largest, parts[1].largest)
    joined = RowStatistics(
        largest,
        sum(part.exp_sum * (part.largest - largest).exp() for part in parts),
        sum(part.target for part in parts),
        sum(part.total for part in parts),
    )
    torch.testing.assert_close(tuple(joined), tuple(whole))


def test_a_compiled_caller_holds_it_in_its_graph() -> None:
    hidden, weight, labels, _ = make_inputs(300, dtype=torch.float32)

    def loss_of(hidden: Tensor, weight: Tensor) -> Tensor:
        parts = linear_cross_entropy(hidden * 2, weight, labels, z_loss=0.01, chunk_bytes=SMALLEST_CHUNK)
        return parts.loss_sum / parts.num_labels

    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    for ours, expected in zip(
        torch.autograd.grad(compiled(hidden, weight), (hidden, weight)),
        torch.autograd.grad(loss_of(hidden, weight), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(ours, expected)


def test_the_operator_is_what_it_says_it_is() -> None:
    hidden, weight, labels, _ = make_inputs(20, dtype=torch.float32)
    arguments = (hidden, weight, None, labels, -100, 0.0, 0.0, 0.0, "torch", 128, [True, True, False])
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(OPERATOR, arguments, test_utils=checks)


def test_there_is_no_second_gradient_and_none_of_a_tokens_loss() -> None:
    hidden, weight, labels, _ = make_inputs(150)
    loss, _, losses = linear_cross_entropy(hidden, weight, labels)
    assert not losses.requires_grad
    with pytest.raises(RuntimeError, match="support automatic differentiation"):
        torch.autograd.grad(loss, hidden, create_graph=True)


IN_INTERPRETER = """
import torch
from flame.kernels import loss_rows_triton
from flame.kernels.linear_cross_entropy import (
    OPERATOR,
    chunked_losses,
    default_chunk_bytes,
    linear_cross_entropy,
    scaled_in_place,
)
from flame.kernels.loss_rows import LossTerms, RowStatistics, row_statistics, torch_losses
from flame.kernels.loss_rows import LossTerms, torch_losses
from flame.kernels.loss_rows_triton import triton_losses

loss_rows_triton._LANES_A_WARP = 1  # so that short rows have several tiles
torch.manual_seed(0)
TERMS = [LossTerms(), LossTerms(softcap=2.0, z_loss=0.01, label_smoothing=0.1, ignore_index=5), LossTerms(softcap=1.0)]
for vocabulary, dtype, terms, with_gradients in (
    *((vocabulary, torch.float32, terms, True) for vocabulary in (2, 64, 150) for terms in TERMS),
    (150, torch.bfloat16, TERMS[1], True),
    (150, torch.float32, TERMS[1], False),
):
    logits = (3 * torch.randn(3, vocabulary)).to(dtype)
    labels = torch.tensor([0, terms.ignore_index, vocabulary - 1])
    expected, exact = logits.double(), torch.empty(3, dtype=torch.float64)
    losses = torch.full((3,), 9.0)
    torch_losses(expected, labels, exact, terms=terms, with_gradients=with_gradients)
    triton_losses(logits, labels, losses, terms=terms, with_gradients=with_gradients)
    torch.testing.assert_close(losses.double(), exact, rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(logits.double(), expected, rtol=tolerance, atol=tolerance)
losses = torch.empty(2)
triton_losses(torch.randn(2, 7), torch.tensor([7, -1]), losses, terms=LossTerms(), with_gradients=False)
assert losses.isnan().all(), "a label outside the vocabulary is no loss"

hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
labels = torch.randint(0, 30, (5,), dtype=torch.int32)
results = []
for implementation in ("triton", "torch"):
    loss, _, losses = linear_cross_entropy(hidden, weight, labels, chunk_bytes=1, implementation=implementation)
    results.append((loss, losses, *torch.autograd.grad(loss, (hidden, weight))))
torch.testing.assert_close(*results, rtol=1e-5, atol=1e-4)
"""


def test_the_triton_kernel_in_its_interpreter_equals_plain_torch() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", IN_INTERPRETER], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@settings(deadline=None)
@given(rows=st.integers(1, 70), width=st.integers(1, 9), dtype=st.sampled_from([torch.bfloat16, torch.float32]))
def test_a_gradient_is_scaled_and_narrowed_in_its_own_memory(rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows * width)
    stored, factor = torch.randn(rows, width), torch.rand(())
    expected, memory = (stored * factor).to(dtype), stored.data_ptr()
    result = scaled_in_place(stored, factor, dtype)
    assert torch.equal(result, expected)
    assert result.data_ptr() == memory
    assert result.is_contiguous()


@pytest.mark.parametrize("vocabulary", [32_000, 152_064, 256_000])
@pytest.mark.parametrize("width", [1024, 2048])
def test_chunk_and_fp32_gradient_share_one_budget(vocabulary: int, width: int) -> None:
    weight = torch.empty(vocabulary, width, dtype=torch.bfloat16, device="meta")
    beyond = 2 * weight.numel()
    chunk = default_chunk_bytes(weight)
    assert chunk >= 240 << 20
    assert chunk == 240 << 20 or chunk + beyond <= 960 << 20
    assert default_chunk_bytes(weight.float()) == 768 << 20
