"""How much of a step is communication, as a Chrome trace tells it, and how much of that nothing else hides."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Span = tuple[float, float]
"""From when to when."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Of one rank's step, in microseconds. `communication` counts its waiting for other ranks too.

    `exposed` is the part of it during which the rank computes nothing; `step` goes from the first piece of work to the
    last.
    """

    step: float
    communication: float
    exposed: float

    @property
    def communication_share(self) -> float:
        return self.communication / self.step if self.step else 0.0

    @property
    def exposed_share(self) -> float:
        return self.exposed / self.step if self.step else 0.0


def read_overlap(trace: Path) -> Overlap:
    """Return the overlap of a trace file that `profiling.enable_profiling` wrote."""
    return overlap_of(json.loads(trace.read_bytes())["traceEvents"])


def overlap_of(events: Iterable[Mapping[str, Any]]) -> Overlap:
    """Return the overlap of a trace's events.

    Where there are kernels of a device, communication is NCCL's, and work is every other kernel. On a CPU it is what
    gloo's threads do, and work is the operators of the others; those that only hand a collective over, or hold others,
    are none.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in complete if event.get("cat") == "kernel"]
    if kernels:
        communication = [_span(event) for event in kernels if event["name"].startswith("nccl")]
        work = [_span(event) for event in kernels if not event["name"].startswith("nccl")]
    else:
        communication = [_span(event) for event in complete if event["name"].startswith("gloo:")]
        work = [_span(event) for event in complete if event.get("cat") == "cpu_op" and _computes(event["name"])]
    communication, work = joined(communication), joined(work)
    both = joined([*communication, *work])
    return Overlap(
        step=both[-1][1] - both[0][0] if both else 0.0,
        communication=_length(communication),
        exposed=_length(both) - _length(work),
    )


def joined(spans: Sequence[Span]) -> list[Span]:
    """Return spans that cover the same time, in order, none touching another."""
    result: list[Span] = []
    for start, stop in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


def _length(apart: Sequence[Span]) -> float:
    return sum(stop - start for start, stop in apart)


def _span(event: Mapping[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))


def _computes(operator: str) -> bool:
    """Tell whether an operator computes itself: names of autograd's nodes hold whole hooks, with their waits."""
    return "::" in operator and not operator.startswith(("c10d::", "_c10d_functional::", "autograd::"))
