"""Attention over packed documents against its definition, its isolation, and the padding of its offsets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flame.kernels import reference
from flame.kernels.dispatch import ATTENTION
from flame.kernels.varlen_attention import longest, pad_cu_seqlens, row_attention, sdpa_attention


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def make_qkv(
    num_tokens: int, *, heads: int = 4, key_heads: int = 4, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    torch.manual_seed(num_tokens)
    return [torch.randn(num_tokens, n, 8, dtype=dtype, requires_grad=True) for n in (heads, key_heads, key_heads)]


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    key_heads=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 1, 5, 30]),
    softcap=st.sampled_from([None, 0.7]),
)
def test_sdpa_equals_the_reference_forward_and_backward(
    lengths: list[int], key_heads: int, window: int | None, softcap: float | None
) -> None:
    qkv = make_qkv(sum(lengths), key_heads=key_heads)
    cu_seqlens = pad_cu_seqlens(offsets_of(lengths))
    limits = {"scale": 0.3, "window": window, "softcap": softcap}
    ours = sdpa_attention(*qkv, cu_seqlens, longest(max(lengths)), **limits)
    expected = reference.varlen_attention(*qkv, cu_seqlens, **limits)
    torch.testing.assert_close(ours, expected)
    weights = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad((ours * weights).sum(), qkv), torch.autograd.grad((expected * weights).sum(), qkv)
    )


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_changing_one_sequence_leaves_the_others_bitwise(changed: int) -> None:
    lengths = [7, 30, 12]
    cu_seqlens = offsets_of(lengths)
    before = make_qkv(sum(lengths), key_heads=2, dtype=torch.float32)
    own = slice(int(cu_seqlens[changed]), int(cu_seqlens[changed + 1]))
    after = [x.detach().clone() for x in before]
    for x in after:
        x[own] += 1
        x.requires_grad_()
    results = []
    for qkv in (before, after):
        out = sdpa_attention(*qkv, cu_seqlens, longest(max(lengths)), scale=0.3)
        results.append((out, *torch.autograd.grad(out.square().sum(), qkv)))
    others = torch.ones(sum(lengths), dtype=torch.bool)
    others[own] = False
    for a, b in zip(*results, strict=True):
        assert torch.equal(a[others], b[others])
        assert not torch.equal(a[own], b[own])


def test_one_sequence_is_causal_attention() -> None:
    q, k, v = make_qkv(24, key_heads=2, dtype=torch.float32)
    packed = sdpa_attention(q, k, v, offsets_of([24]), longest(24), scale=0.3)
    rows = row_attention(sdpa_attention, *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), scale=0.3)
    torch.testing.assert_close(packed, rows.squeeze(0).transpose(0, 1))


@given(num_sequences=st.integers(1, 2000))
def test_offsets_are_padded_to_a_power_of_two_by_empty_sequences(num_sequences: int) -> None:
    cu_seqlens = offsets_of([3] * num_sequences)
    padded = pad_cu_seqlens(cu_seqlens)
    length = padded.shape[0]
    assert length >= 256 and length & (length - 1) == 0 and length < max(257, 2 * len(cu_seqlens))
    assert padded.dtype == torch.int32
    assert torch.equal(padded[: len(cu_seqlens)], cu_seqlens)
    assert torch.equal(padded[len(cu_seqlens) :], cu_seqlens[-1:].expand(length - len(cu_seqlens)))


@pytest.mark.parametrize("name", ["fa4", "torch_varlen"])
def test_what_needs_a_gpu_has_shapes_anywhere(name: str) -> None:
    """Compiled graphs, and the count of a step's memory, run on tensors that have shapes only."""
    qkv = [x.detach().bfloat16().to("meta").requires_grad_() for x in make_qkv(10, key_heads=2)]
    out = ATTENTION[name].run(*qkv, torch.empty(3, dtype=torch.int32, device="meta"), longest(7), scale=0.3, window=4)
    assert out.shape == qkv[0].shape and out.dtype == torch.bfloat16
    for x, gradient in zip(qkv, torch.autograd.grad(out.sum(), qkv), strict=True):
        assert gradient.shape == x.shape and gradient.dtype == torch.bfloat16
