"""A signal asks a run to stop; the loop answers at the next step, after a complete save.

SIGTERM and SIGUSR1 set a flag and do nothing else: a second one changes nothing. SIGINT (Ctrl-C) keeps Python's own
meaning and stops at once, without a save.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_PREEMPTED = 75


def hold_stop_signals() -> None:
    """Let stop signals wait, in this process and those that it starts, until `StopRequest.install` takes them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


@contextlib.contextmanager
def stop_signals_held() -> Iterator[None]:
    """Let stop signals wait while the block comes to `StopRequest.install`: imports alone take seconds."""
    hold_stop_signals()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


class StopRequest:
    """The flag that a stop signal sets; `received` is the signal, or None."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def install(self) -> None:
        """Catch the stop signals from now on, and those that were held (main thread only)."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
