"""The processes of the local executor: one that loads the tokenizer, and its forks, which run tasks.

    builder ── control pipe ──> loader: imports, loads the engine, forks n workers, reports those that die
       └────── a pipe each ───> workers: receive a task, run it, send progress and the outcome

The tokenizer and the libraries are loaded once, and shared by all workers' memory. The loader is a fresh process with
a single thread when it forks, so that the builder may hold any threads or libraries. Every process dies with its
parent, and the workers hold a lock until the last of them is gone.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from flame.errors import FlameError
from flame.files import exclusive_lock
from flame.preprocess.engine_check import Encoder, load_encoder
from flame.preprocess.engine_screen import Screen

if TYPE_CHECKING:
    from flame.preprocess.plan import Task
    from flame.preprocess.task import TaskSettings

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
# One thread a process: the processes are the parallelism, and a fork must find no other thread (Arrow's allocator would
# start one when it is imported).
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """To the loader, first: which engine, on which tokenizer. It answers `Loaded`, or a failure.

    `screens` are files that may hold the engine's screen, `small_input` says that a screen is not worth its time.
    """

    engine: str
    tokenizer_json: bytes
    parse_special: bool
    screens: tuple[Path, ...] = ()
    small_input: bool = False


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """From the loader: the engine that was taken, and the screen that it stands behind."""

    engine: str
    screen: Screen | None
    screen_key: str | None

    @staticmethod
    def of(encoder: Encoder) -> Loaded:
        return Loaded(engine=encoder.name, screen=encoder.screen, screen_key=encoder.screen_key)


@dataclass(frozen=True, kw_only=True)
class ForkRequest:
    """To the loader, second: how many workers, and the lock that they hold as long as any of them lives."""

    num_workers: int
    lock: Path


@dataclass(frozen=True, kw_only=True)
class Death:
    """From the loader: a worker ended badly; a negative code is a signal's."""

    worker: int
    exit_code: int


@dataclass(frozen=True, kw_only=True)
class Failure:
    """From a worker: what its task raised, with the traceback where it was no error of ours."""

    error: FlameError
    traceback: str | None


class _WithoutPandas(importlib.abc.MetaPathFinder):
    """Says that there is no pandas: Arrow would load it, for 0.3 s in every worker, to see whether a list is of it."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is not loaded in workers", name=fullname)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent does not live any more (Linux; elsewhere pipes tell)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Be the loader: `PARENT CONTROL_FD WORKER_FD...` are its arguments."""
    parent, control_fd, *worker_fds = map(int, sys.argv[1:])
    die_with_parent(parent)
    sys.meta_path.insert(0, _WithoutPandas())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the builder hears Ctrl-C and ends its workers
    control = Connection(control_fd)
    connections = [Connection(fd) for fd in worker_fds]
    try:
        encoder = _load(control.recv())
        control.send(Loaded.of(encoder))
        fork: ForkRequest = control.recv()
    except EOFError:
        return
    except BaseException as error:
        control.send(failure_of(error))
        return
    try:
        with exclusive_lock(fork.lock, what="the tasks of this corpus"):
            _run_workers(connections, fork.num_workers, encoder, control)
    except Exception as error:
        control.send(failure_of(error))


def _load(request: LoadRequest) -> Encoder:
    import flame.preprocess.task  # noqa: F401 (what workers need, before they are forked)

    return load_encoder(
        request.engine,
        request.tokenizer_json,
        request.parse_special,
        say=lambda note: print(note, file=sys.stderr, flush=True),
        screens=request.screens,
        small_input=request.small_input,
        apart=_in_a_fork,
    )


def _in_a_fork(function: Callable[[], T]) -> T:
    """Return what `function` returns in a fork of this process, which then keeps its single thread and its memory."""
    loader = os.getpid()
    receiver, sender = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            die_with_parent(loader)
            sender.send((function(), None))
        except BaseException as error:
            sender.send((None, f"{type(error).__name__}: {error}"))
        finally:
            os._exit(0)
    sender.close()
    try:
        value, trouble = receiver.recv()
    except EOFError:
        value, trouble = None, "the process died"
    os.waitpid(child, 0)
    if trouble is not None:
        raise FlameError(trouble)
    return value


def _run_workers(connections: list[Connection], num_workers: int, encoder: Encoder, control: Connection) -> None:
    loader = os.getpid()
    numbers: dict[int, int] = {}
    for number in range(num_workers):
        child = os.fork()
        if child == 0:
            die_with_parent(loader)
            control.close()
            for other in connections[:number] + connections[number + 1 :]:
                other.close()
            _work(connections[number], encoder)
        numbers[child] = number
    for connection in connections:
        connection.close()
    while numbers:
        child, status = os.wait()
        number, exit_code = numbers.pop(child), os.waitstatus_to_exitcode(status)
        if exit_code != 0:
            control.send(Death(worker=number, exit_code=exit_code))


def _work(connection: Connection, encoder: Encoder) -> None:
    """Run the tasks that arrive until the pipe closes; never returns."""
    try:
        from flame.preprocess.task import run_task

        settings: TaskSettings = connection.recv()
        while True:
            task: Task = connection.recv()
            try:
                run_task(task, settings, encoder, connection.send)
                connection.send(None)
            except BaseException as error:
                connection.send(failure_of(error))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def failure_of(error: BaseException) -> Failure:
    if isinstance(error, FlameError):
        return Failure(error=error, traceback=None)
    detail = " ".join(f"{type(error).__name__}: {error}".split())
    return Failure(error=FlameError("a worker failed", got=detail), traceback=traceback.format_exc())
