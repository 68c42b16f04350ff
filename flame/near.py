"""What a path that is not there was probably meant to be."""

from __future__ import annotations

import difflib
from pathlib import Path


def near_path(path: Path, marker: str) -> str | None:
    """Return "Did you mean configs/llama.json?" where something beside an absent `path` is called nearly so, else None.

    It is a JSON file, with or without its ending, or a folder that holds a file named `marker`. `~` is the home folder.
    """
    path = path.expanduser() if path.parts[:1] == ("~",) else path
    folder = path.parent
    found = {file.stem: file for file in folder.glob("*.json")}
    found |= {file.parent.name: file.parent for file in folder.glob(f"*/{marker}")}
    near = difflib.get_close_matches(path.name.removesuffix(".json"), found, n=1)
    return f"Did you mean {found[near[0]]}?" if near else None
