"""Optimizers, what they decay, and the one pass that scales and clips gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flame.train.options import OptimizerOptions

_IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True, "foreach": False},
    "foreach": {"fused": False, "foreach": True},
    "for-loop": {"fused": False, "foreach": False},
}


def _adamw(groups: list[dict[str, Any]], options: OptimizerOptions, how: dict[str, Any]) -> Optimizer:
    return torch.optim.AdamW(groups, lr=options.lr, **_adam_arguments(options), **how)


def _adam(groups: list[dict[str, Any]], options: OptimizerOptions, how: dict[str, Any]) -> Optimizer:
    return torch.optim.Adam(groups, lr=options.lr, **_adam_arguments(options), **how)


def _sgd(groups: list[dict[str, Any]], options: OptimizerOptions, how: dict[str, Any]) -> Optimizer:
    return torch.optim.SGD(groups, lr=options.lr, momentum=options.beta1, **how)


def _adam_arguments(options: OptimizerOptions) -> dict[str, Any]:
    return {"betas": (options.beta1, options.beta2), "eps": options.eps}


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]], OptimizerOptions, dict[str, Any]], Optimizer]] = {
    "AdamW": _adamw,
    "Adam": _adam,
    "SGD": _sgd,
}


def build_optimizer(model: nn.Module, options: OptimizerOptions, device: torch.device) -> Optimizer:
    """Return the optimizer of a model's parameters (fp32, sharded or not), in two groups: decayed, and not."""
    implementation = options.implementation or ("fused" if device.type == "cuda" else "foreach")
    groups = parameter_groups(model.named_parameters(), options)
    return OPTIMIZERS[options.name](groups, options, _IMPLEMENTATIONS[implementation])


def parameter_groups(named: Iterable[tuple[str, Tensor]], options: OptimizerOptions) -> list[dict[str, Any]]:
    """Return the groups `decayed` and `not_decayed` (those that are not empty).

    Vectors (norms, gates), biases and parameters marked `_no_weight_decay` are not decayed, unless `decay_all`.
    """
    decayed: list[Tensor] = []
    not_decayed: list[Tensor] = []
    for name, parameter in named:
        spared = parameter.ndim < 2 or name.endswith("bias") or getattr(parameter, "_no_weight_decay", False)
        (not_decayed if spared and not options.decay_all else decayed).append(parameter)
    groups = [
        {"params": decayed, "name": "decayed", "weight_decay": options.weight_decay},
        {"params": not_decayed, "name": "not_decayed", "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def apply_hyperparameters(optimizer: Optimizer, options: OptimizerOptions, lr: float) -> None:
    """Set the step's learning rate and every other hyperparameter from the configuration: none is ever loaded."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = 0.0 if group["name"] == "not_decayed" else options.weight_decay
        if "betas" in group:
            group["betas"], group["eps"] = (options.beta1, options.beta2), options.eps
        if "momentum" in group:
            group["momentum"] = options.beta1


@torch.no_grad()
def clip_and_scale(parameters: Sequence[Tensor], scale: float, max_norm: float | None) -> Tensor:
    """Multiply gradients by `scale`, and by as much again as brings their norm down to `max_norm`; one pass.

    Gradients are sums over the global batch's labels, `scale` one over their number. Returns the norm of the scaled
    gradients before clipping, an fp32 scalar that is equal on every rank. Nothing waits for the device.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert gradients, "a backward came before"
    norm = torch.nn.utils.get_total_norm(gradients, 2.0)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    norm = norm.float() * scale
    factor = torch.full_like(norm, scale)
    if max_norm is not None and math.isfinite(max_norm):
        factor = factor * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_([_local(gradient) for gradient in gradients], factor)
    return norm


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
