"""Updates that are skipped: told by the device, and counted without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor

from flame.errors import TrainingError

MAX_SKIPPED_IN_A_ROW = 100


class Skip:
    """Whether a step's update was skipped: a known answer, or a number on a device, 1 for yes.

    The number is copied to the host as soon as the device has it, whatever is queued behind.
    """

    def __init__(self, answer: bool | Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        self._answer = answer
        if isinstance(answer, Tensor) and answer.is_cuda:
            self._answer = answer.to("cpu", non_blocking=True)  # pinned memory, by torch
            self._done = torch.cuda.current_stream(answer.device).record_event()

    def read(self) -> bool:
        """Return the answer; waits for the device to have come as far as the update."""
        if self._done is not None:
            self._done.synchronize()
        return bool(self._answer)


class SkippedSteps:
    """How many updates were skipped, those of earlier processes included.

    A step's skip is read once the next step is queued, so that the device always has work; or when `total` is asked
    for.
    """

    def __init__(self, before: int) -> None:
        self._total, self._in_a_row = before, 0
        self._unread: tuple[int, Skip] | None = None

    def add(self, step: int, skip: Skip) -> None:
        """Take a step's skip, and count that of the step before it; raises as `total` does."""
        self.total()
        self._unread = step, skip

    def total(self) -> int:
        """Return the number of skips up to the last step; `TrainingError` for a run that only skips."""
        if self._unread is not None:
            (step, skip), self._unread = self._unread, None
            self._count(step, skipped=skip.read())
        return self._total

    def _count(self, step: int, *, skipped: bool) -> None:
        self._total += skipped
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingError(
                f"{self._in_a_row} updates in a row were skipped",
                where=f"step {step}",
                fix="Lower optimizer.lr, lengthen the warm-up, or look at the data with flame-mix samples",
            )
