"""Which samples a step of a run took: read from the run folder's record of its starts, without training code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flame.errors import FlameError, UsageError
from flame.sampling.mixture import Mixture, read_mixture

SEGMENTS = "segments.jsonl"


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One process start of a run: it went on after `step` (0: from the beginning), from `consumed_samples` on.

    Samples are counted from the start of the data segment `data_segment`, whose order `data_seed` decides.
    """

    step: int
    consumed_samples: int
    world_size: int
    dp_size: int
    micro_batch: int
    accumulation: int
    seq_len: int
    window_len: int
    samples_per_step: int
    mixture_fingerprint: str
    data_segment: int
    data_seed: int

    def samples_of(self, step: int) -> NDArray[np.int64]:
        """Return the samples of a step that this segment took: `[accumulation, dp_size, micro_batch, windows_per_row]`.

        The first index is the micro-step, the second the rank, the third the row.
        """
        assert step > self.step, "an earlier segment took it"
        first = self.consumed_samples + (step - self.step - 1) * self.samples_per_step
        windows_per_row = self.seq_len // self.window_len
        samples = np.arange(first, first + self.samples_per_step, dtype=np.int64)
        return samples.reshape(self.accumulation, self.dp_size, self.micro_batch, windows_per_row)


def mixture_name(fingerprint: str) -> str:
    """Return the name of the manifest that a run folder keeps of a mixture."""
    return f"mixture-{fingerprint}.json"


def read_segments(run: Path) -> list[Segment]:
    """Read a run's starts, in order. Raises `UsageError` where the folder holds no run."""
    path = run / SEGMENTS
    if not path.is_file():
        raise UsageError("the folder holds no run", got=run, expected=f"a run folder, with its {SEGMENTS}")
    whole = path.read_bytes().split(b"\n")[:-1]  # a line that a crash cut short ends without a newline
    try:
        return [_segment(json.loads(line)) for line in whole]
    except (ValueError, KeyError, TypeError) as error:
        raise FlameError(f"the record of the run's starts cannot be understood: {error!r}", where=path) from error


def _segment(value: Mapping[str, Any]) -> Segment:
    return Segment(**{field.name: value[field.name] for field in fields(Segment)})


def segment_of_step(segments: list[Segment], step: int) -> Segment:
    """Return the start that took `step`: the last one that began before it, for a resume takes back what came later."""
    if step < 1:
        raise UsageError("steps are numbered from 1", got=step)
    taken = [segment for segment in segments if segment.step < step]
    if not taken:
        raise UsageError("the run never took this step", got=step)
    return taken[-1]


def mixture_of_segment(run: Path, segment: Segment, overrides: Mapping[str, Path]) -> Mixture:
    """Return the mixture that a segment drew from, in the order of its data segment."""
    mixture = read_mixture(run / mixture_name(segment.mixture_fingerprint), overrides=overrides)
    return replace(mixture, data_seed=segment.data_seed)
