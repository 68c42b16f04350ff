"""How samples become rows, micro-batches and steps: which of them a rank sees (docs/design.md, 5.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flame.errors import UsageError


def default_window_len(seq_len: int, context_len: int, *, varlen: bool) -> int:
    """Return a new run's window: with varlen the smallest divisor of seq_len of at least max(context_len, 8192)."""
    if not varlen:
        return seq_len
    least = max(context_len, 8192)
    return next((length for length in range(least, seq_len) if seq_len % length == 0), seq_len)


@dataclass(frozen=True, kw_only=True)
class BatchGeometry:
    """How samples become rows, micro-batches and steps (docs/design.md, 5.1). Lengths in tokens.

    `context_len` is the longest sequence; a window is never longer than a row, and a sequence never longer than a
    window. Raises `UsageError`, naming the option, for what does not fit together.
    """

    seq_len: int
    window_len: int
    context_len: int
    micro_batch: int
    accumulation: int
    dp_size: int
    varlen: bool

    def __post_init__(self) -> None:
        for name, value in (
            ("training.seq_len", self.seq_len),
            ("training.window_len", self.window_len),
            ("training.context_len", self.context_len),
            ("training.batch_size", self.micro_batch),
            ("training.gradient_accumulation_steps", self.accumulation),
        ):
            if value < 1:
                raise UsageError(f"{name} cannot be {value}", expected="1 or more")
        assert self.dp_size >= 1, "a world has a rank"
        if self.seq_len % self.window_len:
            raise UsageError(
                "training.window_len must divide training.seq_len",
                got=f"window_len {self.window_len}, seq_len {self.seq_len}",
                fix="A resumed run keeps its window_len: choose a seq_len that is a multiple of it",
            )
        if self.context_len > self.seq_len:
            raise UsageError(
                "training.context_len is the longest sequence, and cannot be longer than a row",
                got=f"context_len {self.context_len}, seq_len {self.seq_len}",
            )
        if self.varlen:
            return
        if self.window_len != self.seq_len:
            raise UsageError(
                "without training.varlen a row is one window",
                got=f"window_len {self.window_len}, seq_len {self.seq_len}",
                expected="window_len equal to seq_len",
                fix="Leave training.window_len away, or add --training.varlen",
            )
        if self.context_len != self.seq_len:
            raise UsageError(
                "without training.varlen nothing cuts a row: context_len must be seq_len",
                got=f"context_len {self.context_len}, seq_len {self.seq_len}",
                fix="Leave training.context_len away, or add --training.varlen",
            )

    @property
    def windows_per_row(self) -> int:
        return self.seq_len // self.window_len

    @property
    def samples_per_step(self) -> int:
        return self.micro_batch * self.accumulation * self.dp_size * self.windows_per_row

    @property
    def tokens_per_step(self) -> int:
        return self.samples_per_step * self.window_len


def sample_indices(geometry: BatchGeometry, consumed_samples: int, dp_rank: int) -> NDArray[np.int64]:
    """Return the samples that one rank sees in a step: `[accumulation, micro_batch, windows_per_row]`."""
    g = geometry
    step = np.arange(g.samples_per_step, dtype=np.int64) + consumed_samples
    return step.reshape(g.accumulation, g.dp_size, g.micro_batch, g.windows_per_row)[:, dp_rank]
