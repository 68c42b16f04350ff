"""Where tasks run. An executor is an entry in `EXECUTORS`; all of them give the same bytes."""

from __future__ import annotations

import contextlib
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
from flame.preprocess.plan import Task
from flame.preprocess.task import Progress, TaskSettings
from flame.preprocess.workers import ENVIRONMENT, Death, Failure, ForkRequest, Loaded, LoadRequest

_LOADER = "from flame.preprocess.workers import main; main()"
SECONDS_FOR_AN_OBITUARY = 5.0


class WorkerTracebackError(Exception):
    """The traceback of an error in a worker, shown by --debug as its cause."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


class LocalExecutor:
    """Runs tasks in processes of this machine (`workers.py` shows how they hang together).

    A context: on leaving, all processes are gone, whatever happened. `start` returns at once, so that the tokenizer
    loads while the builder scans the inputs; `wait_until_loaded` raises what loading it raised.
    """

    def __init__(self, request: LoadRequest, num_workers: int) -> None:
        self._request = request
        self._num_workers = num_workers
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalExecutor:
        pipes = [Pipe() for _ in range(self._num_workers + 1)]
        theirs = [pipe[1] for pipe in pipes]
        self._control, self._workers = pipes[0][0], [pipe[0] for pipe in pipes[1:]]
        self._process = _start_loader(theirs)
        for connection in theirs:
            connection.close()
        self._send(self._control, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
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
            raise FlameError("the process that loads the tokenizer died", got=self._last_words()) from error
        if isinstance(answer, Failure):
            raise answer.error from _cause(answer)
        assert isinstance(answer, Loaded)
        return answer

    def run(
        self, tasks: Sequence[Task], settings: TaskSettings, *, lock: Path, report: Callable[[Progress], None]
    ) -> None:
        """Run every task; raises the first failure, and `FlameError` naming the task of a worker that dies."""
        workers = self._workers[: min(self._num_workers, len(tasks))]
        self._send(self._control, ForkRequest(num_workers=len(workers), lock=lock))
        waiting = deque(tasks)
        running: dict[Connection, Task] = {}
        for connection in workers:
            self._send(connection, settings)
            running[connection] = waiting.popleft()
            self._send(connection, running[connection])
        while running:
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                answer = self._receive(ready, running[ready])
                if isinstance(answer, Progress):
                    report(answer)
                elif isinstance(answer, Failure):
                    raise answer.error from _cause(answer)
                else:
                    del running[ready]
                    if waiting:
                        running[ready] = waiting.popleft()
                        self._send(ready, running[ready])

    def _receive(self, connection: Connection, task: Task) -> Any:
        try:
            return connection.recv()
        except (EOFError, OSError) as error:
            cause = self._obituary(self._workers.index(connection))
            raise FlameError(
                f"a worker died during task {task.index}",
                where=", ".join(dict.fromkeys(piece.path for piece in task.pieces[:3])),
                got=cause,
                fix="If memory ran out, use fewer --num_workers; run the same command again: finished tasks are kept",
            ) from error

    @staticmethod
    def _send(connection: Connection, message: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died: reading from it says so, with the cause
            connection.send(message)

    def _obituary(self, worker: int) -> str:
        while self._control.poll(SECONDS_FOR_AN_OBITUARY):
            try:
                message = self._control.recv()
            except (EOFError, OSError):
                return self._last_words()
            if isinstance(message, Failure):
                return str(message.error)
            if isinstance(message, Death) and message.worker == worker:
                return _exit_in_words(message.exit_code)
        return "no word of why"

    def _last_words(self) -> str:
        assert self._process is not None
        return _exit_in_words(self._process.wait())


EXECUTORS: dict[str, type[LocalExecutor]] = {"local": LocalExecutor}


def _start_loader(connections: Sequence[Connection]) -> subprocess.Popen[bytes]:
    descriptors = [connection.fileno() for connection in connections]
    # The child keeps SIGINT blocked until it ignores it, so that an early Ctrl-C is ours alone to hear.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _LOADER, str(os.getpid()), *map(str, descriptors)],
            pass_fds=descriptors,
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


def _exit_in_words(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
