"""The configuration of a stick-breaking transformer."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class SBAConfig(PretrainedConfig):
    """A decoder like Llama's whose attention breaks a stick, and which therefore has no positions."""

    model_type = "sba"

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 1024,
        intermediate_size: int | None = None,
        num_hidden_layers: int = 24,
        num_heads: int = 16,
        num_kv_heads: int | None = None,
        hidden_act: str = "silu",
        initializer_range: float = 0.02,
        norm_eps: float = 1e-6,
        tie_word_embeddings: bool = False,
        **others: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        # 8/3 of the width, so that a gated MLP is as large as a plain one of 4 times the width; a multiple of 256
        self.intermediate_size = (
            -(-8 * hidden_size // 3 // 256) * 256 if intermediate_size is None else intermediate_size
        )
        self.hidden_act = hidden_act
        self.initializer_range = initializer_range
        self.norm_eps = norm_eps
        if hidden_size % num_heads or num_heads % self.num_kv_heads:
            raise ValueError(
                f"hidden_size {hidden_size} must be a multiple of num_heads {num_heads}, "
                f"and that of num_kv_heads {self.num_kv_heads}"
            )
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)
