"""Muon for matrices whose rows lie on several ranks: torch's optimizer, but for how a whole matrix is come by.

Its step needs whole matrices: their momentum is made orthogonal, by Newton–Schulz iterations. So ranks that share
matrices by their rows exchange them. Each gets a whole one, another each, works on it, and gives the rows of the result
back: the ranks of one copy of the weights do no work twice, and the numbers are those of one process. What travels is
bf16, in which the iterations compute anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


class ShardedMuon(torch.optim.Muon):
    """`torch.optim.Muon` with its arguments, groups and state, also for DTensors that are sharded over their rows."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient. All ranks call it, with gradients for the same parameters."""
        assert closure is None, "training computes its losses before the step"
        for group in self.param_groups:
            self._step_group(group)

    def _step_group(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        directions = [_Rows.of(parameter, self._direction(parameter, group)) for parameter in parameters]
        lr, decay = group["lr"], group["weight_decay"]
        for parameter, update in zip(parameters, orthogonalize(directions, group), strict=True):
            own = _local(parameter)
            own.mul_(1 - lr * decay)
            own.add_(update.to(own.device), alpha=-lr * lr_adjustment(parameter.shape, group["adjust_lr_fn"]))

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Return this rank's rows of what is to be made orthogonal, after the gradient went into the momentum."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer, own = _local(state["momentum_buffer"]), _local(gradient)
        buffer.lerp_(own, 1 - group["momentum"])
        return own.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer


def lr_adjustment(shape: torch.Size, kind: str | None) -> float:
    """Return the factor on a matrix's learning rate.

    "match_rms_adamw": 0.2·√max(rows, columns), with which an update is as large as AdamW's usually are; "original":
    √max(1, rows / columns).
    """
    rows, columns = shape
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def newton_schulz(matrix: Tensor, *, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """Return about the nearest orthogonal matrix, in bf16: each step is X ← aX + (bA + cA²)X, where A = XXᵀ."""
    a, b, c = coefficients
    X = matrix.bfloat16()
    wide = X.size(0) <= X.size(1)
    if not wide:
        X = X.T
    X = X / X.norm().clamp(min=eps)
    for _ in range(num_steps):
        A = X @ X.T
        X = torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X if wide else X.T


class _Rows(NamedTuple):
    """This rank's rows of a matrix of `shape`, in bf16 where it is worked on; `group` has the ranks with the others."""

    own: Tensor
    shape: torch.Size
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, parameter: Tensor, own: Tensor) -> _Rows:
        if not isinstance(parameter, DTensor):
            return cls(own.bfloat16(), parameter.shape, None)
        mesh, group = parameter.device_mesh, None
        for dimension, placement in enumerate(parameter.placements):
            if placement.is_shard() and mesh.size(dimension) > 1:
                assert placement == Shard(0) and group is None, "matrices are sharded once, by their rows"
                group = mesh.get_group(dimension)
        return cls(own.to(mesh.device_type, torch.bfloat16), parameter.shape, group)

    def numel_of(self, rank: int, num_ranks: int) -> int:
        """Return how many numbers of the matrix `rank` of the group has: as many rows each as there are, rounded up."""
        rows = -(-self.shape[0] // num_ranks)
        return max(0, min(rows, self.shape[0] - rank * rows)) * self.shape[1]


def orthogonalize(matrices: Sequence[_Rows], group: dict[str, Any]) -> list[Tensor]:
    """Return this rank's rows of `newton_schulz` of every matrix, in order."""
    arguments: dict[str, Any] = {
        "coefficients": group["ns_coefficients"],
        "num_steps": group["ns_steps"],
        "eps": group["eps"],
    }
    results: dict[int, Tensor] = {}
    shared: dict[dist.ProcessGroup, list[int]] = {}
    for index, matrix in enumerate(matrices):
        if matrix.group is None:
            results[index] = newton_schulz(matrix.own, **arguments)
        else:
            shared.setdefault(matrix.group, []).append(index)
    for ranks, indices in shared.items():
        indices.sort(key=lambda index: -matrices[index].shape.numel())  # ranks then have about as much to do
        for start in range(0, len(indices), ranks.size()):
            chosen = indices[start : start + ranks.size()]
            rows = _exchanged([matrices[index] for index in chosen], ranks, arguments)
            results |= dict(zip(chosen, rows, strict=True))
    return [results[index] for index in range(len(matrices))]


def _exchanged(matrices: Sequence[_Rows], ranks: dist.ProcessGroup, arguments: dict[str, Any]) -> list[Tensor]:
    """Orthogonalize at most one matrix a rank: matrix i by rank i of the group."""
    num_ranks, rank = ranks.size(), ranks.rank()
    own = matrices[rank] if rank < len(matrices) else None
    here = [matrix.own.numel() for matrix in matrices] + [0] * (num_ranks - len(matrices))
    there = [0 if own is None else own.numel_of(other, num_ranks) for other in range(num_ranks)]
    flat = _all_to_all(torch.cat([matrix.own.flatten() for matrix in matrices]), here, there, ranks)
    if own is not None:
        flat = newton_schulz(flat.view(own.shape), **arguments).flatten()
    flat = _all_to_all(flat, there, here, ranks)
    pieces = flat.split(here)[: len(matrices)]
    return [piece.view(matrix.own.shape) for piece, matrix in zip(pieces, matrices, strict=True)]


def _all_to_all(flat: Tensor, sent: list[int], received: list[int], ranks: dist.ProcessGroup) -> Tensor:
    """Exchange pieces of so many bf16 numbers, as bytes, which every backend takes."""
    result = torch.empty(sum(received), dtype=flat.dtype, device=flat.device)
    width = flat.element_size()
    dist.all_to_all_single(
        result.view(torch.uint8),
        flat.contiguous().view(torch.uint8),
        [width * numel for numel in received],
        [width * numel for numel in sent],
        group=ranks,
    )
    return result


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
