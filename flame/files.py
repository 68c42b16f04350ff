"""Durable files: the only module that renames, and the only one that calls fsync.

What is written here is either whole or absent after a SIGKILL, a power cut or a full disk: a file is written under a
temporary name beside its final one, fsynced, renamed, and its folder fsynced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flame.errors import DiskFullError, FlameError

TEMPORARY_SUFFIX = ".tmp"


def canonical_json(value: Any) -> bytes:
    """Encode `value` as canonical JSON: sorted keys, no spaces, UTF-8, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def sha256_of_json(value: Any) -> str:
    """Return `sha256:<hex>` of the canonical JSON of `value`: how every fingerprint is made."""
    return "sha256:" + hashlib.sha256(canonical_json(value)).hexdigest()


def temporary_path(path: Path) -> Path:
    """Return the name under which `path` is written before it is published."""
    return path.with_name(path.name + TEMPORARY_SUFFIX)


def fsync_folder(folder: Path) -> None:
    """Make the names inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make the bytes of `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, final: Path) -> None:
    """Rename an already fsynced file or folder to its final name, and make the name durable."""
    os.rename(temporary, final)
    fsync_folder(final.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically and durably; the folder is made if absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    with named_disk_errors(path, len(data)):
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically and durably."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any, *, indent: int | None = 2) -> None:
    """Write `value` to `path` as JSON for people (insertion order kept), atomically and durably."""
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n")


def read_json_object(path: Path, what: str, error: type[FlameError]) -> dict[str, Any]:
    """Return the object that a JSON file holds; raises `error` where it is none, calling the file `what`."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as caught:
        raise error(f"{what} is no JSON: {caught}", where=path) from caught
    if not isinstance(value, dict):
        raise error(f"{what} is no JSON object", where=path)
    return value


def append_line(path: Path, line: str, *, durable: bool = False) -> None:
    """Append one line to `path` in a single write; `durable` fsyncs it."""
    assert "\n" not in line, "append_line takes one line"
    data = line.encode("utf-8") + b"\n"
    with named_disk_errors(path, len(data)), open(path, "ab", buffering=0) as file:
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if durable:
            os.fsync(file.fileno())


def move_aside(path: Path, target: Path) -> None:
    """Rename `path` to `target` (made if its folder is absent), refusing to replace anything."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        raise FlameError("a file that would be moved aside has no free name", where=target)
    publish(path, target)


def remove_tree(path: Path) -> None:
    """Delete a folder, or a file, that this program wrote; absent is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=False)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def named_disk_errors(path: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn "no space left" and its kin into one paragraph with the path and the bytes needed."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DiskFullError(
            "no space left on the device",
            where=path,
            got=f"{free_bytes(path):,} bytes free",
            expected=None if needed_bytes is None else f"at least {needed_bytes:,} bytes for this write",
            fix="Free space or choose another disk, then run the same command again: what is complete is kept",
        ) from error


def free_bytes(path: Path) -> int:
    """Return the bytes free on the file system that holds `path` or its nearest existing parent."""
    folder = path
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


@contextlib.contextmanager
def file_lock(path: Path, *, what: str, shared: bool = False, wait: bool = False) -> Iterator[None]:
    """Hold an advisory lock on the file `path` that the kernel frees when its owner dies, however it dies.

    `shared` holds it together with others that do so. Raises `FlameError` at once, naming the owner's process, if
    another holds it; with `wait`, waits instead.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(descriptor, kind | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            owner = os.pread(descriptor, 300, 0).decode("utf-8", "replace").strip()
            raise FlameError(
                f"another process is already working on {what}",
                where=path.parent,
                got=f"a lock held by process {owner}" if owner else "a lock held by other processes",
                fix="Wait for it to end, or stop it, and run this command again",
            ) from error
        os.ftruncate(descriptor, 0)
        if not shared:
            os.pwrite(descriptor, f"{os.getpid()} on {platform.node()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def exclusive_lock(path: Path, *, what: str) -> contextlib.AbstractContextManager[None]:
    """Hold an advisory lock on the file `path` alone; `FlameError` at once if another process holds it."""
    return file_lock(path, what=what)
