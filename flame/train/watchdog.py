"""A rank that hangs is named: when a step takes too long, each rank writes its Python stacks into the run folder.

The ranks that wait for it are ended by their collective's timeout, and know nothing but that. So shortly before, a
thread of every rank writes `stacks/rank-N.txt`, whose first line tells, for the others, what its rank waits in.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from flame.errors import TrainingError
from flame.train.log import log

STACKS = "stacks"
INIT_TIMEOUT, TRAIN_TIMEOUT, SHUTDOWN_TIMEOUT = (
    "comm.init_timeout_seconds",
    "comm.train_timeout_seconds",
    "comm.shutdown_timeout_seconds",
)
_TICKS = 8  # looks in a timeout
_FIRST_STACKS = 0.75  # of a timeout: written here, and again at each look until the step is done
_MAX_NAMED, _MAX_REASON = 8, 200
_TIMED_OUT = re.compile(r"time[d -]*out", re.IGNORECASE)
_SOURCE_LINE = re.compile(r"^\[\S+\.\w+:\d+\]\s*")  # where in gloo's source it was thrown
_GONE = re.compile(r"connection (closed|reset)|broken pipe|remote process exited", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What a rank does since `began`; another rank is waited for `timeout_seconds`, as the option `timeout` says."""

    name: str
    timeout: str
    timeout_seconds: float
    began: float


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank's main thread stood. `in_collective` is None where Python's stack does not tell."""

    in_collective: bool | None
    where: str


class Watchdog:
    """A thread that looks, now and then, how long this rank's phase has taken; `timeouts` are seconds by option.

    The files are those of one start: what an earlier one left is deleted. A disk that refuses them stops nothing.
    """

    def __init__(self, run_folder: Path, *, rank: int, world_size: int, timeouts: dict[str, float]) -> None:
        self._folder, self._rank, self._world_size, self._timeouts = run_folder / STACKS, rank, world_size, timeouts
        self._main = threading.get_ident()
        self._told: Phase | None = None
        self._ended = threading.Event()
        self.begin("the start", INIT_TIMEOUT)
        self._delete()
        self._thread = threading.Thread(target=self._watch, name="flame-watchdog", daemon=True)
        self._thread.start()

    def begin(self, name: str, timeout: str) -> None:
        """Say what this rank does from now on, and which option tells how long the others wait for it."""
        seconds = self._timeouts[timeout]
        self._phase = Phase(name=name, timeout=timeout, timeout_seconds=seconds, began=time.perf_counter())

    def close(self) -> None:
        """Stop looking; the files stay for people to read."""
        self._ended.set()
        self._thread.join()

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn a collective that ran out of time, or lost its partner, into an error that names the rank to look at."""
        try:
            yield
        except RuntimeError as error:
            reason = _first_sentence(str(error))
            if _TIMED_OUT.search(str(error)):
                raise self._timed_out(reason) from error
            if _GONE.search(str(error)):
                raise self._lost_partner(reason) from error
            raise

    def _timed_out(self, reason: str) -> TrainingError:
        phase = self._phase
        return TrainingError(
            f"this rank waited {phase.timeout_seconds:g} s for another in a collective: {reason}",
            where=phase.name,
            got=self._told_of_all(),
            fix=f"Read {self._folder}/rank-N.txt of the rank that is named; "
            f"if it is only slow, raise --{phase.timeout}. The last checkpoint is whole",
        )

    def _lost_partner(self, reason: str) -> TrainingError:
        return TrainingError(
            f"another rank is gone: {reason}",
            where=self._phase.name,
            fix="Look for that rank's own error above, or in its host's log (out of memory, a signal); "
            "start the same command again to go on from the last complete checkpoint",
        )

    def _watch(self) -> None:
        written = False
        while not self._ended.wait(min(self._timeouts.values()) / _TICKS):
            phase = self._phase
            if time.perf_counter() - phase.began < _FIRST_STACKS * phase.timeout_seconds:
                if written:
                    self._delete()
                written = False
                continue
            if written and self._rank == 0 and self._told is not phase:
                self._told = phase  # a look later, so that the others have written theirs
                seconds = time.perf_counter() - phase.began
                told = self._told_of_all()
                log.warning("%s takes %.0f s already; stacks are in %s: %s", phase.name, seconds, self._folder, told)
            self._write(phase)
            written = True

    def _write(self, phase: Phase) -> None:
        place = place_of(sys._current_frames().get(self._main))
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            head = json.dumps({"rank": self._rank, "phase": phase.name, **asdict(place)}) + "\n"
            # Not emptied first: another rank may be reading the first line.
            with open(os.open(self._path(self._rank), os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as file:
                file.write(head.encode("utf-8"))
                faulthandler.dump_traceback(file.fileno(), all_threads=True)
                file.truncate()

    def _told_of_all(self) -> str:
        """Return which ranks stand outside a collective, as far as their files tell."""
        places = {rank: read_place(self._path(rank)) for rank in range(self._world_size)}
        outside = [(rank, place) for rank, place in places.items() if place is not None and not place.in_collective]
        silent = [str(rank) for rank, place in places.items() if place is None]
        told = [
            f"rank {rank} is not in a collective, but in {place.where}"
            if place.in_collective is False
            else f"rank {rank} may wait for its device, in {place.where}"
            for rank, place in outside[:_MAX_NAMED]
        ]
        if len(outside) > _MAX_NAMED:
            told.append(f"{len(outside) - _MAX_NAMED} more such ranks")
        if silent:
            more = f" and {len(silent) - _MAX_NAMED} more" if len(silent) > _MAX_NAMED else ""
            told.append(f"no stack of rank {', '.join(silent[:_MAX_NAMED])}{more} (it is gone, or stands in C code)")
        return "; ".join(told) or "every rank is in a collective, maybe not the same one"

    def _delete(self) -> None:
        with contextlib.suppress(OSError):
            self._path(self._rank).unlink()

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.txt"


def _first_sentence(text: str) -> str:
    """Return what an error of torch's says in its first sentence, without where it was thrown."""
    line = _SOURCE_LINE.sub("", (text.splitlines() or [""])[0])
    sentence = line.partition(". ")[0]
    return sentence if len(sentence) <= _MAX_REASON else sentence[:_MAX_REASON] + "…"


def place_of(frame: FrameType | None) -> Place:
    """Return what a stack, given by its innermost frame, waits in."""
    if frame is None:
        return Place(in_collective=None, where="no Python code")
    file, where = frame.f_code.co_filename, f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
    if "/torch/distributed/" in file and "/torch/distributed/checkpoint/" not in file:
        return Place(in_collective=True, where=where)
    # Backward's hooks have threads of their own on a GPU, and whatever reads a tensor waits for all kernels before it.
    is_known = "/torch/" not in file or "/torch/distributed/checkpoint/" in file
    return Place(in_collective=False if is_known else None, where=where)


def read_place(path: Path) -> Place | None:
    """Return what the first line of a stack file tells; None where there is none, or none that can be understood."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.loads(file.readline())
        return Place(in_collective=value["in_collective"], where=value["where"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
