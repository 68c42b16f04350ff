"""The executor of a Ray cluster: every task a Ray task, on whichever node has a free CPU.

The nodes share the folders of the input and the output, and have flame installed. A task whose process dies is run
again in processes of its own on its node, as `local.py` does: there a document that kills the tokenizer is found.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from flame.errors import FlameError, UsageError
from flame.files import file_lock
from flame.preprocess.local import LocalExecutor, WorkerTracebackError
from flame.preprocess.plan import Task
from flame.preprocess.reports import Progress
from flame.preprocess.task import TokenizeSettings
from flame.preprocess.workers import ENVIRONMENT, Failure, Loaded, Request, Settings, failure_of

MOST_TRIES = 3
REACH_SECONDS = 30.0
_tools: dict[str, Any] = {}  # of a process of Ray's: what a build's request loaded


class RayExecutor:
    """Runs tasks on the Ray cluster that RAY_ADDRESS names, or that runs on this machine."""

    def __init__(self, request: Request, num_workers: int | None) -> None:
        self.num_workers = num_workers or 0
        self._request = request
        self._build = uuid.uuid4().hex
        self._running: dict[Any, Task] = {}

    def __enter__(self) -> RayExecutor:
        self._ray, self._connected = _connect()
        self.num_workers = self.num_workers or max(int(self._ray.cluster_resources().get("CPU", 1)), 1)
        self._reference = self._ray.put(self._request)
        remote = self._ray.remote(num_cpus=1, max_retries=0)
        self._load, self._run = remote(_load), remote(_run)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._ray.wait(list(self._running), num_returns=len(self._running), timeout=60) if self._running else None
        if self._connected:
            self._ray.shutdown()

    def wait_until_loaded(self) -> Loaded:
        """Block until a node has loaded the tokenizer; raises the error if it cannot be."""
        return _value(self._ray.get(self._load.remote(self._build, self._reference)), Loaded)

    def run(
        self,
        tasks: Sequence[Task],
        settings: Settings,
        *,
        lock: Path,
        report: Callable[[Progress], None],
        shared: bool = False,
    ) -> None:
        """Run every task; raises the first failure. One whose process dies is run again, `MOST_TRIES` times in all."""
        # A task outlives a builder that is killed, for a while: so it is claimed, whether or not others build as well.
        told = self._ray.put(_claiming(settings))
        waiting = deque(tasks)
        tries: dict[int, int] = {}
        while waiting or self._running:
            while waiting and len(self._running) < self.num_workers:
                task = waiting.popleft()
                tries[task.index] = tries.get(task.index, 0) + 1
                apart = tries[task.index] > 1
                reference = self._run.remote(self._build, self._reference, told, task, lock, apart)
                self._running[reference] = task
            ready, _ = self._ray.wait(list(self._running), num_returns=1)
            task = self._running.pop(ready[0])
            try:
                answer = self._ray.get(ready[0])
            except self._ray.exceptions.RayError as error:
                how = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                if tries[task.index] == MOST_TRIES:
                    raise _given_up(task, how) from error
                waiting.appendleft(task)
                note = f"the process of task {task.index} died on the cluster ({how}); the task is run again by itself"
                report(Progress(note=note))
                continue
            for progress in _value(answer, list):
                report(progress)


def _claiming(settings: Settings) -> Settings:
    if not isinstance(settings, TokenizeSettings):
        return settings  # what is done twice at once then does no harm
    return dataclasses.replace(settings, claims=True)


def _connect() -> tuple[Any, bool]:
    """Return Ray, and whether this call connected it: what did not, leaves it to who did to disconnect."""
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            "--executor ray needs a package that is not installed",
            got="no module named ray",
            fix="pip install 'flame[ray]', here and on the nodes of the cluster",
        ) from error
    if ray.is_initialized():
        return ray, False
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        _reach(address)
        ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise FlameError(
            "there is no Ray cluster to run on",
            where=f"RAY_ADDRESS {address}" if address else "this machine, as RAY_ADDRESS is not set",
            got=" ".join(str(error).split())[:200] if address else None,
            fix="Set RAY_ADDRESS to the cluster's address (HOST:6379), or start one: ray start --head",
        ) from error
    return ray, True


def _reach(address: str) -> None:
    """Raise `OSError` where nothing listens at HOST:PORT: Ray itself would try for more than five minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS).close()


def _value(answer: Any, kind: type) -> Any:
    if isinstance(answer, Failure):
        raise answer.error from (None if answer.traceback is None else WorkerTracebackError(answer.traceback))
    assert isinstance(answer, kind)
    return answer


def _given_up(task: Task, how: str) -> FlameError:
    paths = list(dict.fromkeys(piece.path for piece in task.pieces))
    return FlameError(
        f"the process of task {task.index} died {MOST_TRIES} times on the cluster",
        where=", ".join(paths[:3]) + (f" and {len(paths) - 3} more files" if len(paths) > 3 else ""),
        got=how,
        fix="Look at the nodes' memory and at Ray's logs; run the same command again: finished tasks are kept",
    )


# ---- on the nodes


def _load(build: str, request: Request) -> Loaded | Failure:
    os.environ.update(ENVIRONMENT)
    try:
        _tools[build], loaded = request.load()
    except BaseException as error:
        return failure_of(error)
    return loaded


def _run(
    build: str, request: Request, settings: Settings, task: Task, lock: Path, apart: bool
) -> list[Progress] | Failure:
    """Run a task; returns what it has done, added up, and what it noted."""
    os.environ.update(ENVIRONMENT)
    total, notes = Progress(), []

    def report(progress: Progress) -> None:
        nonlocal total
        total += progress
        if progress.note is not None:
            notes.append(Progress(note=progress.note))

    try:
        if apart:
            with LocalExecutor(request, 1) as executor:
                executor.wait_until_loaded()
                executor.run([task], settings, lock=lock, report=report, shared=True)
        else:
            if build not in _tools:
                _tools[build], _ = request.load()
            with file_lock(lock, what="the tasks of this corpus", shared=True):
                settings.run(task, _tools[build], report)
    except BaseException as error:
        return failure_of(error)
    return [*notes, total]
