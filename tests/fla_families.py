"""Tiny configurations of fla's families: small enough for Triton's interpreter, with all their parts."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "tie_word_embeddings": False,
}
SOFTMAX_LAYER = {"layers": [1], "num_heads": 2, "rope_theta": 100.0, "window_size": 8}
OPTIONS: dict[str, dict[str, Any]] = {
    "transformer": {"num_heads": 2},
    "gla": {"num_heads": 2},
    "gsa": {"num_heads": 2, "num_slots": 16},
    "hgrn2": {"expand_ratio": 16, "num_hidden_layers": 2},
    "delta_net": {"num_heads": 2},
    "gated_deltanet": {"num_heads": 2, "head_dim": 16, "expand_v": 1},
    "kda": {"num_heads": 2, "head_dim": 16},
    "rwkv7": {"num_heads": 2, "head_dim": 16, "num_hidden_layers": 2, "use_l2warp": False},
    "mamba": {"state_size": 4},
    "mamba2": {"head_dim": 16, "state_size": 16, "chunk_size": 16},
    "samba": {"num_hidden_layers": 2, "attn": SOFTMAX_LAYER},
    "retnet": {"num_heads": 2},
}
HYBRID = "gated_deltanet with a softmax layer"
NAMES = [*OPTIONS, HYBRID]


def tiny_config(name: str, **options: Any) -> PretrainedConfig:
    """Return the configuration of a family, or of the hybrid, in `SIZES`; to call where fla has been imported."""
    if name == HYBRID:
        return tiny_config("gated_deltanet", num_hidden_layers=2, attn=SOFTMAX_LAYER, **options)
    return AutoConfig.for_model(name, **{**SIZES, **OPTIONS[name], **options})
