"""Sliding windows and soft caps: attention with them is transformers' own with its masks, and the loss too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from flame.kernels import reference
from flame.kernels.varlen_attention import longest, row_attention, sdpa_attention
from tests.unit.test_model import build, last_hidden, make_config, packed_batch

WINDOW = 5
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": WINDOW}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW}),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": WINDOW}),
    (
        "gemma2",
        {
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
            "query_pre_attn_scalar": 8,
        },
    ),
]


@pytest.mark.parametrize("varlen", [True, False])
@pytest.mark.parametrize(("model_type", "options"), MODELS, ids=[name for name, _ in MODELS])
def test_losses_and_gradients_are_those_of_transformers_eager_attention(
    model_type: str, options: dict[str, Any], varlen: bool
) -> None:
    config = make_config(model_type, initializer_range=0.3, **options)
    module = build(config, varlen=varlen)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    plain.load_state_dict(module.model.state_dict())
    batch = packed_batch([7, 1, 20, 12]) if varlen else packed_batch([24, 24])
    arguments = batch if varlen else {x: batch[x].view(2, 24) for x in ("input_ids", "labels", "positions")}
    loss, *_ = module(**arguments)
    loss.backward()
    expected = torch.tensor(0.0)
    for start, stop in zip(batch["cu_seqlens"], batch["cu_seqlens"][1:], strict=False):
        logits = plain(input_ids=batch["input_ids"][:, start:stop].long(), use_cache=False).logits[0]
        labels = batch["labels"][0, start:stop].long()
        expected = expected + torch.nn.functional.cross_entropy(logits, labels, reduction="sum") * (stop - start > 1)
    expected.nan_to_num().backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    theirs = dict(plain.named_parameters())
    for name, parameter in module.model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-4)


def test_a_window_is_felt() -> None:
    """A token too far back changes nothing in a layer, one within the window does."""
    module = build(make_config("mistral", sliding_window=WINDOW, num_hidden_layers=1))
    before, after = packed_batch([40]), packed_batch([40])
    after["input_ids"][0, 10] = (after["input_ids"][0, 10] + 1) % 64
    changed = (last_hidden(module, before) != last_hidden(module, after)).any(dim=1)
    assert changed.nonzero().flatten().tolist() == list(range(10, 10 + WINDOW))


def test_fla_transformers_have_the_same_window() -> None:
    pytest.importorskip("fla")
    module = build(make_config("transformer", window_size=WINDOW, num_hidden_layers=1))
    before, after = packed_batch([40]), packed_batch([40])
    after["input_ids"][0, 10] = (after["input_ids"][0, 10] + 1) % 64
    changed = (last_hidden(module, before) != last_hidden(module, after)).any(dim=1)
    assert changed.nonzero().flatten().tolist() == list(range(10, 10 + WINDOW))


@pytest.mark.parametrize("model_type", ["mistral", "gemma2"])
def test_changing_one_document_leaves_the_others_bitwise(model_type: str) -> None:
    module = build(make_config(model_type, **dict(MODELS)[model_type]))
    before, after = packed_batch(), packed_batch()
    own = slice(int(before["cu_seqlens"][2]), int(before["cu_seqlens"][3]))
    after["input_ids"][0, own] = (after["input_ids"][0, own] + 1) % 64
    others = torch.ones(40, dtype=torch.bool)
    others[own] = False
    a, b = (last_hidden(module, batch) for batch in (before, after))
    assert torch.equal(a[others], b[others]) and not torch.equal(a[own], b[own])


@pytest.mark.parametrize("limits", [{"window": 300}, {"softcap": 1.5}, {"window": 300, "softcap": 1.5}], ids=str)
def test_sequences_longer_than_a_block_of_queries(limits: dict[str, Any]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1300, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))
    offsets = torch.tensor([0, 1100, 1300, 1300], dtype=torch.int32)
    ours = sdpa_attention(q, k, v, offsets, longest(1100), scale=0.3, **limits)
    expected = reference.varlen_attention(q, k, v, offsets, scale=0.3, **limits)
    torch.testing.assert_close(ours, expected)
    weights = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad((ours * weights).sum(), (q, k, v)),
        torch.autograd.grad((expected * weights).sum(), (q, k, v)),
    )


def test_rows_with_a_window_are_sequences() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, heads, 20, 8) for heads in (4, 2, 2))

    def alone(row: int) -> Tensor:
        packed = [x[row].transpose(0, 1) for x in (q, k, v)]
        out = reference.varlen_attention(*packed, torch.tensor([0, 20]), scale=0.3, window=4)
        return out.transpose(0, 1)

    ours = row_attention(sdpa_attention, q, k, v, scale=0.3, window=4)
    torch.testing.assert_close(ours, torch.stack([alone(row) for row in range(3)]))
