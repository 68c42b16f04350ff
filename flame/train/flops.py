"""How many floating-point operations a step needs: honest model FLOPs, by what the model's layers are.

Counted: forward and backward (twice the forward) of every matrix product with a weight, of attention over the sequences
that were really seen, its causal half, and of the recurrence of linear attention and state-space layers. Not counted:
the embedding look-up, norms, gates and other elementwise work, recomputation, and what a kernel computes beyond the
recurrence to run in chunks. docs/logging.md derives the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """An attention layer over pairs of tokens: `width` is heads × head dimension; `window` limits its look back."""

    width: int
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class RecurrentLayer:
    """A layer with a state: `products` are the multiply-adds of a token's forward that read and update the state."""

    products: int


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """What a model's step costs. `matmul_parameters` are the weights that a token is multiplied with, the head's too.

    Of a mixture of experts they are those of the experts that a token goes to.
    """

    matmul_parameters: int
    attention: tuple[AttentionLayer, ...] = ()
    recurrent: tuple[RecurrentLayer, ...] = ()

    def count(self, num_tokens: int, lengths: NDArray[np.integer[Any]]) -> int:
        """Return the operations of forward and backward over `num_tokens`, in sequences of these `lengths`.

        6 a multiply-add and token: for each parameter, and for the recurrent layers' products. Attention has 12·width
        for each query and key that see each other: n²/2 pairs in a sequence of n tokens, fewer under a window.
        """
        products = self.matmul_parameters + sum(layer.products for layer in self.recurrent)
        total = 6 * products * num_tokens
        for layer in set(self.attention):
            pairs_twice = _twice_the_pairs(np.asarray(lengths, dtype=np.int64), layer.window)
            total += 6 * layer.width * pairs_twice * self.attention.count(layer)
        return total


def _twice_the_pairs(lengths: NDArray[np.int64], window: int | None) -> int:
    if window is None:
        return int((lengths * lengths).sum())
    inside = np.minimum(lengths, window)
    return int((inside * inside + 2 * inside * (lengths - inside)).sum())


def model_flops(model: nn.Module, config: Any) -> ModelFlops | None:
    """Return what a step of this model costs; None where not each of its layers has a formula here.

    `model` is the inner Hugging Face model, before or after sharding; `config` its configuration.
    """
    mixers = [_mixer(module) for module in model.modules()]
    attention = tuple(mixer for mixer in mixers if isinstance(mixer, AttentionLayer))
    recurrent = tuple(mixer for mixer in mixers if isinstance(mixer, RecurrentLayer))
    if len(attention) + len(recurrent) != getattr(config, "num_hidden_layers", None):
        return None
    parameters = sum(_products_with_weights(module, config) for module in model.modules())
    return ModelFlops(matmul_parameters=parameters, attention=attention, recurrent=recurrent)


