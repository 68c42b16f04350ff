"""Beginning a run from weights that exist: `checkpoint.initial_load_path`.

Three kinds of folder are taken: a checkpoint of ours, a Hugging Face model (safetensors), and a DCP folder of the
project that this one succeeds, whose keys are `model.<name>` or bare names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from flame.errors import CheckpointError, TrainingError, UsageError
from flame.files import read_json_object
from flame.train.checkpoint import load_checkpoint, load_foreign_weights
from flame.train.checkpoint_files import COMPLETE, Choice, open_checkpoint
from flame.train.data import TrainingData, same_tokenizer
from flame.train.distributed import World, on_main
from flame.train.foreign import open_foreign, stored_rows
from flame.train.hf_weights import load_hf_weights
from flame.train.log import log
from flame.train.model_config import construct_model

DCP_INDEX = ".metadata"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """A folder of weights: `choice` where it is a checkpoint of ours; `hf_folder` has its config.json, if any has."""

    path: Path
    choice: Choice | None
    hf_folder: Path | None

    @property
    def from_hugging_face(self) -> bool:
        return self.hf_folder == self.path


def find_initial(path: Path, *, weights_only: bool, fast_open: bool) -> InitialWeights:
    """Tell which of the three kinds of folder `path` is.

    Raises `UsageError` where it is not there, `CheckpointError` where it is none of them, is damaged, or holds weights
    only although more is asked for.
    """
    if not path.is_dir():
        raise UsageError("checkpoint.initial_load_path names no folder", got=path)
    if (path / COMPLETE).is_file():
        choice = open_checkpoint(path, fast_open=fast_open)
        if not weights_only and not choice.complete.has_optimizer:
            raise _weights_only(path)
        return InitialWeights(path=path, choice=choice, hf_folder=path / "hf")
    hugging_face, predecessor = (path / CONFIG).is_file(), (path / DCP_INDEX).is_file()
    if not hugging_face and not predecessor:
        raise CheckpointError(
            "checkpoint.initial_load_path holds no weights",
            where=path,
            got=", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "an empty folder",
            expected="a checkpoint (…/checkpoint/step-N), a Hugging Face folder, or a DCP folder of the predecessor",
        )
    if not weights_only:
        raise _weights_only(path)
    return InitialWeights(path=path, choice=None, hf_folder=path if hugging_face else None)


def _weights_only(path: Path) -> CheckpointError:
    return CheckpointError(
        "checkpoint.initial_load_path holds weights only",
        where=path,
        expected="an optimizer's moments too, as checkpoint.initial_load_model_weights_only is off",
        fix="Leave checkpoint.initial_load_model_weights_only away, or name a checkpoint that a run saved",
    )


def load_initial_weights(initial: InitialWeights, model: PreTrainedModel, world: World) -> None:
    """Fill a model that is spread over the ranks; not from Hugging Face's format, which is read before that."""
    if initial.choice is not None:
        load_checkpoint(initial.choice, model=model, optimizer=None, world=world)
    elif not initial.from_hugging_face:
        load_foreign_weights(initial.path, model=model, world=world)


def read_hugging_face(initial: InitialWeights, model: PreTrainedModel, world: World) -> None:
    """Fill the full model on rank 0, before it is spread. Every rank calls it."""
    on_main(f"reading {initial.path}", partial(load_hf_weights, model, initial.path), world)


def read_config(hf_folder: Path | None) -> dict[str, Any] | None:
    """Return the config.json that comes with weights, or None where they come without."""
    path = None if hf_folder is None else hf_folder / CONFIG
    if path is None or not path.is_file():
        return None
    return read_json_object(path, "the configuration that comes with the weights", CheckpointError)


def embedding_rows_of(initial: InitialWeights, config: PretrainedConfig) -> int | None:
    """Return how many embedding rows the predecessor's weights have (it raised the configuration's); None elsewhere."""
    if initial.hf_folder is not None:
        return None
    with torch.device("meta"):
        model = construct_model(config, "sdpa")
    return stored_rows(open_foreign(initial.path, model), model)


def take_generation_config(model: PreTrainedModel, hf_folder: Path | None) -> None:
    """Let the model keep the generation settings that its weights came with."""
    if hf_folder is not None and (hf_folder / GENERATION_CONFIG).is_file():
        model.generation_config = read_generation_config(hf_folder)


def read_generation_config(hf_folder: Path) -> GenerationConfig:
    """Return the generation settings of a folder that has some; `CheckpointError` where they cannot be understood."""
    path = hf_folder / GENERATION_CONFIG
    read_json_object(path, "the generation configuration", CheckpointError)
    try:
        return GenerationConfig.from_pretrained(hf_folder, local_files_only=True)
    except Exception as error:  # transformers raises as its own code happens to fail
        raise CheckpointError(f"the generation configuration cannot be understood: {error}", where=path) from error


def check_vocabulary(hf_folder: Path | None, rows: int, data: TrainingData) -> None:
    """Raise `TrainingError` unless the weights were made for the corpora's tokenizer, and have a row for each token."""
    if rows < data.tokenizer.vocab_size:
        raise TrainingError(
            "the weights have too few embedding rows for the corpora's tokenizer",
            where=hf_folder,
            got=f"{rows} rows",
            expected=f"at least {data.tokenizer.vocab_size}, the tokenizer's vocabulary",
            fix="Build the corpora with the tokenizer of these weights",
        )
    theirs = None if hf_folder is None else hf_folder / "tokenizer.json"
    if theirs is None or not theirs.is_file():
        log.warning("the weights come without a tokenizer.json: nothing tells whether it is the corpora's tokenizer")
        return
    own = data.tokenizer_folder / "tokenizer.json"
    if not same_tokenizer(theirs, own):
        raise TrainingError(
            "the weights were made for another tokenizer than the corpora",
            where=hf_folder,
            got=theirs,
            expected=f"the tokenizer of {own.parent}",
            fix="Build the corpora with the tokenizer of these weights",
        )
