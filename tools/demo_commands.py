"""How the demo runs a command: as a reader would type it, offline, and with its failure made the demo's own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
_LINE_WIDTH = 96
_LAUNCH_VARIABLES = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NGPU", "NNODES", "NODE_RANK", "GROUP_RANK")
)


class DemoError(Exception):
    """The demo did not show what it is there to show."""


def say(text: str) -> None:
    """Print at once: the commands' own lines, on stderr, stand between ours."""
    print(text, flush=True)


def script(name: str) -> Path:
    """Return a console script of the environment that runs the demo. Raises `DemoError` where it is not installed."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise DemoError(f"{path} is absent: install Flame in this environment, `pip install --editable '.[plot]'`")
    return path


def environment() -> dict[str, str]:
    """Return this process's environment, offline, and without what would make its children ranks of another run."""
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCH_VARIABLES}
    return {**kept, "HF_HUB_OFFLINE": "1"}


def announce(command: Sequence[object]) -> list[str]:
    """Print a command so that it can be typed again here, and return its words."""
    words = [str(word) for word in command]
    lines = [_shown(command[0])]
    for index, word in enumerate(command[1:], start=1):
        text = _shown(word)
        # An option stays on one line with its value.
        width = len(text) + (len(_shown(command[index + 1])) + 1 if index + 1 < len(command) else 0)
        if text.startswith("--") and len(lines[-1]) + width > _LINE_WIDTH:
            lines.append(text)
        else:
            lines[-1] += f" {text}"
    say("    $ " + " \\\n        ".join(lines))
    return words


def call(command: Sequence[object]) -> None:
    """Print and run a command. Raises `DemoError` unless it exits 0."""
    words = announce(command)
    code = subprocess.run(words, env=environment(), check=False).returncode
    if code != 0:
        raise DemoError(f"`{Path(words[0]).name}` exited {code}; its reason stands above")


def _shown(word: object) -> str:
    """A word as one would type it: a path below the working directory relative to it."""
    text = str(word)
    if isinstance(word, Path) and word.is_absolute() and word.is_relative_to(Path.cwd()):
        text = str(word.relative_to(Path.cwd()))
    return shlex.quote(text)
