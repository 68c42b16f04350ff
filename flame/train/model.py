"""The model that is trained: a Hugging Face model, its head and the loss in one module."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from flame.errors import TrainingError
from flame.kernels.dispatch import choose_attention
from flame.kernels.linear_cross_entropy import linear_cross_entropy
from flame.train.families import GENERIC, Family, check_family, family_of
from flame.train.log import log

IGNORE_INDEX = -100


class CausalLMLoss(nn.Module):
    """A causal language model that returns its loss; FSDP wraps its blocks and then it.

    `model` is the Hugging Face model: checkpoints hold its own keys.
    """

    def __init__(self, model: PreTrainedModel, family: Family) -> None:
        super().__init__()
        self.model = model
        self.family = family

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (sum of the losses in nats, fp32 scalar; number of labels that are not −100, scalar).

        `input_ids`, `labels` and `positions` are integers `[B, T]`. With `cu_seqlens` B is 1, and the T tokens are
        sequences that do not see each other; `max_seqlen` is the longest. Nothing waits for the device.
        """
        arguments = self.family.sequence_arguments(self.model, positions, cu_seqlens, max_seqlen)
        if self.family.fused_loss:
            hidden_TD = self.model.base_model(input_ids=input_ids, **arguments)[0].flatten(0, 1)
            head = self.model.get_output_embeddings()
            loss_sum, num_labels, _ = linear_cross_entropy(hidden_TD, head.weight, labels.flatten(), head.bias)
            return loss_sum, num_labels
        logits_TV = self.model(input_ids=input_ids, **arguments).logits.flatten(0, 1)
        labels_T = labels.flatten().long()
        loss_sum = F.cross_entropy(logits_TV.float(), labels_T, ignore_index=IGNORE_INDEX, reduction="sum")
        return loss_sum, (labels_T != IGNORE_INDEX).sum()

    def blocks(self) -> list[nn.Module]:
        """Return the model's layers in order: the longest list of modules in it."""
        lists = [list(module) for module in self.model.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=len, default=[])


def build_model(
    config: PretrainedConfig,
    *,
    seed: int,
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
    varlen: bool,
    attention: str = "auto",
    deterministic: bool = False,
) -> CausalLMLoss:
    """Build a model from scratch: on rank 0 in CPU memory, in fp32, from `seed`; on the others on the meta device.

    So its weights do not depend on the number of ranks; `parallelize` sends them out. `device` and `dtype` are what it
    will compute on and in, `attention` a name in `flame.kernels.dispatch.ATTENTION` or "auto". Raises `UsageError` or
    `TrainingError` if it cannot be trained so. Leaves torch's random numbers re-seeded.
    """
    check_family(config, varlen=varlen, device=device)
    family = family_of(config)
    chosen = _choose_attention(
        attention, config, device=device, dtype=dtype, varlen=varlen, deterministic=deterministic
    )
    log.info(_described(config, family, chosen if varlen else "torch's own, causal over whole rows"))
    torch.manual_seed(seed)
    with torch.device("cpu" if rank == 0 else "meta"):
        model = family.construct(config, chosen)
    model.train()
    if family.fused_loss and model.get_output_embeddings() is None:
        raise TrainingError(f"a model of the type {config.model_type} has no output head to train")
    return CausalLMLoss(model, family)


def _choose_attention(
    requested: str,
    config: PretrainedConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    varlen: bool,
    deterministic: bool,
) -> str:
    if not varlen and requested == "auto":
        return "sdpa"
    return choose_attention(
        requested, device=device, dtype=dtype, head_dim=_head_dim(config), deterministic=deterministic
    )


def _head_dim(config: Any) -> int:
    """Return the width of an attention head; 0 where a model has none."""
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "num_heads", None)
    return getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)


def _described(config: PretrainedConfig, family: Family, attention: str) -> str:
    if family is GENERIC:
        return (
            f"model: {config.model_type}, by the generic path: its own logits and attention, plain cross entropy "
            "(all logits in memory)"
        )
    return f"model: {config.model_type}; attention: {attention}; loss: linear cross entropy, chunked"
