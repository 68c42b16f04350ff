"""Where a run stands in its data, and what the rest of it draws: exact counts of windows, from the sampler alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flame.sampling.plan import Repeated, refuse_repeats
from flame.sampling.sampler import Sampler

_SOURCES_TOLD = 12  # in words; status.json has them all


@dataclass(frozen=True, kw_only=True)
class SourcePosition:
    """Where one source stands: `percent` of its `epoch` (from 0) is consumed; `final_epochs` are those at the end."""

    consumed_samples: int
    consumed_tokens: int
    epoch: int
    percent: float
    remaining_tokens: int
    final_epochs: float


@dataclass(frozen=True, kw_only=True)
class DataPosition:
    """Where a run stands in its data segment; `stage` (from 0) is that of the next sample, `sources` go by name."""

    data_segment: int
    stage: int
    num_stages: int
    consumed_samples: int
    consumed_tokens: int
    remaining_samples: int
    remaining_tokens: int
    sources: dict[str, SourcePosition]

    def to_json(self) -> dict[str, Any]:
        """Return what status.json says of it."""
        return asdict(self)

    def __str__(self) -> str:
        segment = f"data segment {self.data_segment}, " if self.data_segment else ""
        stage = f"stage {self.stage} (the last is {self.num_stages - 1}), " if self.num_stages > 1 else ""
        parts = [
            f"{name} epoch {source.epoch}, {source.percent:.2f}% (in the end {source.final_epochs:.3f} epochs)"
            for name, source in self.sources.items()
            if source.consumed_tokens or source.remaining_tokens
        ]
        others = len(parts) - _SOURCES_TOLD
        told = "; ".join(parts[:_SOURCES_TOLD]) + (f"; {others} more sources: see status.json" if others > 0 else "")
        return (
            f"{segment}{stage}{self.consumed_samples:,} samples ({self.consumed_tokens:,} tokens) consumed, "
            f"{self.remaining_tokens:,} tokens to come; {told}"
        )


def data_position(sampler: Sampler, *, consumed_samples: int, last_sample: int, data_segment: int) -> DataPosition:
    """Return where a run stands that has consumed some samples, and ends before `last_sample`. Cost: milliseconds."""
    last_sample = max(last_sample, consumed_samples)
    window_len, mixture = sampler.window_len, sampler.mixture
    now, then = (sampler.counts(k).tolist() for k in (consumed_samples, last_sample))
    sources = {
        source.name: SourcePosition(
            consumed_samples=drawn,
            consumed_tokens=drawn * window_len,
            epoch=drawn // max(1, windows),
            percent=round(100 * (drawn % max(1, windows)) / max(1, windows), 4),
            remaining_tokens=(drawn_then - drawn) * window_len,
            final_epochs=round(drawn_then / max(1, windows), 6),
        )
        for source, drawn, drawn_then, windows in zip(mixture.sources, now, then, sampler.num_windows, strict=True)
    }
    return DataPosition(
        data_segment=data_segment,
        stage=sampler.stage_at(consumed_samples),
        num_stages=len(mixture.stages),
        consumed_samples=consumed_samples,
        consumed_tokens=consumed_samples * window_len,
        remaining_samples=last_sample - consumed_samples,
        remaining_tokens=(last_sample - consumed_samples) * window_len,
        sources=sources,
    )


def check_windows_drawn(sampler: Sampler, last_sample: int) -> None:
    """Raise `MixtureError` if a run that ends before `last_sample` draws more windows of a source than its cap allows.

    Exact, where `plan.check_epochs` reckons with shares of tokens: a manifest alone does not say window_len.
    """
    over: list[Repeated] = []
    firsts: list[int] = []
    counts = sampler.counts(last_sample).tolist()
    for i, (source, drawn, windows) in enumerate(
        zip(sampler.mixture.sources, counts, sampler.num_windows, strict=True)
    ):
        if source.max_epochs is not None and windows and drawn > source.max_epochs * windows:
            over.append(Repeated(name=source.name, epochs=drawn / windows, max_epochs=source.max_epochs))
            firsts += sampler.samples_of(i, np.array([int(source.max_epochs * windows)])).tolist()
    if over:
        refuse_repeats(over, last_sample * sampler.window_len, most_tokens=min(firsts) * sampler.window_len)
