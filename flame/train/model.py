"""The model that is trained: a Hugging Face model, its head and the loss in one module."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from flame.errors import TrainingError
from flame.kernels.dispatch import choose_attention, choose_convolution, choose_loss
from flame.kernels.hopper_check import check_gated_backward, gated_heads, log_walks
from flame.kernels.linear_cross_entropy import linear_cross_entropy
from flame.train.experts import balance_loss
from flame.train.families import GENERIC, check_family, family_of
from flame.train.family import Family
from flame.train.log import log
from flame.train.model_config import construct_model

IGNORE_INDEX = -100


class ModelLosses(NamedTuple):
    """The sum of the losses in nats, the number of labels that are not −100, and each token's loss `[B·T]`.

    `loss_sum` is what is differentiated; `balance_sum` is `balance_loss` of a mixture of experts that is trained.
    """

    loss_sum: Tensor
    num_labels: Tensor
    token_losses: Tensor
    balance_sum: Tensor | None = None


class CausalLMLoss(nn.Module):
    """A causal language model that returns its loss; FSDP wraps its blocks and then it.

    `model` is the Hugging Face model: checkpoints hold its own keys.
    """

    def __init__(self, model: PreTrainedModel, family: Family, loss: str = "auto") -> None:
        """`loss` is a name in `flame.kernels.dispatch.LOSSES`, or "auto"."""
        super().__init__()
        self.model = model
        self.family = family
        self.loss = loss
        self.softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self.stay_gathered: list[nn.Module] = []
        """The parts whose weights are not freed between forward and backward; `parallelize` names them."""
        self.cuts_graphs = False
        """Whether attention leaves a compiled block's graph."""

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        window_len: int | None = None,
    ) -> ModelLosses:
        """Return the losses of a micro-batch.

        `input_ids`, `labels` and `positions` are integers `[B, T]`. With `cu_seqlens` B is 1, and the T tokens are
        sequences that do not see each other; `max_seqlen` is the longest. Nothing waits for the device.

        Of a mixture of experts in training the sum has the gradient of `balance_loss` too, in windows of `window_len`
        (a row, if None), times `router_aux_loss_coef`; its value is that of the cross entropy alone.
        """
        arguments = self.family.sequence_arguments(self.model, positions, cu_seqlens, max_seqlen)
        if self.family.fused_loss:
            balances = self.family.balances_experts and torch.is_grad_enabled()
            if balances:
                arguments["output_router_logits"] = True
            out = self.model.base_model(input_ids=input_ids, **arguments)
            head = self.model.get_output_embeddings()
            losses = linear_cross_entropy(
                out[0].flatten(0, 1),
                head.weight,
                labels.flatten(),
                head.bias,
                softcap=self.softcap,
                implementation=self.loss,
            )
            parts = ModelLosses(*losses)
            return self._balanced(parts, out.router_logits, labels, window_len) if balances else parts
        logits_TV = self.model(input_ids=input_ids, **arguments).logits.flatten(0, 1)
        labels_T = labels.flatten().long()
        losses_T = F.cross_entropy(logits_TV.float(), labels_T, ignore_index=IGNORE_INDEX, reduction="none")
        return ModelLosses(losses_T.sum(), (labels_T != IGNORE_INDEX).sum(), losses_T.detach())

    def _balanced(
        self, parts: ModelLosses, router_logits: tuple[Tensor, ...], labels: Tensor, window_len: int | None
    ) -> ModelLosses:
        config: Any = self.model.config
        if not router_logits:  # layers may all be dense
            return parts
        balance = balance_loss(
            router_logits,
            labels.flatten() != IGNORE_INDEX,
            top_k=config.num_experts_per_tok,
            window_len=window_len or labels.shape[-1],
        )
        parts = parts._replace(balance_sum=balance.detach())
        if not config.router_aux_loss_coef:
            return parts
        extra = config.router_aux_loss_coef * balance
        # adds 0 to the value, so that losses can be compared with those of other models and of validation
        return parts._replace(loss_sum=parts.loss_sum + (extra - extra.detach()))

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
    longest_sequence: int | None = None,
) -> CausalLMLoss:
    """Build a model from scratch: on rank 0 in CPU memory, in fp32, from `seed`; on the others on the meta device.

    So its weights do not depend on the number of ranks; `parallelize` sends them out. `device` and `dtype` are what it
    will compute on and in, `attention` a name in `flame.kernels.dispatch.ATTENTION` or "auto", `longest_sequence` as
    `check_family` takes it. Raises `UsageError` or `TrainingError` if it cannot be trained so. Leaves torch's random
    numbers re-seeded.
    """
    check_family(config, varlen=varlen, device=device, longest_sequence=longest_sequence)
    family = family_of(config)
    chosen = _choose_attention(
        attention, config, device=device, dtype=dtype, varlen=varlen, deterministic=deterministic
    )
    loss = choose_loss("auto", device=device, dtype=dtype)
    whole_rows = not varlen and not _limits_attention(config)
    log.info(_described(config, family, "torch's own, causal over whole rows" if whole_rows else chosen, loss))
    torch.manual_seed(seed)
    with torch.device("cpu" if rank == 0 else "meta"):
        model = construct_model(config, chosen)
    model.train()
    if family.from_fla:
        heads = gated_heads(model)
        log_walks(heads, device, dtype)
        check_gated_backward(heads, device, dtype)
    if any(hasattr(module, "is_short_convolution") for module in model.modules()):
        log.info("short convolutions: %s", choose_convolution("auto", device=device, dtype=dtype))
    if family.fused_loss and model.get_output_embeddings() is None:
        raise TrainingError(f"a model of the type {config.model_type} has no output head to train")
    module = CausalLMLoss(model, family, loss)
    attends = not family.from_fla or any(hasattr(part, "attend_packed") for part in model.modules())
    module.cuts_graphs = attends and chosen == "sdpa" and not whole_rows
    return module


def _choose_attention(
    requested: str,
    config: PretrainedConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    varlen: bool,
    deterministic: bool,
) -> str:
    if not varlen and requested == "auto" and not _limits_attention(config):
        return "sdpa"
    return choose_attention(
        requested,
        device=device,
        dtype=dtype,
        head_dim=_head_dim(config),
        deterministic=deterministic,
        softcap=_softcaps_attention(config),
    )


def _softcaps_attention(config: Any) -> bool:
    return getattr(config, "attn_logit_softcapping", None) is not None


def _limits_attention(config: Any) -> bool:
    """Tell whether attention may have a window or a soft cap, which torch's own does not know."""
    windows = (getattr(config, name, None) for name in ("sliding_window", "window_size", "attn"))
    return _softcaps_attention(config) or any(window is not None for window in windows)


def _head_dim(config: Any) -> int:
    """Return the width of an attention head; 0 where a model has none."""
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "num_heads", None)
    return getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)


def _described(config: PretrainedConfig, family: Family, attention: str, loss: str) -> str:
    if family is GENERIC:
        return (
            f"model: {config.model_type}, by the generic path: its own logits and attention, plain cross entropy "
            "(all logits in memory)"
        )
    experts = ""
    if family.balances_experts:
        coefficient = getattr(config, "router_aux_loss_coef", 0.0)
        experts = f"; experts are balanced by {coefficient} of their load balancing loss, logged apart"
    return f"model: {config.model_type}; attention: {attention}; loss: linear cross entropy, chunked, {loss}{experts}"
