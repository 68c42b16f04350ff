"""Folders that `datasets`' save_to_disk writes: which of their files are the rows, and their splits.

FOLDER/state.json, dataset_info.json, data-00000-of-00002.arrow …        a Dataset
FOLDER/dataset_dict.json, FOLDER/train/…, FOLDER/validation/…            a DatasetDict
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from flame.errors import InputError

STATE = "state.json"
SPLITS = "dataset_dict.json"
COPY_AGAIN = "Copy the whole folder again, or save the dataset again"
SAVED_NOTES = (STATE, "dataset_info.json")


def split_names(folder: Path) -> list[str]:
    """Return the splits of a saved DatasetDict."""
    names = _read_json(folder / SPLITS).get("splits")
    return [str(name) for name in names] if isinstance(names, list) else []


def chosen_split(folder: Path, split: str | None) -> str:
    """Return the split to read: the one that is asked for, else the only one."""
    names = split_names(folder)
    if split is None and len(names) != 1:
        raise InputError(
            "the saved dataset has several splits, and a corpus is made of one",
            where=folder,
            got=", ".join(names) or "none",
            fix=f"Name one: --dataset_split {names[0] if names else 'NAME'}",
        )
    if split is not None and split not in names:
        raise InputError(
            "the saved dataset has no such split", where=folder, got=split, expected=" or ".join(names) or "none"
        )
    return split if split is not None else names[0]


def saved_files(folder: Path) -> list[str] | None:
    """Return the files of a saved Dataset in its order; None where `STATE` is not one that `datasets` wrote.

    Other .arrow files there are what `datasets` cached of computations: no rows of the dataset.
    """
    state = _read_json(folder / STATE)
    if "_data_files" not in state:
        return None
    if state.get("_indices_data_files"):
        raise InputError(
            "the dataset was saved with a selection of its rows beside them, which is not read",
            where=folder / STATE,
            fix="Save it again: datasets.load_from_disk(OLD).flatten_indices().save_to_disk(NEW)",
        )
    try:
        paths = [os.path.normpath(folder / entry["filename"]) for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise InputError(
            "the saved dataset does not name its files", where=folder / STATE, got=repr(error), fix=COPY_AGAIN
        ) from error
    for path in paths:
        if not Path(path).is_file():
            raise InputError("a file of the saved dataset is absent", where=path, fix=COPY_AGAIN)
    return paths


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"a file of the saved dataset is no JSON: {error}", where=path, fix=COPY_AGAIN) from error
    return value if isinstance(value, dict) else {}
