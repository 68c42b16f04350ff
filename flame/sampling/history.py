"""Which samples a step of a run took: read from the run folder's own records, without training code."""

from __future__ import annotations

import contextlib
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flame.errors import FlameError, UsageError
from flame.sampling.mixture import Mixture
from flame.sampling.mixture_file import read_mixture

SEGMENTS = "segments.jsonl"
CONFIG = "config.toml"
STATUS = "status.json"
METRICS = "metrics.jsonl"
_TAIL_BYTES = 2**16  # of metrics.jsonl: some lines


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

    @property
    def order(self) -> tuple[str, int, int]:
        """What decides which tokens a sample is: mixture fingerprint, data seed, window_len."""
        return self.mixture_fingerprint, self.data_seed, self.window_len

    def first_sample_of(self, step: int) -> int:
        """Return the first sample of a step that this segment took; of the step after its last one, where it ended."""
        assert step > self.step, "an earlier segment took it"
        return self.consumed_samples + (step - self.step - 1) * self.samples_per_step

    def samples_of(self, step: int) -> NDArray[np.int64]:
        """Return the samples of a step that this segment took: `[accumulation, dp_size, micro_batch, windows_per_row]`.

        The first index is the micro-step, the second the rank, the third the row.
        """
        first = self.first_sample_of(step)
        windows_per_row = self.seq_len // self.window_len
        samples = np.arange(first, first + self.samples_per_step, dtype=np.int64)
        return samples.reshape(self.accumulation, self.dp_size, self.micro_batch, windows_per_row)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """The steps `[first_step, stop_step)` that a segment took, and that no later one took back."""

    segment: Segment
    first_step: int
    stop_step: int

    @property
    def samples(self) -> range:
        """The samples of these steps, within their data segment."""
        return range(self.segment.first_sample_of(self.first_step), self.segment.first_sample_of(self.stop_step))


def first_step(segments: list[Segment]) -> int:
    """Return the first step that the record tells of: 1, but for a run that began from another's checkpoint."""
    return min((segment.step for segment in segments), default=0) + 1


def stretches_of(segments: list[Segment], steps: range) -> list[Stretch]:
    """Return who took each of `steps`, in order. Raises as `segment_of_step` does for the first of them."""
    found: list[Stretch] = []
    stop = steps.stop
    for segment in reversed(segments):
        first = max(segment.step + 1, steps.start)
        if first < stop:
            found.append(Stretch(segment=segment, first_step=first, stop_step=stop))
            stop = first
    if stop > steps.start:
        segment_of_step(segments, steps.start)  # says what the record lacks
    return found[::-1]


def mixture_name(fingerprint: str) -> str:
    """Return the name of the manifest that a run folder keeps of a mixture."""
    return f"mixture-{fingerprint}.json"


def read_segments(run: Path) -> list[Segment]:
    """Read a run's starts, in order. Raises `UsageError` where the folder holds no run, `FlameError` for damage."""
    path = run / SEGMENTS
    if not path.is_file():
        raise UsageError("the folder holds no run", got=run, expected=f"a run folder, with its {SEGMENTS}")
    segments = []
    for number, value in enumerate(read_starts(path), start=1):
        try:
            segments.append(_segment(value))
        except (KeyError, ValueError) as error:
            raise _not_understood(path, number, error) from error
    return segments


