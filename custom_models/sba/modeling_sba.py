"""A transformer whose attention breaks a stick: pre-norm blocks of attention and SwiGLU, and no positions at all.

Everything that it needs is in this folder, so that an exported model runs where nothing else of this project is.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .config_sba import SBAConfig
from .stick_breaking import stick_breaking


class SBAAttention(nn.Module):
    """Stick-breaking attention of `[B, T, D]`: of packed documents, or of rows that are a document each."""

    def __init__(self, config: SBAConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_heads
        kv_width = config.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        q_THD, k_TGD, v_TGD = (
            projection(x).flatten(0, 1).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out_THD = stick_breaking(q_THD, k_TGD, v_TGD, cu_seqlens, max_seqlen, scale=self.head_dim**-0.5)
        return self.o_proj(out_THD.reshape_as(x))


class SBAMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: SBAConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SBABlock(nn.Module):
    def __init__(self, config: SBAConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = SBAAttention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = SBAMLP(config)

    def forward(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cu_seqlens, max_seqlen)
        return x + self.mlp(self.mlp_norm(x))


class SBAPreTrainedModel(PreTrainedModel):
    config_class = SBAConfig
    base_model_prefix = "model"
    _no_split_modules: ClassVar[list[str]] = ["SBABlock"]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)


class SBAModel(SBAPreTrainedModel):
    def __init__(self, config: SBAConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(SBABlock(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings = value

    def forward(
        self, input_ids: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None, **_: Any
    ) -> BaseModelOutputWithPast:
        num_rows, row_len = input_ids.shape
        if cu_seqlens is None or max_seqlen is None:
            cu_seqlens = torch.arange(num_rows + 1, dtype=torch.int32, device=input_ids.device) * row_len
            max_seqlen = row_len
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, cu_seqlens, max_seqlen)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))


class SBAForCausalLM(SBAPreTrainedModel, GenerationMixin):
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embeddings.weight"}

    def __init__(self, config: SBAConfig) -> None:
        super().__init__(config)
        self.model = SBAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.embeddings = value

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits, and with `labels` (−100 is none) the mean loss of the next tokens."""
        if attention_mask is not None and not attention_mask.all():
            raise ValueError("padded rows are not supported: pack documents by cu_seqlens, or run them one by one")
        logits = self.lm_head(self.model(input_ids, **others).last_hidden_state)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten().long())
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def prepare_inputs_for_generation(self, input_ids: Tensor, **_: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}  # no cache: every token is computed again
