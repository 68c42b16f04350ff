"""The update of a step: the gradients' norm, clipping, and the optimizer, after backward or in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Adam, Optimizer

from flame.train.optimizer import JoinedOptimizer, clip_and_scale
from flame.train.skips import Skip


class Update(Protocol):
    """What a step does around its backwards."""

    def begin(self, num_labels: int) -> None:
        """Prepare for the backwards of a step whose global batch has so many labels."""

    def finish(self) -> tuple[Tensor, Skip]:
        """Return the norm of the step's gradient (see `clip_and_scale`), and whether the update was skipped.

        No parameter has a gradient any more.
        """


class UpdateAfterBackward:
    """Clips the whole gradient, then updates all weights.

    An update is skipped that no label asks for and, with `skip_not_finite`, one whose gradient is not finite on any
    rank: by the device itself where the optimizer is a fused Adam; else Python looks at the norm, and the device waits
    meanwhile. `before_update` is called before weights change.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        *,
        max_norm: float,
        skip_not_finite: bool,
        before_update: Callable[[], None],
    ) -> None:
        self._optimizer, self._parameters, self._max_norm = optimizer, parameters, max_norm
        self._skip_not_finite, self._before_update = skip_not_finite, before_update
        # Of the others, ShardedSGD passes no found_inf on, and Muon's kernels know none.
        self._skips_on_device = isinstance(optimizer, Adam) and optimizer.defaults["fused"]
        self._num_labels = 0

    def begin(self, num_labels: int) -> None:
        self._num_labels = num_labels

    def finish(self) -> tuple[Tensor, Skip]:
        norm = clip_and_scale(self._parameters, 1.0 / max(self._num_labels, 1), self._max_norm)
        self._before_update()
        skip = self._update(norm)
        self._optimizer.zero_grad(set_to_none=True)
        return norm, skip

    def _update(self, norm: Tensor) -> Skip:
        if self._num_labels == 0:
            return Skip(True)
        if not self._skip_not_finite:
            self._optimizer.step()
            return Skip(False)
        not_finite = torch.isfinite(norm).logical_not().float()
        skip = Skip(not_finite)
        if self._skips_on_device:
            self._optimizer.found_inf = not_finite  # type: ignore[attr-defined]  # as torch.amp.GradScaler tells it
            self._optimizer.step()
        elif not skip.read():
            self._optimizer.step()
        return skip


class UpdateInBackward:
    """Updates each weight as soon as its gradient is there, and frees the gradient: the step's one backward does it.

    So nothing can depend on the whole gradient; its norm is only told. `optimizer` has a member for each parameter.
    """

    def __init__(self, optimizer: JoinedOptimizer, *, before_update: Callable[[], None]) -> None:
        self._before_update = before_update
        self._num_labels = 0
        self._norms: list[Tensor] = []
        for member in optimizer.members:
            (group,) = member.param_groups
            (parameter,) = group["params"]
            parameter.register_post_accumulate_grad_hook(partial(self._update, member))

    def begin(self, num_labels: int) -> None:
        self._num_labels = num_labels
        self._before_update()

    @torch.no_grad()
    def _update(self, optimizer: Optimizer, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None, "it has just been accumulated"
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(1.0 / max(self._num_labels, 1))
        self._norms.append(torch.linalg.vector_norm(gradient))
        if self._num_labels:
            optimizer.step()
        parameter.grad = None

    def finish(self) -> tuple[Tensor, Skip]:
        norm = torch.linalg.vector_norm(torch.stack(self._norms))
        self._norms.clear()
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).float(), Skip(self._num_labels == 0)
