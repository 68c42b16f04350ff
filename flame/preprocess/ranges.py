"""Shares of a plan's tasks, `i/n`, for the processes of an array job; and which of them lack tasks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flame.errors import UsageError

SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class TaskRange:
    """The `index`-th of `count` shares, counted from 0: consecutive tasks, as many as the others', give or take one."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def tasks(self, num_tasks: int) -> range:
        """Return the tasks of the share; empty where there are fewer tasks than shares."""
        return range(self.index * num_tasks // self.count, (self.index + 1) * num_tasks // self.count)


def parse_range(text: str) -> TaskRange:
    """Return the share that `i/n` names; `UsageError` unless 0 ≤ i < n."""
    index, slash, count = text.strip().partition("/")
    expected = "i/n with 0 ≤ i < n: of four shares the first is 0/4, the last 3/4 (sbatch --array=0-3)"
    if not slash or not index.isascii() or not index.isdigit() or not count.isascii() or not count.isdigit():
        raise UsageError("it is no share of an array job", expected=expected)
    found = TaskRange(index=int(index), count=int(count))
    if found.count == 0 or found.index >= found.count:
        raise UsageError(f"{found.count} shares are counted from 0 and end before {found.count}", expected=expected)
    return found


def stretches(numbers: Iterable[int]) -> str:
    """Return numbers in words: `3 to 5, 9`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == last else f"{first} to {last}" for first, last in runs[:SHOWN]]
    return ", ".join(words) + (f" and {len(runs) - SHOWN} more stretches" if len(runs) > SHOWN else "")


def unfinished(missing: Iterable[int], num_tasks: int, count: int) -> list[TaskRange]:
    """Return which of `count` shares have tasks among `missing`."""
    lacking = {((task + 1) * count - 1) // num_tasks for task in missing}
    return [TaskRange(index=index, count=count) for index in sorted(lacking)]
