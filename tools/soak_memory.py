"""The memory of a soak's processes while they train: it must not grow with the steps.

Counted is anonymous memory (RssAnon): the mapped pages of a corpus are the page cache's, which takes what is free.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

_KIB_IN_MIB = 1 << 10


class MemoryWatch:
    """What a process and all that it started held, look by look."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._samples: dict[int, list[tuple[int, int]]] = {}  # of each process: (step, KiB)

    def look(self, step: int) -> None:
        """Note what every process holds; `step` is the last that is logged."""
        for pid in _family(self._pid):
            kib = _anonymous_kib(pid)
            if kib is not None:
                self._samples.setdefault(pid, []).append((step, kib))

    def early_and_late(self, steps: int) -> list[tuple[float, float]]:
        """Return, in MiB, a pair a process: the median of the second quarter of the steps, and of the last quarter."""
        found = []
        for samples in self._samples.values():
            early = [kib for step, kib in samples if steps // 4 <= step < steps // 2]
            late = [kib for step, kib in samples if 3 * steps // 4 <= step < steps]
            if early and late:
                found.append((median(early) / _KIB_IN_MIB, median(late) / _KIB_IN_MIB))
        return found


def _family(pid: int) -> list[int]:
    """Return a process and its descendants; those that are gone are left out."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(word) for thread in threads for word in (thread / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *(member for child in children for member in _family(child))]


def _anonymous_kib(pid: int) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), None)
