"""Hugging Face's decoders: attention through an interface of ours, in which no mask is ever built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from flame.kernels.dispatch import ATTENTION
from flame.kernels.varlen_attention import longest, pad_cu_seqlens, row_attention
from flame.train.family import Arguments, Family, from_config


def _construct_decoder(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    # transformers takes any name with sdpa in it for torch's, which it refuses to models with soft caps
    interface = f"flame_{attention}".replace("sdpa", "by_document")
    AttentionInterface.register(interface, _attention_interface(attention))
    return from_config(config, attn_implementation=interface)


def _attention_interface(attention: str) -> Callable[..., tuple[Tensor, None]]:
    """Return transformers' kind of attention function over `[B, H, T, D]`, which gives back `[B, T, H, D]`.

    transformers builds masks only for the implementations that it knows, so that `attention_mask` stays None.
    """
    attend_packed = ATTENTION[attention].run

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: Tensor | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        assert attention_mask is None and dropout == 0.0, "flame's attention has neither masks nor dropout"
        assert s_aux is None, "flame's attention has no sinks"
        assert query.shape[2] == key.shape[2], "flame's attention is for training: it reads no cache"
        limits: Arguments = {"scale": scaling, "window": sliding_window, "softcap": softcap}
        if cu_seq_lens_q is None:
            return row_attention(attend_packed, query, key, value, **limits).transpose(1, 2), None
        packed = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        out_THD = attend_packed(*packed, cu_seq_lens_q, max_length_q, **limits)
        return out_THD.unflatten(0, (query.shape[0], query.shape[2])), None

    return attend


def _decoder_arguments(model: Any, positions: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Arguments:
    arguments: Arguments = {"position_ids": positions, "use_cache": False}
    if cu_seqlens is not None and max_seqlen is not None:
        arguments |= {"cu_seq_lens_q": pad_cu_seqlens(cu_seqlens), "max_length_q": longest(max_seqlen)}
    return arguments


_DROPOUTS = ("attention_dropout", "attn_pdrop")
_LIMITS = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "logits_scaling", "logit_scale")
"""What bounds or scales attention and logits in some models, and that others of transformers would pass over."""


def _decoder(*limits: str, never: Sequence[str] = (), **options: Any) -> Family:
    """Return a family that honours these `_LIMITS`, and has no form of the switches in `never`."""

    def refusal(config: PretrainedConfig) -> str | None:
        for name in _DROPOUTS:
            if getattr(config, name, 0.0):
                return f"{name} is {getattr(config, name)}, and attention here has no dropout; set it to 0"
        for name in ("use_bidirectional_attention", *never):
            if getattr(config, name, False):
                return f"{name} is set, and attention here has only the causal form; set it to false"
        if getattr(config, "router_jitter_noise", 0.0):
            return f"router_jitter_noise is {config.router_jitter_noise}, and routers here have no noise; set it to 0"
        for name in _LIMITS:
            if name not in limits and getattr(config, name, None) is not None:
                return f"{name} is {getattr(config, name)}, which its model in transformers does not apply; remove it"
        return None

    return Family(
        construct=_construct_decoder, sequence_arguments=_decoder_arguments, config_refusal=refusal, **options
    )


_WINDOW, _SCORE_CAP, _LOGIT_CAP = _LIMITS[:3]

# Which experts a token goes to is data, around which torch.compile would cut its graphs.
_EXPERTS: dict[str, Any] = {"balances_experts": True, "compiles": False}

HF_FAMILIES: dict[str, Family] = {
    "gemma2": _decoder(_WINDOW, _SCORE_CAP, _LOGIT_CAP),
    "gemma3_text": _decoder(_WINDOW, _LOGIT_CAP),
    "gpt2": _decoder(never=("add_cross_attention", "reorder_and_upcast_attn"), learned_positions="n_positions"),
    "llama": _decoder(),
    "mistral": _decoder(_WINDOW),
    "mixtral": _decoder(_WINDOW, **_EXPERTS),
    "olmo2": _decoder(),
    "olmoe": _decoder(_WINDOW, **_EXPERTS),
    "qwen2": _decoder(_WINDOW),
    "qwen3": _decoder(_WINDOW),
    "qwen3_moe": _decoder(_WINDOW, **_EXPERTS),
}
