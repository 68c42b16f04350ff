"""Options that moved: reading text while training, which `flame-preprocess build` now does once, before."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from flame.errors import UsageError
from flame.shards.format import MANIFEST
from flame.train.options import TrainingOptions

_PREPROCESSING = ("dataset_name", "dataset_split", "data_dir", "data_files")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def refuse_preprocessing(training: TrainingOptions, tokenizer: str | None) -> None:
    """Raise `UsageError` with the commands to type, if options ask for text to be read while training."""
    given = {name: getattr(training, name) for name in _PREPROCESSING if getattr(training, name) is not None}
    names = [f"--training.{name}" for name in given] + ["--training.streaming"] * training.streaming
    if names:
        what = f"training no longer reads text, which {' and '.join(names)} would have it do"
        if training.corpora and all(map(_is_built, training.corpora)):
            raise UsageError(what, fix=f"Leave that away: {training.dataset} is built already")
        raise UsageError(what, fix=_commands_to_type(training.corpora or ("DATASET",), given, tokenizer))


def refuse_dataset_name(training: TrainingOptions, tokenizer: str | None) -> None:
    """Raise `UsageError` with the command to type, if the dataset can only be a name such as `owner/dataset`.

    Looks for the folder: to be called when a run starts, not when its options are read.
    """
    if len(training.corpora) == 1 and _is_hub_name(training.corpora[0]):
        what = f"there is no corpus folder {training.corpora[0]}, and training reads no dataset by its name"
        raise UsageError(what, fix=_commands_to_type(training.corpora, {}, tokenizer))


def _commands_to_type(datasets: Sequence[str], given: Mapping[str, str], tokenizer: str | None) -> str:
    outputs = _corpus_folders(datasets, given)
    commands = [
        shlex.join(_build_command(dataset, _dealt(given, index, len(datasets)), tokenizer, output))
        for index, (dataset, output) in enumerate(zip(datasets, outputs, strict=True))
    ]
    built = "a corpus" if len(commands) == 1 else "corpora"
    return f"Build {built} once: {'; '.join(commands)}; then train with --training.dataset {','.join(outputs)}"


def _is_built(dataset: str) -> bool:
    """Whether `dataset` is a corpus or a mixture manifest, and no text."""
    path = Path(dataset)
    folder = path if "@" not in dataset or path.exists() else Path(dataset.rpartition("@")[0])  # PATH@SPLIT
    return (folder / MANIFEST).is_file() or (path.suffix == ".json" and path.is_file())


def _is_hub_name(dataset: str) -> bool:
    """Whether `dataset` can be the name of a dataset only: not even the folder that it would lie in exists."""
    return _HUB_NAME.fullmatch(dataset) is not None and not Path(dataset).parent.exists()


def _dealt(given: Mapping[str, str], index: int, count: int) -> dict[str, str]:
    """Return what belongs to one of several datasets: its part of a list with one part a dataset, else all."""
    parts = {name: value.split(",") for name, value in given.items()}
    return {name: parts[name][index].strip() if len(parts[name]) == count else given[name] for name in given}


def _build_command(dataset: str, given: Mapping[str, str], tokenizer: str | None, output: str) -> list[str]:
    words = ["flame-preprocess", "build", "--dataset", dataset]
    for name, value in given.items():
        if value:
            words += [f"--{name}", value]
    return [*words, "--tokenizer", tokenizer or "TOKENIZER", "--output", output]


def _corpus_folders(datasets: Sequence[str], given: Mapping[str, str]) -> list[str]:
    """Return an output folder for each dataset, none twice."""
    folders: list[str] = []
    for index, dataset in enumerate(datasets):
        name = Path(dataset).name or "corpus"
        if f"corpora/{name}" in folders:
            name += "-" + (_dealt(given, index, len(datasets)).get("dataset_name") or str(index + 1))
        folders.append(f"corpora/{name}" if f"corpora/{name}" not in folders else f"corpora/{name}-{index + 1}")
    return folders
