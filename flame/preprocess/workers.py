"""The processes of the local executor: one that loads the tokenizer, and its forks, which run tasks.

    builder ── control pipe ──> loader: imports, loads the engine, forks a worker when asked, reports those that die
       └────── a pipe each ───> workers: receive a task, run it, send progress and the outcome

The tokenizer and the libraries are loaded once, and shared by all workers' memory. The loader is a fresh process with
a single thread when it forks, so that the builder may hold any threads or libraries. Every process dies with its
parent, and the workers hold a lock until the last of them is gone.
"""

from __future__ import annotations

import gc
import importlib.abc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flame.errors import FlameError
from flame.files import file_lock
from flame.preprocess.engine_check import Encoder, load_encoder
from flame.preprocess.engine_screen import Screen
from flame.preprocess.engines import give_memory_back
from flame.preprocess.forks import die_with_parent, in_a_fork

if TYPE_CHECKING:
    from flame.preprocess.plan import Task
    from flame.preprocess.reports import Progress

# One thread a process: the processes are the parallelism, and a fork must find no other thread (an allocator of Arrow's
# would start one when it is imported).
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # so that what Arrow frees can be given back
}


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """From the loader: the engine that was taken, and the screen that it stands behind."""

    engine: str = ""
    screen: Screen | None = None
    screen_key: str | None = None

    @staticmethod
    def of(encoder: Encoder) -> Loaded:
        return Loaded(engine=encoder.name, screen=encoder.screen, screen_key=encoder.screen_key)


class Request(Protocol):
    """To the loader, first: loads what every task needs. It answers `Loaded`, or a failure."""

    def load(self) -> tuple[Any, Loaded]: ...


class Settings(Protocol):
    """What every task of a build is told, and how it is run with what the request loaded.

    `careful` says that workers have died of the task. `wait` waits for another process that has claimed the task;
    else the answer is False, and nothing was done.
    """

    def run(
        self, task: Task, tool: Any, report: Callable[[Progress], None], *, careful: bool = False, wait: bool = True
    ) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """Which engine, on which tokenizer.

    `screens` are files that may hold the engine's screen, `small_input` says that a screen is not worth its time.
    """

    engine: str
    tokenizer_json: bytes
    parse_special: bool
    screens: tuple[Path, ...] = ()
    small_input: bool = False

    def load(self) -> tuple[Encoder, Loaded]:
        import flame.preprocess.task  # noqa: F401 (what workers need, before they are forked)

        encoder = load_encoder(
            self.engine,
            self.tokenizer_json,
            self.parse_special,
            say=lambda note: print(note, file=sys.stderr, flush=True),
            screens=self.screens,
            small_input=self.small_input,
            apart=in_a_fork,
        )
        return encoder, Loaded.of(encoder)


@dataclass(frozen=True, kw_only=True)
class Start:
    """To the loader, second: the lock that workers hold as long as any lives; `shared` with other builders' workers.

    From then on it forks a worker for each number that is sent, with the worker's end of its pipe behind it.
    """

    lock: Path
    shared: bool


@dataclass(frozen=True, kw_only=True)
class Order:
    """To a worker: a task, and how it is to be run."""

    task: Task
    careful: bool
    wait: bool


@dataclass(frozen=True, kw_only=True)
class Done:
    """From a worker: it ran its task; or it did not, for another process has claimed it."""

    busy: bool


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


def send_connection(control: Connection, connection: Connection) -> None:
    """Send one end of a pipe through another."""
    with socket.socket(fileno=os.dup(control.fileno())) as stream:
        socket.send_fds(stream, [b"\0"], [connection.fileno()])


def _receive_connection(control: Connection) -> Connection:
    with socket.socket(fileno=os.dup(control.fileno())) as stream:
        _, descriptors, _, _ = socket.recv_fds(stream, 1, 1)
    if not descriptors:
        raise EOFError
    return Connection(descriptors[0])


def main() -> None:
    """Be the loader: `PARENT CONTROL_FD` are its arguments."""
    parent, control_fd = map(int, sys.argv[1:])
    die_with_parent(parent)
    sys.meta_path.insert(0, _WithoutPandas())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the builder hears Ctrl-C and ends its workers
    control = Connection(control_fd)
    try:
        request: Request = control.recv()
        gc.disable()  # nothing of what is loaded is garbage, and
        tool, loaded = request.load()
        gc.freeze()  # collections in the workers would copy the pages that they share
        gc.enable()
        del request  # the tokenizer's JSON: 11 MB of it
        give_memory_back()
        control.send(loaded)
        start: Start = control.recv()
    except EOFError:
        return
    except BaseException as error:
        control.send(failure_of(error))
        return
    try:
        with file_lock(start.lock, what="the tasks of this corpus", shared=start.shared):
            _serve(control, tool)
    except Exception as error:
        with suppress(OSError):
            control.send(failure_of(error))


def _serve(control: Connection, tool: object) -> None:
    """Fork the workers that are asked for and tell of their deaths, until the builder closes the pipe and all ended."""
    wake, woken = os.pipe()  # a byte for each child that ends
    for end in (wake, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    numbers: dict[int, int] = {}
    open_ = True
    while open_ or numbers:
        ready = wait([control, wake] if open_ else [wake])
        if wake in ready:
            os.read(wake, 4096)
            _tell_deaths(control, numbers)
        if control in ready:
            try:
                number = control.recv()
                connection = _receive_connection(control)
            except (EOFError, OSError):
                open_ = False
                continue
            numbers[_fork(control, connection, tool)] = number
            connection.close()


def _fork(control: Connection, connection: Connection, tool: object) -> int:
    loader = os.getpid()
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent(loader)
        control.close()
        _work(connection, tool)
    return child


def _tell_deaths(control: Connection, numbers: dict[int, int]) -> None:
    while numbers:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            return
        number, exit_code = numbers.pop(child), os.waitstatus_to_exitcode(status)
        if exit_code != 0:
            with suppress(OSError):
                control.send(Death(worker=number, exit_code=exit_code))


def _work(connection: Connection, tool: object) -> None:
    """Run the tasks that arrive until the pipe closes; never returns."""
    try:
        settings: Settings = connection.recv()
        while True:
            order: Order = connection.recv()
            try:
                ran = settings.run(order.task, tool, connection.send, careful=order.careful, wait=order.wait)
                connection.send(Done(busy=not ran))
            except BaseException as error:
                connection.send(failure_of(error))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def failure_of(error: BaseException) -> Failure:
    """Return an error as it is sent to the builder."""
    if isinstance(error, FlameError):
        return Failure(error=error, traceback=None)
    detail = " ".join(f"{type(error).__name__}: {error}".split())
    again = "Run it again with --debug for the traceback: finished tasks are kept"
    return Failure(error=FlameError("a worker failed", got=detail, fix=again), traceback=traceback.format_exc())
