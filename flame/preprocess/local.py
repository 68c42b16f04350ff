"""The executor of one machine: a loader, and workers that it forks (`workers.py` shows how they hang together)."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from flame.errors import FlameError
from flame.preprocess.attempts import Attempt
from flame.preprocess.forks import exit_in_words
from flame.preprocess.plan import Task
from flame.preprocess.reports import Progress
from flame.preprocess.workers import (
    ENVIRONMENT,
    Death,
    Done,
    Failure,
    Loaded,
    Order,
    Request,
    Settings,
    Start,
    send_connection,
)

_LOADER = "from flame.preprocess.workers import main; main()"
SECONDS_FOR_AN_OBITUARY = 5.0


class WorkerTracebackError(Exception):
    """The traceback of an error in a worker, shown by --debug as its cause."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


class LocalExecutor:
    """Runs tasks in processes of this machine.

    A context: on leaving, all processes are gone, whatever happened. Entering it returns at once, so that the tokenizer
    loads while the builder scans the inputs; `wait_until_loaded` raises what loading it raised.
    """

    def __init__(self, request: Request, num_workers: int | None) -> None:
        self.num_workers = num_workers or len(os.sched_getaffinity(0))
        self._request = request
        self._numbers = itertools.count()
        self._workers: dict[Connection, int] = {}
        self._deaths: dict[int, str] = {}

    def __enter__(self) -> LocalExecutor:
        self._control, theirs = Pipe()
        self._process = _start_loader(theirs)
        theirs.close()
        self._send(self._control, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()
        for connection in (self._control, *self._workers):
            if kind is not None:
                _read_to_the_end(connection)
            connection.close()
        self._process.wait()

    def wait_until_loaded(self) -> Loaded:
        """Block until the tokenizer is loaded, and return by which engine; raises the error if it cannot be."""
        try:
            answer = self._control.recv()
        except (EOFError, OSError) as error:
            raise FlameError(
                "the process that loads the tokenizer died",
                got=self._last_words(),
                fix="Try --engine hf, and see that there is memory for the tokenizer",
            ) from error
        if isinstance(answer, Failure):
            raise answer.error from _cause(answer)
        assert isinstance(answer, Loaded)
        return answer

    def run(
        self,
        tasks: Sequence[Task],
        settings: Settings,
        *,
        lock: Path,
        report: Callable[[Progress], None],
        shared: bool = False,
    ) -> None:
        """Run every task; raises the first failure. What a worker leaves that dies, another takes up (`Attempt`)."""
        self._send(self._control, Start(lock=lock, shared=shared))
        waiting = deque(Attempt(task=task) for task in tasks)
        claimed: deque[Attempt] = deque()  # by other processes: waited for when nothing else is left to do
        running: dict[Connection, Attempt] = {}
        for _ in range(min(self.num_workers, len(tasks))):
            self._give(self._start_worker(settings), waiting.popleft(), running)
        while running:
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                attempt = running[ready]
                try:
                    answer = ready.recv()
                except (EOFError, OSError):
                    attempt, undone = attempt.after_death(self._obituary(ready))
                    report(undone)
                    self._forget(ready, running)
                    self._give(self._start_worker(settings), attempt, running)
                    continue
                if isinstance(answer, Progress):
                    report(attempt.heard(answer))
                    continue
                if isinstance(answer, Failure):
                    raise answer.error from _cause(answer)
                assert isinstance(answer, Done)
                del running[ready]
                if answer.busy:
                    attempt.wait = True
                    claimed.append(attempt)
                if waiting or claimed:
                    self._give(ready, (waiting or claimed).popleft(), running)

    def _start_worker(self, settings: Settings) -> Connection:
        ours, theirs = Pipe()
        self._workers[ours] = next(self._numbers)
        with contextlib.suppress(OSError):  # the loader died: reading from the worker says so
            self._control.send(self._workers[ours])
            send_connection(self._control, theirs)
        theirs.close()
        self._send(ours, settings)
        return ours

    def _give(self, connection: Connection, attempt: Attempt, running: dict[Connection, Attempt]) -> None:
        running[connection] = attempt
        self._send(connection, Order(task=attempt.task, careful=attempt.careful, wait=attempt.wait))

    def _forget(self, connection: Connection, running: dict[Connection, Attempt]) -> None:
        del running[connection], self._workers[connection]
        connection.close()

    @staticmethod
    def _send(connection: Connection, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # reading from it says how it died
            connection.send(message)

    def _obituary(self, connection: Connection) -> str:
        """Return how a worker died; raises what the loader failed of, or `FlameError` if it died itself."""
        number = self._workers[connection]
        while number not in self._deaths and self._control.poll(SECONDS_FOR_AN_OBITUARY):
            try:
                message = self._control.recv()
            except (EOFError, OSError) as error:
                raise FlameError(
                    "the process that starts the workers died",
                    got=self._last_words(),
                    fix="If memory ran out, use fewer --num_workers. Run the command again: finished tasks are kept",
                ) from error
            if isinstance(message, Failure):
                raise message.error from _cause(message)
            assert isinstance(message, Death)
            self._deaths[message.worker] = exit_in_words(message.exit_code)
        return self._deaths.pop(number, "no word of why")

    def _last_words(self) -> str:
        return exit_in_words(self._process.wait())


def _start_loader(control: Connection) -> subprocess.Popen[bytes]:
    # The child keeps SIGINT blocked until it ignores it, so that an early Ctrl-C is ours alone to hear.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _LOADER, str(os.getpid()), str(control.fileno())],
            pass_fds=[control.fileno()],
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.DEVNULL,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _read_to_the_end(connection: Connection) -> None:
    """Wait until the process at the other end is gone, which closes the pipe."""
    try:
        while True:
            connection.recv_bytes()
    except (EOFError, OSError):
        pass


def _cause(failure: Failure) -> WorkerTracebackError | None:
    return None if failure.traceback is None else WorkerTracebackError(failure.traceback)
