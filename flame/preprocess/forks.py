"""Processes beside this one: forks of a single thread, what they return, how they died, and who hears Ctrl-C."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Pipe
from typing import TypeVar

from flame.errors import FlameError

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1


class ForkDiedError(FlameError):
    """The fork died before it had an answer; `how` says of what."""

    def __init__(self, how: str) -> None:
        self.how = how
        super().__init__("the process died", got=how)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent does not live any more (Linux; elsewhere pipes tell)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Let a process that is started in here ignore Ctrl-C: this one takes it, and ends the others."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def in_a_fork(function: Callable[[], T]) -> T:
    """Return what `function` returns in a fork of this process, which then keeps its single thread and its memory.

    Raises `FlameError` with the words of what it raises there, and `ForkDiedError` if the fork dies.
    """
    parent = os.getpid()
    receiver, sender = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            die_with_parent(parent)
            sender.send((function(), None))
        except BaseException as error:
            sender.send((None, f"{type(error).__name__}: {error}"))
        finally:
            os._exit(0)
    sender.close()
    try:
        value, trouble = receiver.recv()
    except EOFError:
        _, status = os.waitpid(child, 0)
        raise ForkDiedError(exit_in_words(os.waitstatus_to_exitcode(status))) from None
    finally:
        receiver.close()
    os.waitpid(child, 0)
    if trouble is not None:
        raise FlameError(trouble)
    return value


def exit_in_words(code: int) -> str:
    """Return how a process ended, from its exit code as Python gives it."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    hints = {"SIGKILL": ", as the system does when memory runs out", "SIGSEGV": ", a crash", "SIGABRT": ", a crash"}
    return f"killed by {name}{hints.get(name, '')}"
