"""TensorBoard, Weights & Biases and trackio: the numbers of metrics.jsonl, sent where people watch runs.

A logger is a function of `LOGGERS` that opens it for a run. The packages are extras of flame. One that is absent is
told before the run starts; one that fails later, for any reason, is told once and is off for the rest of the process:
watching a run never stops it, and never slows it down.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flame.errors import UsageError
from flame.train.log import log
from flame.train.options import MetricsOptions

DEFAULT_PROJECT = "flame"

MAX_WAITING = 1000
"""Logged steps that a logger may be behind."""
CLOSE_SECONDS = 5.0

# Without a network, wandb would wait for minutes, or for good. The user's own values win.
_WANDB_PATIENCE = {"WANDB_LOGIN_TIMEOUT": "30", "WANDB_INIT_TIMEOUT": "30"}


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """What a logger is told of the run: `config` is the flattened configuration, `first_step` that of this start."""

    folder: Path
    run_id: str
    first_step: int
    rank: int
    options: MetricsOptions
    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Logger:
    """An open logger: `write` takes a step and its numbers, `close` whether the process ends as it should."""

    write: Callable[[int, Mapping[str, float]], None]
    close: Callable[[bool], None]


def refuse_absent_loggers(options: MetricsOptions) -> None:
    """Raise `UsageError` for the first logger that is asked for and not installed."""
    for name in LOGGERS:
        if getattr(options, f"enable_{name}") and not _is_installed(name):
            raise UsageError(
                f"--metrics.enable_{name} needs the package {name}, which is not installed",
                fix=f'pip install "flame[{name}]", or leave the option away: metrics.jsonl is always written',
            )


def _is_installed(package: str) -> bool:
    """Whether a package can be imported; a mere folder of its name, such as wandb's own `wandb/`, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


@contextlib.contextmanager
def open_loggers(run: LoggedRun) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Give a function that logs a line of metrics.jsonl to all loggers of this rank; at the end, they are closed.

    Only rank 0 logs, except to TensorBoard with metrics.rank_0_only false. Nothing that a logger raises gets out, and
    none is waited for: each has a thread and a queue of its own. At the end all of them together are given
    WANDB_FINISH_TIMEOUT seconds, or 5.
    """
    threads = [
        LoggerThread(name, partial(LOGGERS[name], run))
        for name in LOGGERS
        if getattr(run.options, f"enable_{name}") and (run.rank == 0 or _logs_on_all_ranks(name, run))
    ]

    def write(line: Mapping[str, Any]) -> None:
        for thread in threads:
            thread.write(line["step"], numbers(line))

    succeeded = False
    try:
        yield write
        succeeded = True
    finally:
        deadline = time.monotonic() + _close_seconds()
        for thread in threads:
            thread.close(succeeded)
        for thread in threads:
            thread.wait(max(0.0, deadline - time.monotonic()))


class LoggerThread:
    """A logger in a thread of its own, from its opening to its closing, so that a slow or dead one costs nothing.

    It is `MAX_WAITING` steps behind at most: what comes then is dropped, and told at the end. What goes wrong is told
    once, and the logger is off.
    """

    def __init__(self, name: str, open_logger: Callable[[], Logger]) -> None:
        self._name = name
        self._open = open_logger
        self._waiting: deque[tuple[int, Mapping[str, float]]] = deque()
        self._changed = threading.Condition()
        self._ends: bool | None = None  # whether the process ends as it should, once it ends
        self._off = False
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"flame-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Leave a step's numbers to the thread; never waits."""
        with self._changed:
            if self._off:
                return
            if len(self._waiting) >= MAX_WAITING:
                if self._num_dropped == 0:
                    log.warning(
                        "%s is %d logged steps behind: what it has no room for is dropped", self._name, MAX_WAITING
                    )
                self._num_dropped += 1
                return
            self._waiting.append((step, values))
            self._changed.notify()

    def close(self, succeeded: bool) -> None:
        """Ask the thread to write what waits, and to close the logger; does not wait."""
        with self._changed:
            self._ends = succeeded
            self._changed.notify()

    def wait(self, seconds: float) -> None:
        """Wait so long for the end of the thread, and tell what is lost."""
        self._thread.join(seconds)
        with self._changed:
            lost = self._num_dropped + len(self._waiting) * self._thread.is_alive()
            if self._thread.is_alive():
                self._off = True
                log.warning(
                    "%s has not ended in time and is left to itself: %d logged steps are lost", self._name, lost
                )
            elif lost:
                log.warning("%s was too slow: %d logged steps were dropped", self._name, lost)

    def _run(self) -> None:
        try:
            with _failure_told(self._name, "opened"):
                logger = self._open()
                all_written = False
                with _failure_told(self._name, "written to"):
                    self._write_all(logger)
                    all_written = True
                if all_written:
                    with _failure_told(self._name, "closed"):
                        logger.close(bool(self._ends))
                else:
                    self._turn_off()
                    with contextlib.suppress(Exception):  # told already
                        logger.close(False)
        finally:
            self._turn_off()

    def _turn_off(self) -> None:
        with self._changed:
            self._off = True
            self._waiting.clear()

    def _write_all(self, logger: Logger) -> None:
        while True:
            with self._changed:
                while not self._waiting and self._ends is None:
                    self._changed.wait()
                if not self._waiting:
                    return
                step, values = self._waiting.popleft()
            logger.write(step, values)


