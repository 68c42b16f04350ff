"""What is costly to find out about a tokenizer and stays true: small JSON files in the user's cache.

Each holds the key that it was kept under, which names all that its value depends on. A file that is absent, damaged or
of another key is as good as none, and one that cannot be written is passed over: all of it can be found out again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flame.errors import FlameError
from flame.preprocess.records import read_record, write_record


def user_cache(kind: str, key: str) -> Path:
    """Return where the user's cache keeps what is known under `key`, a `sha256:<hex>`."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "flame" / f"{kind}-{key.removeprefix('sha256:')[:32]}.json"


def read_kept(paths: Iterable[Path], key: str) -> dict[str, Any] | None:
    """Return the value of the first file that was kept under `key`; None where there is none."""
    for path in paths:
        with contextlib.suppress(OSError, ValueError, TypeError):
            value = read_record(path)
            if value.pop("key", None) == key:
                return value
    return None


def keep(path: Path, key: str, value: dict[str, Any]) -> None:
    """Keep a value under its key, where the folder can be written."""
    with contextlib.suppress(OSError, FlameError):
        write_record(path, {"key": key} | value, indent=None)
