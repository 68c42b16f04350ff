"""One kind of model: how it is built, how packed documents reach its layers, and what of it is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

Arguments = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of model.

    `construct(config, attention)` builds it in fp32 on the current default device, with the named implementation of
    attention. `sequence_arguments(model, positions, cu_seqlens, max_seqlen)` are what its forward takes beside
    `input_ids`; `cu_seqlens` and `max_seqlen` are None where documents are not masked. `config_refusal(config)` says
    why a configuration cannot be trained here, or None; `packed_refusal` why packed documents cannot, or None.
    """

    construct: Callable[[PretrainedConfig, str], PreTrainedModel]
    sequence_arguments: Callable[[Any, Tensor, Tensor | None, int | None], Arguments]
    config_refusal: Callable[[PretrainedConfig], str | None]
    packed_refusal: str | None = None
    fused_loss: bool = True
    """Whether the loss is the linear cross entropy of the base model's last hidden states and the head."""
    compiles: bool = True
    traceable: Callable[[list[nn.Module]], str | None] | None = None
    """Gives blocks that are to be compiled the forms that a graph holds whole, or says why they stay as they are."""
    needs_cuda: bool = False
    from_fla: bool = False
    balances_experts: bool = False
    """Whether it is a mixture of experts, whose routers are asked to be even by `router_aux_loss_coef`."""
    learned_positions: str | None = None
    """The name in the configuration of how many positions have an embedding; None where any length can be seen."""
    norm_types: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What each `model.norm_type` sets in the configuration."""


def from_config(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Build a model in fp32; transformers writes into the configuration that it is given, so it gets a copy.

    A folder's own code runs only where its configuration already did, which `--model.trust_remote_code` allowed.
    """
    trusted = type(config).__module__.startswith("transformers_modules.")
    options |= {"dtype": torch.float32, "trust_remote_code": trusted}
    return AutoModelForCausalLM.from_config(deepcopy(config), **options)