def _close_seconds() -> float:
    """Return how long the end waits for the loggers: as wandb's own variable says, if it does."""
    with contextlib.suppress(KeyError, ValueError):
        return float(os.environ["WANDB_FINISH_TIMEOUT"])
    return CLOSE_SECONDS


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return what a logger can plot of a line of metrics.jsonl: all numbers that are known, but the step itself."""
    return {
        name: value
        for name, value in line.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
    }


def _logs_on_all_ranks(name: str, run: LoggedRun) -> bool:
    return name == "tensorboard" and not run.options.rank_0_only


@contextlib.contextmanager
def _failure_told(name: str, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or "no reason given"
        log.warning("%s could not be %s, training goes on without it: %s: %s", name, what, type(error).__name__, reason)


def open_tensorboard(run: LoggedRun) -> Logger:
    """Write an event file into metrics.save_tb_folder; what an earlier start logged of this one's steps is dropped."""
    from flame.train.event_file import EventFile  # needs the package

    folder = run.folder / run.options.save_tb_folder
    if not run.options.rank_0_only:
        folder /= f"rank-{run.rank}"
    file = EventFile(folder, run.first_step)
    return Logger(write=file.write, close=lambda _succeeded: file.close())


def open_wandb(run: LoggedRun) -> Logger:
    """Begin, or go on with, the wandb run of this run's id; everything is plotted over our step.

    wandb's own count of steps never goes back, and what is logged at an earlier one is dropped. A resume must go back,
    so that count is left to itself.
    """
    import wandb

    for name, seconds in {**_WANDB_PATIENCE, "WANDB_FINISH_TIMEOUT": f"{_close_seconds():g}"}.items():
        os.environ.setdefault(name, seconds)
    session = wandb.init(
        project=_project(),
        name=_name(run),
        id=run.run_id,
        resume="allow",
        dir=os.environ.get("WANDB_DIR") or str(run.folder),
        config=_plain(run.config),
    )
    session.define_metric("step")
    session.define_metric("*", step_metric="step")
    return Logger(
        write=lambda step, values: session.log({"step": step, **values}),
        close=lambda succeeded: session.finish(exit_code=0 if succeeded else 1),
    )


def open_trackio(run: LoggedRun) -> Logger:
    """Begin, or go on with, the trackio run of this run's name and id: trackio knows runs by their names only."""
    import trackio

    session = trackio.init(
        project=_project(), name=f"{_name(run)}-{run.run_id[:8]}", config=_plain(run.config), resume="allow"
    )
    return Logger(
        write=lambda step, values: session.log(dict(values), step=step),
        close=lambda _succeeded: session.finish(),
    )


def _project() -> str:
    return os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT


def _name(run: LoggedRun) -> str:
    return os.environ.get("WANDB_NAME") or run.folder.resolve().name


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in config.items()}


LOGGERS: dict[str, Callable[[LoggedRun], Logger]] = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "trackio": open_trackio,
}
