"""Where a run stands: the few numbers that a checkpoint holds beside its tensors."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class DataSegment:
    """A stretch of a run over one mixture; its sample 0 is the first sample of step `first_step`."""

    number: int
    mixture_fingerprint: str
    data_seed: int
    first_step: int


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Where a run stands: `step` updates were tried, `skipped_steps` of them left the weights alone.

    `consumed_samples` counts from the start of the last data segment and is the whole data state. `elapsed_seconds`
    is training time over all process starts.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_steps: int = 0
    elapsed_seconds: float = 0.0
    data_segments: tuple[DataSegment, ...] = ()

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode("utf-8")

    @classmethod
    def from_json(cls, data: bytes) -> TrainState:
        value = json.loads(data)
        segments = tuple(DataSegment(**segment) for segment in value.pop("data_segments"))
        return cls(**value, data_segments=segments)