def read_starts(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a segments.jsonl, in order, without a last line that a crash cut short.

    Raises `FlameError`, naming the line, for any other line that is no JSON object.
    """
    *whole, last = path.read_bytes().split(b"\n")
    starts = []
    for number, line in enumerate(whole, start=1):
        if line.strip():
            try:
                starts.append(_object(line))
            except ValueError as error:
                raise _not_understood(path, number, error) from error
    if is_whole_line(last):
        starts.append(_object(last))
    return starts


def is_whole_line(line: bytes) -> bool:
    """Tell whether a line without its newline is all there: an object that was cut short has no closing brace."""
    try:
        return bool(_object(line))
    except ValueError:
        return False


def _object(line: bytes) -> dict[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def _not_understood(path: Path, number: int, error: Exception) -> FlameError:
    detail = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return FlameError(
        f"the record of the run's starts cannot be understood: {detail}",
        where=f"{path}, line {number}",
        fix="Restore the file from a copy, or delete this line: the steps of that start can then not be traced",
    )


def _segment(value: Mapping[str, Any]) -> Segment:
    segment = Segment(**{field.name: value[field.name] for field in fields(Segment)})
    for field in fields(Segment):
        given = getattr(segment, field.name)
        least = 0 if field.name in ("step", "consumed_samples", "data_segment", "data_seed") else 1
        if field.name == "mixture_fingerprint":
            if not isinstance(given, str) or "/" in given:
                raise ValueError(f"{field.name} is {given!r}")
        elif type(given) is not int or given < least:
            raise ValueError(f"{field.name} is {given!r}")
    rows, left = segment.micro_batch * segment.accumulation * segment.dp_size, segment.seq_len % segment.window_len
    if left or segment.samples_per_step != rows * (segment.seq_len // segment.window_len):
        raise ValueError(f"samples_per_step is {segment.samples_per_step}, which batch, ranks and lengths do not give")
    return segment


def check_taken(run: Path, step: int) -> None:
    """Raise `FlameError` for a step that the run's records end before: nothing is told of what no rank saw.

    Not every step is logged: a run that has not ended well may have come up to the next one that would be.
    """
    last = latest_step(run)
    unlogged = 0 if _read_object(run / STATUS).get("state") in ("finished", "preempted") else _log_freq(run)
    if step > last + unlogged:
        raise FlameError(
            "the run has not taken this step",
            where=run,
            got=step,
            expected=f"1 to {last}",
            fix="What is still to come is listed by: flame-mix samples",
        )


def latest_step(run: Path) -> int:
    """Return the last step that the run is known to have taken: the last of its status or its logged steps; 0: none."""
    return max(_last_logged(run), _number(_read_object(run / STATUS), "step"))


def read_logged(path: Path, *, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Return the whole lines of a metrics.jsonl, in order, of its end only if `last_bytes` says so; [] if absent."""
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        file.seek(0 if last_bytes is None else max(0, path.stat().st_size - last_bytes), os.SEEK_SET)
        lines = file.read().split(b"\n")
    return [_object(line) for line in lines if is_whole_line(line)]


def _last_logged(run: Path) -> int:
    """Return the last step of metrics.jsonl, 0 where there is none."""
    return max((_number(line, "step") for line in read_logged(run / METRICS, last_bytes=_TAIL_BYTES)), default=0)


def _log_freq(run: Path) -> int:
    try:
        return _number(tomllib.loads((run / CONFIG).read_text("utf-8")).get("metrics", {}), "log_freq")
    except (OSError, ValueError, AttributeError):
        return 0


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return _object(path.read_bytes())
    except (OSError, ValueError):
        return {}


def _number(value: Mapping[str, Any], name: str) -> int:
    found = value.get(name)
    return found if isinstance(found, int) else 0


def segment_of_step(segments: list[Segment], step: int) -> Segment:
    """Return the start that took `step`: the last one that began before it, for a resume takes back what came later."""
    if step < 1:
        raise UsageError("steps are numbered from 1", got=step)
    taken = [segment for segment in segments if segment.step < step]
    if not taken:
        raise FlameError(
            f"the run's record, {SEGMENTS}, does not say how this step was taken",
            got=step,
            expected=f"steps after {min(segment.step for segment in segments)}" if segments else None,
        )
    return taken[-1]


def consumed_of_run(run: Path) -> tuple[int, int]:
    """Return (step, tokens of its data segment that were consumed by then): where the run stands, as far as is known.

    A running one has a status.json that tells where it began, and logs its steps.
    """
    step = latest_step(run)
    segments = read_segments(run)
    if step == 0 or not segments:
        return 0, 0
    segment = segment_of_step(segments, step)
    samples = segment.consumed_samples + (step - segment.step) * segment.samples_per_step
    return step, samples * segment.window_len


def _sources_of_others(run: Path, path: Path) -> set[str]:
    """Return the names of the sources of every other mixture that the run folder keeps, as far as they can be read."""
    names: set[str] = set()
    for other in run.glob(mixture_name("*")):
        if other != path:
            with contextlib.suppress(FlameError):
                names.update(source.name for source in read_mixture(other).sources)
    return names


def mixture_of_segment(run: Path, segment: Segment, overrides: Mapping[str, Path]) -> Mixture:
    """Return the mixture that a segment drew from, in the order of its data segment.

    `overrides` may name sources of the run's other mixtures too. Raises `FlameError` where the manifest that the run
    folder keeps of it is lost or was edited.
    """
    path = run / mixture_name(segment.mixture_fingerprint)
    fix = "Restore it from a copy; a run that goes on with the same data writes it anew"
    if not path.is_file():
        raise FlameError("the run folder has lost the mixture that the step was drawn from", where=path, fix=fix)
    own = {source.name for source in read_mixture(path).sources}
    others = _sources_of_others(run, path) if overrides.keys() - own else set()
    mixture = read_mixture(
        path, overrides={name: at for name, at in overrides.items() if name in own or name not in others}
    )
    if mixture.fingerprint != segment.mixture_fingerprint:
        raise FlameError(
            "the run folder's mixture manifest was changed: the run drew from another",
            where=path,
            got=mixture.fingerprint,
            expected=segment.mixture_fingerprint,
            fix=fix,
        )
    return replace(mixture, data_seed=segment.data_seed)
