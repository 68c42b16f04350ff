"""Programs that a test starts, waits for and kills, and the small disks that they run into the end of."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from flame.preprocess.folder import TASKS
from tests.builds import environment

SECONDS_TO_WAIT = 120


def until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> bool:
    """Wait for a condition of the outside world; False if it does not come, at once if the process ends without it."""
    deadline = time.monotonic() + SECONDS_TO_WAIT
    while time.monotonic() < deadline:
        ended = process is not None and process.poll() is not None
        if condition():
            return True
        if ended:
            return False
        time.sleep(0.002)
    return False


@contextlib.contextmanager
def running(words: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own, which ends with the test: its workers too, should they outlive it."""
    process = subprocess.Popen(
        words,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def processes_of(parent: int) -> list[int]:
    """The loader and the workers that serve a build or a conversion, as the kernel lists them."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if b"flame.preprocess.workers" in b" ".join(words) and str(parent).encode() in words:
                found.append(int(entry.name))
    return sorted(found)


def receipts(corpus: Path) -> int:
    """How many tasks of a build or a conversion are done."""
    return len(list((corpus / TASKS).glob("task-*.json")))


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[None]:
    """A file system of that size in a new folder; skips where this user may not mount one."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a tmpfs needs privileges")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder that nothing can be written into, whoever tries; skips where this user may not mount it so."""
    mounts = (["--bind", str(folder), str(folder)], ["-o", "remount,ro,bind", str(folder)])
    if subprocess.run(["mount", *mounts[0]], capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a folder needs privileges")
    try:
        subprocess.run(["mount", *mounts[1]], check=True)
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
