"""The code that an export takes along, where its model is not one of transformers' own.

By transformers' own convention: a class that was told `register_for_auto_class` is saved with its file, with what that
file imports relatively, and with an entry in `auto_map`. Code that came with a folder (`trust_remote_code`) was told so
by transformers.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from torch.distributed.fsdp import FSDPModule
from transformers.dynamic_module_utils import get_relative_import_files

from flame.errors import TrainingError


def code_files(model: Any) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the files of Python that belong to a model, by name, and config.json's `auto_map`: both may be empty.

    `model` may be sharded. Raises `TrainingError` for code that does not fit into one folder.
    """
    files: dict[str, bytes] = {}
    auto_map: dict[str, str] = {}
    # A model that fully_shard has been at is of a class made of FSDPModule and its own.
    model_class = type(model).__bases__[1] if isinstance(model, FSDPModule) else type(model)
    for kind in (type(model.config), model_class):
        auto_class = getattr(kind, "_auto_class", None)
        if auto_class is None:
            continue
        main = Path(inspect.getfile(kind))
        auto_map[auto_class] = f"{main.stem}.{kind.__name__}"
        for path in (main, *map(Path, get_relative_import_files(main))):
            files[path.name] = _read(path, main)
    return files, auto_map


def _read(path: Path, main: Path) -> bytes:
    if path.parent != main.parent or not path.is_file():
        raise TrainingError(
            "the model's code cannot go into an export: it imports relatively what does not lie beside it",
            where=main,
            got=str(path),
            expected="files of one folder, imported as `from .name import …`",
            fix="Move the code into one folder, or leave register_for_auto_class away",
        )
    return path.read_bytes()
