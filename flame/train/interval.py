"""The time between two logged steps: training, waits for data, and what saving took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The steps since the last logged one. `num_tokens` and `flops` are those of all ranks; waits are this rank's."""

    num_steps: int
    seconds: float
    wait_seconds: float
    num_tokens: int
    flops: int | None


@dataclass(frozen=True, kw_only=True)
class SaveTimes:
    """What saving took since the last logged step: the last save that became whole, and what training stood still."""

    save_seconds: float | None = None
    stalled_seconds: float = 0.0


class IntervalClock:
    """Times the steps between two logged ones, without what is no training (validation, saving)."""

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._began = time.perf_counter()
        self._num_steps = 0
        self._num_tokens = 0
        self._wait_seconds = 0.0
        self._flops: int | None = 0

    def count_step(self, *, num_tokens: int, wait_seconds: float, flops: int | None) -> None:
        """Count one step of `num_tokens` tokens and `flops` operations, over all ranks."""
        self._num_steps += 1
        self._num_tokens += num_tokens
        self._wait_seconds += wait_seconds
        self._flops = None if flops is None or self._flops is None else self._flops + flops

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time spent in the block out of the interval."""
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began

    def next_interval(self) -> Interval:
        """Return the interval that ends here, and begin the next one."""
        interval = Interval(
            num_steps=self._num_steps,
            seconds=time.perf_counter() - self._began,
            wait_seconds=self._wait_seconds,
            num_tokens=self._num_tokens,
            flops=self._flops,
        )
        self._restart()
        return interval
