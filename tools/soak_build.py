"""The soak's build: killed at random moments until it is done, it must end as the build that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_commands import environment, script
from demo_texts import library_folder, module_paths, read_library, train_tokenizer, write_code, write_docstrings
from soak_report import SoakError, Stop, say

POLL_SECONDS = 0.005
_OWN_TO_A_BUILD = ("built",)  # of manifest.json: when and where


@dataclass(frozen=True, kw_only=True)
class BuildSoak:
    """Where the inputs lie, and the two builds of them."""

    folder: Path
    kills: int

    @property
    def undisturbed(self) -> Path:
        return self.folder / "corpus"

    @property
    def killed(self) -> Path:
        return self.folder / "corpus-killed"

    def command(self, output: Path) -> list[str]:
        options = {
            "dataset": self.folder / "raw",
            "tokenizer": self.folder / "tokenizer",
            "output": output,
            "num_workers": 2,
            "val_fraction": 0.02,
            "shard_tokens": 20_000,  # many small tasks, so that most moments fall between two receipts
            "shuffle_block_tokens": 30_000,
        }
        return [str(script("flame-preprocess")), "build", *(f"--{name}={value}" for name, value in options.items())]


def make_inputs(folder: Path) -> None:
    """Write the standard library's code and docstrings, and a tokenizer trained on them."""
    library = library_folder()
    modules, docstrings = read_library(library, module_paths(library))
    (folder / "raw").mkdir(parents=True)
    write_code(folder / "raw" / "code.jsonl", modules)
    write_docstrings(folder / "raw" / "docstrings.parquet", docstrings)
    train_tokenizer(folder / "tokenizer", (docstring.text for docstring in docstrings), vocab_size=512)


def build_undisturbed(soak: BuildSoak) -> float:
    """Build once in peace, and return how many seconds it took."""
    began = time.monotonic()
    with open(soak.folder / "build.log", "w") as log:
        code = subprocess.run(
            soak.command(soak.undisturbed), env=environment(), stdout=log, stderr=log, check=False
        ).returncode
    if code != 0:
        raise SoakError(f"the undisturbed build exited {code}: {soak.folder / 'build.log'}")
    return time.monotonic() - began


def build_with_kills(soak: BuildSoak, moments: random.Random, seconds: float) -> list[Stop]:
    """Build again, killed `soak.kills` times, and then to the end; returns what was done."""
    total, stops = receipts(soak.undisturbed), []
    for number in range(soak.kills):
        # Early kills must leave something to do for the later ones.
        left = total - receipts(soak.killed)
        goal = receipts(soak.killed) + moments.randint(0, 2 * left // (soak.kills - number + 1))
        by_time = moments.random() < 0.4
        delay = moments.uniform(0, seconds / 4) if by_time else moments.uniform(0, 0.05)
        stops.append(_killed_once(soak, goal=None if by_time else min(goal, total), delay=delay, moments=moments))
        say(f"    build {number + 1:>2}/{soak.kills}: {stops[-1]}")
    code = _run(soak).wait()
    if code != 0:
        raise SoakError(f"the build that was killed exits {code} when it is left alone: {_log(soak)}")
    return stops


def _killed_once(soak: BuildSoak, *, goal: int | None, delay: float, moments: random.Random) -> Stop:
    whole_group = moments.random() < 0.5
    process = _run(soak)
    while goal is not None and receipts(soak.killed) < goal and process.poll() is None:
        time.sleep(POLL_SECONDS)
    time.sleep(delay)
    done = receipts(soak.killed)
    if process.poll() is None:  # while it is not waited for, its number is nobody else's
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGKILL)
    code = process.wait()
    if code not in (0, -signal.SIGKILL):
        raise SoakError(f"a build exited {code} by itself: {_log(soak)}")
    return Stop(
        signal="KILL to the group" if whole_group else "KILL to the builder",
        moment=f"{delay:.2f} s after " + ("its start" if goal is None else f"{goal} tasks"),
        at=done,
        exit_code=code,
    )


def _run(soak: BuildSoak) -> subprocess.Popen[bytes]:
    with open(_log(soak), "ab") as log:
        return subprocess.Popen(
            soak.command(soak.killed), env=environment(), stdout=log, stderr=log, start_new_session=True
        )


def _log(soak: BuildSoak) -> Path:
    return soak.folder / "build-killed.log"


def receipts(corpus: Path) -> int:
    """Return how many tasks of a build are done."""
    return len(list((corpus / "build" / "tasks").glob("task-*.json")))


def different_files(one: Path, other: Path) -> list[str]:
    """Name what differs between two corpora: every file, to the last byte, but for when and where each was built."""
    names = {str(p.relative_to(root)) for root in (one, other) for p in root.rglob("*") if p.is_file()}
    return [
        f"corpus file {name}"
        for name in sorted(names - {"build/lock", "build/workers.lock"})
        if _content(one / name) != _content(other / name)
    ]


def _content(path: Path) -> Any:
    if not path.is_file():
        return None
    data = path.read_bytes()
    if path.suffix == ".json":
        return _without(json.loads(data), _OWN_TO_A_BUILD)
    return data


def _without(value: Any, names: Sequence[str]) -> Any:
    return {k: v for k, v in value.items() if k not in names} if isinstance(value, dict) else value
