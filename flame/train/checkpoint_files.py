"""A run's checkpoints on disk: which are whole, which one to load, which ones to put away. Paths and arithmetic only.

<folder>/step-100/                  a checkpoint, if and only if it holds complete.json
    .metadata  __0_0.distcp …       torch's distributed checkpoint: model, optimizer, train state
    config.toml                     the resolved configuration
    hf/                             config.json, generation_config.json, the tokenizer's files
    complete.json                   written last: size and xxh3-128 of every other file
<folder>/step-200.tmp/              being written, or left behind by a process that died
<folder>/abandoned-<time>/step-300/ what was later than the step that a resume went back to
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from flame.errors import CheckpointError
from flame.files import fsync_folder, move_aside, publish, remove_tree, temporary_path
from flame.train.identity import DataIdentity
from flame.train.log import log

FORMAT_VERSION = 1
COMPLETE = "complete.json"
_STEP_FOLDER = re.compile(r"step-(0|[1-9][0-9]*)")
_LEFTOVER = re.compile(r"step-(0|[1-9][0-9]*)\.tmp")
_HASH_CHUNK_BYTES = 8 << 20
_HASH_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What a file of a checkpoint must be: its size in bytes and its xxh3-128, in hex."""

    size: int
    xxh3: str


@dataclass(frozen=True, kw_only=True)
class Complete:
    """The content of complete.json. `files` maps names relative to the checkpoint to their records."""

    step: int
    consumed_samples: int
    has_optimizer: bool
    identity: DataIdentity | None
    files: Mapping[str, FileRecord]

    def to_json(self) -> dict[str, Any]:
        identity = {"fingerprints": None, "window_len": None, "data_seed": None}
        return {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "has_optimizer": self.has_optimizer,
            **(identity if self.identity is None else self.identity.to_json()),
            "files": {name: {"size": file.size, "xxh3": file.xxh3} for name, file in sorted(self.files.items())},
        }


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The checkpoint that a run goes on from."""

    path: Path
    complete: Complete

    @property
    def step(self) -> int:
        return self.complete.step


def step_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint of `step` lies."""
    return folder / f"step-{step}"


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of all folders named step-N, rising, whole or not; none where the folder is absent."""
    if not folder.is_dir():
        return []
    matches = (_STEP_FOLDER.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match.group(1)) for match in matches if match)


def read_complete(checkpoint: Path) -> Complete:
    """Read a checkpoint's complete.json; `CheckpointError` where it is absent or cannot be understood."""
    path = checkpoint / COMPLETE
    try:
        value = json.loads(path.read_bytes())
        if value["format_version"] != FORMAT_VERSION:
            raise CheckpointError(
                "the checkpoint was written by another version of Flame",
                where=path,
                got=f"format_version {value['format_version']}",
                expected=f"format_version {FORMAT_VERSION}",
            )
        return Complete(
            step=int(value["step"]),
            consumed_samples=int(value["consumed_samples"]),
            has_optimizer=bool(value["has_optimizer"]),
            identity=DataIdentity.from_json(value),
            files={name: FileRecord(**record) for name, record in value["files"].items()},
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{COMPLETE} cannot be understood: {error!r}", where=path) from error


def find_damage(checkpoint: Path, *, check_bytes: bool) -> str | None:
    """Return what is wrong with a checkpoint, in a clause, or None. Costs a stat a file; with `check_bytes`, a read."""
    if not (checkpoint / COMPLETE).is_file():
        return f"it was never completed, {COMPLETE} is absent"
    try:
        complete = read_complete(checkpoint)
    except CheckpointError as error:
        return str(error).rstrip(".")
    if _STEP_FOLDER.fullmatch(checkpoint.name) and checkpoint.name != f"step-{complete.step}":
        return f"{COMPLETE} says step {complete.step}"
    for name, record in complete.files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is absent"
        if (size := path.stat().st_size) != record.size:
            return f"{name} has {size} bytes instead of {record.size}"
    if not check_bytes:
        return None
    with ThreadPoolExecutor(_HASH_THREADS) as threads:
        checksums = threads.map(lambda name: _xxh3_of_file(checkpoint / name), complete.files)
        for (name, record), checksum in zip(complete.files.items(), checksums, strict=True):
            if checksum != record.xxh3:
                return f"{name} has other bytes than were written (xxh3 {checksum} instead of {record.xxh3})"
    return None


def record_of_file(path: Path) -> FileRecord:
    """Return the size and checksum of a file that was just written."""
    return FileRecord(size=path.stat().st_size, xxh3=_xxh3_of_file(path))


def _xxh3_of_file(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def open_checkpoint(path: Path, *, fast_open: bool) -> Choice:
    """Check one checkpoint folder by sizes, and unless `fast_open` by checksums; `CheckpointError` if it is damaged."""
    if (damage := find_damage(path, check_bytes=not fast_open)) is not None:
        steps = checkpoint_steps(path) or checkpoint_steps(path / "checkpoint")
        raise CheckpointError(
            f"the checkpoint cannot be used: {damage}",
            where=path,
            fix=f"Name one of its checkpoints: {_listed(steps)}" if steps else "Choose another checkpoint",
        )
    return Choice(path=path, complete=read_complete(path))


def choose_checkpoint(folder: Path, *, load_step: int | None = None, fast_open: bool = False) -> Choice | None:
    """Return the checkpoint to load: `load_step` if named, else the latest whole one; None where there is none at all.

    A damaged latest is named in a warning and the one before is taken. Raises `CheckpointError` where `load_step` is
    absent or damaged, and where every checkpoint there is is damaged: a run never silently starts over.
    """
    steps = checkpoint_steps(folder)
    if load_step is not None:
        if load_step not in steps:
            raise CheckpointError(
                f"there is no checkpoint of step {load_step} (checkpoint.load_step)",
                where=folder,
                got=_listed(steps) if steps else "no checkpoints",
                fix="Name one that is there, or leave checkpoint.load_step at -1 to take the latest",
            )
        return open_checkpoint(step_folder(folder, load_step), fast_open=fast_open)
    for step in reversed(steps):
        path = step_folder(folder, step)
        damage = find_damage(path, check_bytes=not fast_open)
        if damage is None:
            return Choice(path=path, complete=read_complete(path))
        log.warning("%s is damaged and is passed over: %s", path, damage)
    if steps:
        raise CheckpointError(
            "every checkpoint of this run is damaged",
            where=folder,
            got=_listed(steps),
            fix="Restore one of them; or move them away, with the run's metrics.jsonl, to start the run over",
        )
    return None


def abandon_later(folder: Path, step: int) -> list[Path]:
    """Move every step-N folder with N > `step` to abandoned-<time>/; returns where they now lie."""
    later = [number for number in checkpoint_steps(folder) if number > step]
    if not later:
        return []
    target = _free_name(folder / time.strftime("abandoned-%Y%m%dT%H%M%SZ", time.gmtime()))
    for number in later:
        move_aside(step_folder(folder, number), target / f"step-{number}")
    fsync_folder(folder)
    log.warning("checkpoints later than step %d (%s) were moved to %s", step, _listed(later), target)
    return [target / f"step-{number}" for number in later]


def make_room(folder: Path, step: int) -> None:
    """Before `step` is saved: delete what died half-written, and move aside a step-N that is no whole checkpoint."""
    if folder.is_dir():
        for path in folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                remove_tree(path)
    path = step_folder(folder, step)
    if path.exists():
        target = _free_name(folder / time.strftime("abandoned-%Y%m%dT%H%M%SZ", time.gmtime()))
        move_aside(path, target / path.name)
        log.warning("%s was there already, damaged; it was moved to %s", path, target)


def retain_latest(folder: Path, keep: int | None) -> list[Path]:
    """Delete all but the `keep` latest whole checkpoints (None keeps all); returns what was deleted.

    Only folders named step-N with our complete.json are touched, never step 0 (a seed, or a converted model), and
    only once `keep` newer ones are whole. Each is renamed first, so that a kill leaves no half-deleted checkpoint.
    """
    if keep is None:
        return []
    assert keep > 0, "keep at least one checkpoint"
    paths = [step_folder(folder, step) for step in checkpoint_steps(folder) if step > 0]
    whole = [path for path in paths if not path.is_symlink() and find_damage(path, check_bytes=False) is None]
    surplus = whole[:-keep]
    for path in surplus:
        publish(path, temporary_path(path))
        remove_tree(temporary_path(path))
    return surplus


def _free_name(path: Path) -> Path:
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _listed(steps: list[int]) -> str:
    return ", ".join(f"step-{step}" for step in steps)
