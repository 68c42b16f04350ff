"""How many floating-point operations a step needs, and how many the device could do: honest model FLOPs.

Counted: forward and backward (twice the forward) of every matrix product with a weight, and of attention over the
sequences that were really seen, its causal half. Not counted: the embedding look-up, norms, recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

# Dense bfloat16, operations a second, from the vendors' data sheets. The first name that is contained wins.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,  # GH200 too
    "A100": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "MI300X": 1307e12,
}


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """A softmax attention layer: `width` is heads × head dimension; `window` limits how far back it looks."""

    width: int
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """What a model's step costs. `matmul_parameters` are weights of matrix products, the output head's included."""

    matmul_parameters: int
    attention: tuple[AttentionLayer, ...]

    def count(self, num_tokens: int, lengths: NDArray[np.integer[Any]]) -> int:
        """Return the operations of forward and backward over `num_tokens`, in sequences of these `lengths`.

        6 a parameter and token; attention 12·width for each query and key that see each other: n²/2 pairs in a
        sequence of n tokens, fewer under a window.
        """
        total = 6 * self.matmul_parameters * num_tokens
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
    """Return what a step of this model costs, or None for a family without a formula here.

    `model` is the inner Hugging Face model, before or after sharding; `config` its configuration.
    """
    formula = FORMULAS.get(config.model_type)
    if formula is None:
        return None
    return ModelFlops(matmul_parameters=_matmul_parameters(model), attention=tuple(formula(config)))


def _matmul_parameters(model: Any) -> int:
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    total = sum(p.numel() for p in model.parameters() if p.ndim >= 2 and p is not embedding)
    return total + (embedding.numel() if head is not None and head.weight is embedding else 0)


def _hugging_face_attention(config: Any) -> Sequence[AttentionLayer]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_dim
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", window is not None):
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [AttentionLayer(width=width, window=window if kind == "sliding_attention" else None) for kind in kinds]


def _fla_attention(config: Any) -> Sequence[AttentionLayer]:
    # fla's heads have hidden_size / num_heads dimensions, so that together they are as wide as the model.
    layer = AttentionLayer(width=config.hidden_size, window=getattr(config, "window_size", None))
    return [layer] * config.num_hidden_layers


FORMULAS: dict[str, Callable[[Any], Sequence[AttentionLayer]]] = {
    "llama": _hugging_face_attention,
    "mistral": _hugging_face_attention,
    "qwen2": _hugging_face_attention,
    "qwen3": _hugging_face_attention,
    "transformer": _fla_attention,
}


def peak_flops(device: torch.device) -> float | None:
    """Return what the device can do in dense bfloat16, in operations a second; None where that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)
