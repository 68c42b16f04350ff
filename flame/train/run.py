"""The run folder: what it was started with, where it stands, and every process start that it is made of.

    config.toml              the resolved configuration of the latest start
    status.json              where the run stands: the contract for schedulers and scripts
    segments.jsonl           a line a process start
    mixture-<fingerprint>.json   the manifest behind each data segment
    metrics.jsonl            a line a logged step; metrics.abandoned.jsonl: lines of steps that a resume took back
    checkpoint/  hf/         checkpoints, and the final export

Written by rank 0 only.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
import tomllib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from flame.errors import FlameError, TrainingError
from flame.files import append_line, canonical_json, write_bytes, write_json, write_text
from flame.sampling.history import (
    CONFIG,
    METRICS,
    SEGMENTS,
    STATUS,
    Segment,
    is_whole_line,
    mixture_name,
    read_starts,
)
from flame.sampling.mixture import Mixture
from flame.sampling.mixture_file import mixture_to_json
from flame.train.distributed import World, on_main, raise_together
from flame.train.log import log

State = Literal["running", "preempted", "finished", "failed"]
ABANDONED_METRICS = "metrics.abandoned.jsonl"

# Options that say how a run is watched and described, not what it computes.
_SURROUNDINGS = (
    "job.",
    "metrics.",
    "comm.",
    "profiling.",
    "checkpoint.",
    "validation.",
    "memory_estimation.",
    "training.source",
)
_VERSIONED = ("flame", "torch", "transformers", "flash-linear-attention", "triton", "numpy")


@dataclass(frozen=True, kw_only=True)
class SegmentEntry:
    """A segment's place in its run: its number, from 0, and the run's name, which never changes."""

    number: int
    run_id: str


def check_start(run: Path, config: Mapping[str, Any], *, resuming: bool) -> None:
    """Refuse to start from step 0 in a folder whose run could not be told from the new one afterwards.

    `config` is the flattened resolved configuration. Allowed: a resume; an empty folder; and the same configuration
    again where the run died before its first checkpoint. Raises `TrainingError` otherwise.
    """
    if resuming or not _has_trained(run):
        return
    fix = "Choose another job.dump_folder, or delete this one if the run in it is of no more use"
    state = read_status(run).get("state")
    if state == "finished":
        raise TrainingError("the folder holds a finished run, and no checkpoint to go on from", where=run, fix=fix)
    changed = [name for name in changed_options(run / CONFIG, config) if not name.startswith(_SURROUNDINGS)]
    if changed:
        raise TrainingError(
            "the folder holds a run of another configuration, and no checkpoint of it to go on from",
            where=run,
            got="other values of " + ", ".join(changed),
            fix=fix,
        )
    log.warning("%s holds a run that died before its first checkpoint: it starts over, from step 0", run)


def _has_trained(run: Path) -> bool:
    metrics = run / METRICS
    return metrics.is_file() and metrics.stat().st_size > 0


def changed_options(config_toml: Path, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the options whose values differ between a saved config.toml and `config` (flattened): name → (old, new).

    An absent option and None are equal: TOML has no null.
    """
    if not config_toml.is_file():
        return {}
    try:
        saved = _flatten(tomllib.loads(config_toml.read_text("utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FlameError(f"a saved configuration cannot be read: {error}", where=config_toml) from error
    current = {name: _plain(value) for name, value in config.items()}
    names = sorted(saved.keys() | current.keys())
    return {name: (saved.get(name), current.get(name)) for name in names if saved.get(name) != current.get(name)}


def _flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _plain(value: Any) -> Any:
    """Return `value` as TOML gives it back."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def write_config(run: Path, config_toml: str) -> None:
    """Keep the resolved configuration of this start."""
    write_text(run / CONFIG, config_toml)


def keep_mixture(run: Path, mixture: Mixture) -> Path:
    """Keep the mixture that the run draws from, with where its corpora lie now; returns the manifest's path."""
    path = run / mixture_name(mixture.fingerprint)
    write_bytes(path, canonical_json(mixture_to_json(mixture, run)))
    return path


def append_segment(run: Path, segment: Segment, argv: Sequence[str]) -> SegmentEntry:
    """Add this process start to segments.jsonl; the run's id is that of its first segment, made there."""
    path = run / SEGMENTS
    earlier = read_starts(path) if path.is_file() else []
    _mend_last_line(path)
    ids = [start["run_id"] for start in earlier if isinstance(start.get("run_id"), str)]
    entry = SegmentEntry(number=len(earlier), run_id=ids[0] if ids else _new_id())
    line = {
        "time": _now(),
        "run_id": entry.run_id,
        **asdict(segment),
        "argv": list(argv),
        "versions": _versions(),
        "host": socket.gethostname(),
    }
    append_line(path, json.dumps(line, ensure_ascii=False), durable=True)
    return entry


def _new_id() -> str:
    """Return the id of a new run: wandb's own variable names it, so that there and here it is the same."""
    return os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex


def write_status(
    run: Path,
    state: State,
    *,
    step: int,
    checkpoint: Path | None = None,
    reason: str | None = None,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Say where the run stands, atomically.

    `checkpoint` is the latest complete one, told relative to the run folder; `data` is where it stands in its data.
    A failure to write is logged, never raised: it must neither stop a run nor hide why one failed.
    """
    name = None if checkpoint is None else _relative(checkpoint, run)
    status = {"state": state, "step": step, "checkpoint": name, "reason": reason, "time": _now()}
    try:
        write_json(run / STATUS, status if data is None else {**status, "data": data})
    except (OSError, FlameError) as error:
        log.warning("status.json could not be written: %s", error)


def read_status(run: Path) -> dict[str, Any]:
    """Return status.json, or {} where there is none that can be understood."""
    try:
        value = json.loads((run / STATUS).read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def abandon_metrics(run: Path, step: int) -> int:
    """Move the lines of steps after `step` from metrics.jsonl to metrics.abandoned.jsonl; returns how many.

    So every step is logged once, whatever was trained and lost before a resume. A torn last line moves too.
    """
    path = run / METRICS
    text = path.read_text("utf-8", errors="replace") if path.is_file() else ""
    kept: list[str] = []
    moved: list[str] = []
    for line in text.splitlines():
        (kept if _is_step_up_to(line, step) else moved).append(line)
    whole = "".join(line + "\n" for line in kept)
    if whole != text:
        # In this order, a kill in between loses nothing: at worst lines stand in both files.
        for line in moved:
            append_line(run / ABANDONED_METRICS, line)
        write_text(path, whole)
    return len(moved)


def _is_step_up_to(line: str, step: int) -> bool:
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False


def check_shared_folder(run: Path, world: World) -> None:
    """Raise on all ranks, naming the hosts, unless every rank sees the file that rank 0 writes into the run folder."""

    def write_nonce() -> Path:
        nonce = run / f".shared-{uuid.uuid4().hex}"
        write_text(nonce, socket.gethostname())
        return nonce

    found = on_main("writing into the run folder", write_nonce, world)
    error: Exception | None = None
    if not found.is_file():
        error = TrainingError(
            "a rank does not see the run folder that rank 0 writes to",
            where=run,
            got=f"rank {world.rank} on {socket.gethostname()}",
            fix="Put job.dump_folder on a file system that all hosts share, under one path",
        )
    try:
        raise_together(error, world, "looking for the run folder")
    finally:
        if world.is_main:
            found.unlink(missing_ok=True)


def _mend_last_line(path: Path) -> None:
    """End the last line of a JSONL file with the newline that it lacks, or cut it off where it is torn."""
    data = path.read_bytes() if path.is_file() else b""
    start = data.rfind(b"\n") + 1
    if start < len(data):
        write_bytes(path, data + b"\n" if is_whole_line(data[start:]) else data[:start])


def _relative(path: Path, run: Path) -> str:
    return str(path.relative_to(run)) if path.is_relative_to(run) else str(path)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
