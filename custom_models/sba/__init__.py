"""Stick-breaking attention under the model type `sba`: an example of a model of one's own, with a kernel of its own.

Where nothing else knows a configuration's model type, the packages in custom_models/ are imported, the one of that name
first, until one defines it. A package has to register its classes with transformers. The entry in `FAMILIES` is
optional: with it the model gets the fused loss and packed documents, without it its own logits and unpacked rows.

What `register_for_auto_class` is told of goes into every export with its code, so that the export loads where this
project is not: the other files of this folder import nothing but each other, torch, triton and transformers. The entry
in `MIXERS` is optional too: without it a run logs no MFU.
"""

from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from custom_models.sba.config_sba import SBAConfig
from custom_models.sba.modeling_sba import SBAAttention, SBAForCausalLM
from flame.train.families import FAMILIES
from flame.train.family import Arguments, Family, from_config
from flame.train.flops import MIXERS, AttentionLayer


def _construct(config: PretrainedConfig, attention: str) -> PreTrainedModel:
    return from_config(config)  # its attention is its own, whatever model.attention says


def _arguments(model: Any, positions: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Arguments:
    return {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}


def _operations(layer: Any) -> AttentionLayer:
    return AttentionLayer(width=layer.q_proj.out_features)  # two products for each pair, as of any attention


def _refusal(config: PretrainedConfig) -> str | None:
    if config.hidden_act not in ("silu", "swish"):
        return f"hidden_act is {config.hidden_act}, and only silu is available"
    return None


AutoConfig.register(SBAConfig.model_type, SBAConfig, exist_ok=True)
AutoModelForCausalLM.register(SBAConfig, SBAForCausalLM, exist_ok=True)
SBAConfig.register_for_auto_class()
SBAForCausalLM.register_for_auto_class("AutoModelForCausalLM")
MIXERS[SBAAttention.__name__] = _operations
FAMILIES[SBAConfig.model_type] = Family(
    construct=_construct,
    sequence_arguments=_arguments,
    config_refusal=_refusal,
    compiles=False,  # its kernel is compiled already, and on a CPU the documents' lengths would be graphs of their own
)
