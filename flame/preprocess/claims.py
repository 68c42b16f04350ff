"""Which process works on which task, where several build one corpus: a lock a task, which dies with its owner.

The locks are bytes of one file, so that they need no sweeping, and are POSIX locks, which network file systems carry
from machine to machine.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flame.preprocess.folder import CLAIMS


@contextmanager
def claimed(corpus: Path, task: int, *, wait: bool) -> Iterator[bool]:
    """Hold the claim on a task; False where another process holds it and `wait` is not set."""
    path = corpus / CLAIMS
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield _lock(descriptor, task, wait=wait)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, task: int, *, wait: bool) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, task)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return False
    return True