def _mixer(module: nn.Module) -> AttentionLayer | RecurrentLayer | None:
    formula = next((MIXERS[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in MIXERS), None)
    return None if formula is None else formula(module)


def _products_with_weights(module: nn.Module, config: Any) -> int:
    """Return how many weights of this very module a token is multiplied with: matrices, convolutions, experts.

    A tied head is a module of its own, and an embedding is none of them. Parameters that stand beside the matrices
    (decays, token shifts) are elementwise.
    """
    if isinstance(module, nn.Embedding):
        return 0
    total = 0
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == 3 and name in _STACKED_EXPERTS:
            total += parameter.numel() // parameter.shape[0] * config.num_experts_per_tok
        elif parameter.ndim >= 2 and name == "weight":
            total += parameter.numel()
    return total


_STACKED_EXPERTS = ("gate_up_proj", "down_proj")  # [experts, …, …]


# ---- what mixes tokens, by its class: d_k × d_v is the state of a head --------------------------------------------


def _hugging_face_attention(module: Any) -> AttentionLayer:
    width = module.config.num_attention_heads * module.head_dim
    return AttentionLayer(width=width, window=getattr(module, "sliding_window", None))


def _windowed_attention(module: Any) -> AttentionLayer:
    """Of a model with one window for all layers, which stands in its configuration."""
    return replace(_hugging_face_attention(module), window=getattr(module.config, "sliding_window", None))


def _fla_attention(module: Any) -> AttentionLayer:
    window = getattr(module, "window_size", getattr(module, "window", None))  # fla's own, or our plain form of it
    return AttentionLayer(width=module.q_proj.out_features, window=window)


def _linear_attention(module: Any) -> RecurrentLayer:
    """S = decay ⊙ S + k vᵀ; o = Sᵀ q: two products with the state."""
    return RecurrentLayer(products=2 * module.num_heads * module.head_k_dim * module.head_v_dim)


def _hgrn2(module: Any) -> RecurrentLayer:
    """Linear attention whose keys are 1 − forget gate."""
    return RecurrentLayer(products=2 * module.num_heads * module.head_f_dim * module.head_i_dim)


def _gated_slots(module: Any) -> RecurrentLayer:
    """Linear attention twice: queries and keys against `num_slots` slots, and the slots against values."""
    widths = module.head_k_dim + module.head_v_dim
    return RecurrentLayer(products=2 * module.num_heads * module.num_slots * widths)


def _delta_rule(module: Any) -> RecurrentLayer:
    """u = v − (decay ⊙ S)ᵀ k; S = decay ⊙ S + β k uᵀ; o = Sᵀ q: three products with the state."""
    heads = getattr(module, "num_v_heads", None) or module.num_heads  # a state for each head of the values
    return RecurrentLayer(products=3 * heads * module.head_k_dim * module.head_v_dim)


def _rwkv7(module: Any) -> RecurrentLayer:
    """S = w ⊙ S + b (Sᵀ a)ᵀ + k vᵀ; o = Sᵀ r: four products with the state."""
    return RecurrentLayer(products=4 * module.num_heads * module.head_dim * module.head_v_dim)


def _state_space(module: Any) -> RecurrentLayer:
    """h = decay ⊙ h + Δx Bᵀ; y = h C, for each of the inner channels: two products with the state."""
    return RecurrentLayer(products=2 * module.intermediate_size * module.ssm_state_size)


def _packed_state_space(module: Any) -> RecurrentLayer:
    """The same of our form of mamba2's layer: its convolution runs over the channels, and B and C of each group."""
    channels, convolved, _ = module.widths
    return RecurrentLayer(products=2 * channels * ((convolved - channels) // (2 * module.num_groups)))


MIXERS: dict[str, Callable[[Any], AttentionLayer | RecurrentLayer]] = {
    "Gemma2Attention": _hugging_face_attention,
    "GPT2Attention": _hugging_face_attention,
    "Gemma3Attention": _hugging_face_attention,
    "LlamaAttention": _hugging_face_attention,
    "MistralAttention": _windowed_attention,
    "MixtralAttention": _windowed_attention,
    "Olmo2Attention": _hugging_face_attention,
    "OlmoeAttention": _windowed_attention,
    "Qwen2Attention": _hugging_face_attention,
    "Qwen3Attention": _hugging_face_attention,
    "Qwen3MoeAttention": _hugging_face_attention,
    "Attention": _fla_attention,
    "PlainAttention": _fla_attention,
    "StickBreakingAttention": _fla_attention,
    "GatedLinearAttention": _linear_attention,
    "MultiScaleRetention": _linear_attention,
    "HGRN2Attention": _hgrn2,
    "GatedSlotAttention": _gated_slots,
    "DeltaNet": _delta_rule,
    "GatedDeltaNet": _delta_rule,
    "KimiDeltaAttention": _delta_rule,
    "RWKV7Attention": _rwkv7,
    "Mamba": _state_space,
    "Mamba2": _state_space,
    "PackedMamba2": _packed_state_space,
}
