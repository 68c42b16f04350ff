"""Optimizers, their parameter groups (what is decayed, with which learning rate), and the pass that clips gradients."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from flame.errors import UsageError
from flame.train.checkpoint_tensors import plain_name
from flame.train.muon import ShardedMuon
from flame.train.options import OptimizerOptions, lr_factors

_IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True, "foreach": False},
    "foreach": {"fused": False, "foreach": True},
    "for-loop": {"fused": False, "foreach": False},
}
Groups = list[dict[str, Any]]
"""What torch's optimizers take: parameters and what is theirs alone."""


class JoinedOptimizer(Optimizer):
    """Several optimizers as one: their groups in order, and one state by parameter, which all of them use."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        super().__init__([group for member in members for group in member.param_groups], {})
        self.members = tuple(members)
        for member in members:
            assert not member.state, "it is new"
            member.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "training computes its losses before the step"
        for member in self.members:
            member.step()


class ShardedSGD(torch.optim.SGD):
    """`torch.optim.SGD` on the rows that each rank has: its fused kernel knows no DTensors."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "training computes its losses before the step"
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            sgd(
                [_local(parameter) for parameter in parameters],
                [_local(parameter.grad) for parameter in parameters],
                [self._momentum(parameter, group) for parameter in parameters],
                **{name: group[name] for name in ("foreach", "fused", "lr", "momentum", "weight_decay")},
                **{name: group[name] for name in ("dampening", "nesterov", "maximize")},
            )

    def _momentum(self, parameter: Tensor, group: dict[str, Any]) -> Tensor | None:
        if group["momentum"] == 0:
            return None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        return _local(state["momentum_buffer"])


def _adamw(groups: Groups, options: OptimizerOptions, how: dict[str, Any]) -> Optimizer:
    return torch.optim.AdamW(groups, lr=options.lr, **_adam_arguments(options), **how)


def _adam(groups: Groups, options: OptimizerOptions, how: dict[str, Any]) -> Optimizer:
    return torch.optim.Adam(groups, lr=options.lr, **_adam_arguments(options), **how)


def _sgd(groups: Groups, options: OptimizerOptions, how: dict[str, Any]) -> Optimizer:
    return ShardedSGD(groups, lr=options.lr, momentum=options.beta1, **how)


def _muon(groups: Groups, options: OptimizerOptions, how: dict[str, Any]) -> Optimizer:
    """Muon for the matrices between embeddings and head, AdamW for everything else."""
    matrices = [group for group in groups if group["hidden_matrices"]]
    others = [group for group in groups if not group["hidden_matrices"]]
    members: list[Optimizer] = []
    if matrices:
        arguments: dict[str, Any] = {"momentum": options.muon_momentum, "adjust_lr_fn": options.muon_adjust_lr}
        members.append(ShardedMuon(matrices, lr=options.lr, **arguments))
    if others:
        members.append(_adamw(others, options, how))
    return JoinedOptimizer(members)


def _adam_arguments(options: OptimizerOptions) -> dict[str, Any]:
    return {"betas": (options.beta1, options.beta2), "eps": options.eps}


OPTIMIZERS: dict[str, Callable[[Groups, OptimizerOptions, dict[str, Any]], Optimizer]] = {
    "AdamW": _adamw,
    "Adam": _adam,
    "SGD": _sgd,
    "Muon": _muon,
}


def build_optimizer(model: nn.Module, options: OptimizerOptions, device: torch.device) -> Optimizer:
    """Return the optimizer of a model's parameters (fp32, sharded or not), which lie on `device`.

    With `early_step_in_backward` it is a `JoinedOptimizer` with a member for each parameter. Raises `UsageError` for a
    pattern of `lr_factors` that no parameter's name matches.
    """
    implementation = options.implementation or ("fused" if device.type == "cuda" else "foreach")
    how = _IMPLEMENTATIONS[implementation]
    groups = parameter_groups(model, options)
    build = OPTIMIZERS[options.name]
    if not options.early_step_in_backward:
        return build(groups, options, how)
    alone = [{**group, "params": [parameter]} for group in groups for parameter in group["params"]]
    return JoinedOptimizer([build([group], options, how) for group in alone])


def parameter_groups(model: nn.Module, options: OptimizerOptions) -> Groups:
    """Return the groups of parameters that are treated alike; none is empty.

    `name` is "decayed" or "not_decayed": vectors (norms, gates), biases and parameters marked `_no_weight_decay` are
    not decayed, unless `decay_all`. `lr_factor` is that of the last pattern of `lr_factors` that a parameter's name
    matches, else 1. `hidden_matrices` says whether Muon takes them: matrices that are neither such parameters, nor
    embeddings, nor the output head.
    """
    named = [(plain_name(name), parameter) for name, parameter in model.named_parameters()]
    factors = _lr_factors(options, [name for name, _ in named])
    ends = _embeddings_and_head(model)
    groups: dict[tuple[bool, float, bool], list[Tensor]] = {}
    for name, parameter in named:
        spared = parameter.ndim < 2 or name.endswith("bias") or getattr(parameter, "_no_weight_decay", False)
        hidden_matrix = parameter.ndim == 2 and not spared and id(parameter) not in ends
        key = (not spared or options.decay_all, factors[name], hidden_matrix and options.name == "Muon")
        groups.setdefault(key, []).append(parameter)
    return [
        {
            "params": groups[decayed, factor, hidden],
            "name": "decayed" if decayed else "not_decayed",
            "weight_decay": options.weight_decay if decayed else 0.0,
            "lr_factor": factor,
            "lr": options.lr * factor,
            "hidden_matrices": hidden,
        }
        for decayed, factor, hidden in sorted(groups, reverse=True)
    ]


def _lr_factors(options: OptimizerOptions, names: Sequence[str]) -> dict[str, float]:
    """Return the factor of every parameter."""
    factors = dict.fromkeys(names, 1.0)
    for pattern, factor in lr_factors(options.lr_factors):
        matched = [name for name in names if fnmatchcase(f".{name}.", f"*.{pattern}.*")]
        if not matched:
            parts = dict.fromkeys(part for name in names for part in name.split("."))
            near = difflib.get_close_matches(pattern, parts, n=1)
            raise UsageError(
                "--optimizer.lr_factors has a pattern that no parameter's name matches",
                got=pattern,
                expected=f"whole parts of a name such as {names[-1]}",
                fix=f"Did you mean {near[0]}?" if near else f"{pattern}* also matches longer parts",
            )
        factors |= dict.fromkeys(matched, factor)
    return factors


def _embeddings_and_head(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that turn tokens into vectors, and vectors into logits."""
    ends = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {id(parameter) for module in (*ends, head) if module is not None for parameter in module.parameters()}


def apply_hyperparameters(optimizer: Optimizer, options: OptimizerOptions, lr: float) -> None:
    """Set the step's learning rate and every other hyperparameter from the configuration: none is ever loaded."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
        group["weight_decay"] = 0.0 if group["name"] == "not_decayed" else options.weight_decay
        if "betas" in group:
            group["betas"], group["eps"] = (options.beta1, options.beta2), options.eps
        if "momentum" in group:
            group["momentum"] = options.muon_momentum if group["hidden_matrices"] else options.beta1
        if "adjust_lr_fn" in group:
            group["adjust_lr_fn"] = options.muon_adjust_lr


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
