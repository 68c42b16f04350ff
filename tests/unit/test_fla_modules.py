"""What replaces modules of fla: the same parameters, and softmax layers of hybrid models that keep documents apart."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

pytest.importorskip("fla")

from fla.layers.attn import Attention

from flame.train.families import FAMILIES
from flame.train.fla_modules import PlainAttention, flash_attention_not_needed, rotate, rotation

HYBRID = {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 64, "num_heads": 2}
SOFTMAX_LAYER = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "rope_theta": 100.0}


def test_softmax_layers_of_a_hybrid_are_replaced_and_the_others_kept() -> None:
    config = AutoConfig.for_model("gla", **HYBRID, attn=SOFTMAX_LAYER)
    model = FAMILIES["gla"].construct(config, "sdpa")
    kinds = [type(layer.attn).__name__ for layer in model.model.layers]
    assert kinds == ["GatedLinearAttention", "PlainAttention", "GatedLinearAttention"]


def test_it_has_the_parameters_of_the_original_and_gives_rows_their_width() -> None:
    with flash_attention_not_needed():
        original = Attention(hidden_size=32, num_heads=4, num_kv_heads=2, qkv_bias=True, qk_norm=True)
    keys = set(original.state_dict())
    plain = PlainAttention(original, "sdpa")
    assert set(plain.state_dict()) == keys
    out, *_ = plain(torch.randn(2, 5, 32), positions=torch.arange(5).expand(2, 5))
    assert out.shape == (2, 5, 32)


def test_fla_is_left_as_it_was() -> None:
    from fla.layers import attn

    before = attn.flash_attn_func
    with flash_attention_not_needed():
        assert attn.flash_attn_func is not None
    assert attn.flash_attn_func is before


def test_turned_heads_know_only_how_far_apart_they_are() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).float()
    inv_freq = 1.0 / 100.0 ** (torch.arange(0, 8, 2) / 8)

    def score(q_position: int, k_position: int) -> torch.Tensor:
        turned = [rotate(x, *rotation(torch.tensor([[n]]), inv_freq)) for x, n in ((q, q_position), (k, k_position))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(score(0, 0), (q * k).sum())
    assert not torch.isclose(score(9, 4), score(9, 5))
