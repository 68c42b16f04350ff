"""A Hugging Face folder → a step-0 checkpoint, from which `flame-train` goes on: the weights, bit for bit.

The weights stay in their mapped files until they are written, one tensor at a time; there is no copy in memory.
"""

from __future__ import annotations

import re
from pathlib import Path

from flame.errors import CheckpointError, UsageError
from flame.export.dtypes import main_dtype
from flame.export.skeleton import build_skeleton, skeleton_files
from flame.near import near_path
from flame.train.checkpoint import save_checkpoint
from flame.train.checkpoint_files import checkpoint_steps
from flame.train.checkpoint_tensors import named_tensors
from flame.train.distributed import join_world
from flame.train.hf_names import match_names
from flame.train.hf_weights import open_weights
from flame.train.train_state import TrainState

_STEP_ZERO = "step-0"
_CONFIG_TOML = "# A Hugging Face model, not yet trained here.\n"


def convert_folder(
    model: Path, output: Path, *, tokenizer: Path | None = None, trust_remote_code: bool = False
) -> Path:
    """Write the step-0 checkpoint `output` of the Hugging Face folder `model`, and return its path.

    Every tensor keeps its number format; training begins from the same numbers in fp32. `tokenizer` is a folder to take
    the tokenizer from instead. Raises `UsageError` for paths, `CheckpointError`, `TokenizerError` or `TrainingError`
    for what the folder holds; nothing is left then.
    """
    for folder, marker in ((model, "config.json"), (tokenizer, "tokenizer.json")):
        if folder is not None and not folder.is_dir():
            raise UsageError("there is no such folder", where=folder, fix=near_path(folder, marker))
    check_output(output)
    if not (model / "config.json").is_file():
        raise CheckpointError(
            "the folder is not a Hugging Face model",
            where=model,
            got="no config.json",
            expected="config.json, *.safetensors and a tokenizer, as save_pretrained writes them",
        )
    skeleton = build_skeleton(model, trust_remote_code=trust_remote_code)
    weights = open_weights(model)
    found = {name: (tensor.size(), tensor.dtype) for name, tensor in weights.items()}
    names = match_names(skeleton, found, weights.__getitem__, model)
    dtype = main_dtype(found[name] for name in names.values())
    files = skeleton_files(skeleton, tokenizer or model, dtype)
    if trust_remote_code:
        files |= {path.name: path.read_bytes() for path in sorted(model.glob("*.py"))}
    skeleton.load_state_dict({own: weights[name] for own, name in names.items()}, strict=False, assign=True)
    skeleton.tie_weights()
    assert named_tensors(skeleton).keys() == names.keys(), "tying changed what is kept"
    assert not any(tensor.is_meta for tensor in named_tensors(skeleton).values()), "a tensor was not loaded"
    with join_world(replicate=1, shard=None, init_timeout_seconds=60, shutdown_timeout_seconds=60) as world:
        return save_checkpoint(
            output.parent,
            model=skeleton,
            optimizer=None,
            state=TrainState(),
            identity=None,
            config_toml=_CONFIG_TOML,
            hf_files=files,
            world=world,
        )


def check_output(output: Path) -> None:
    """Raise `UsageError` unless `output` can become the step-0 checkpoint of a run that has none yet."""
    if output.name != _STEP_ZERO:
        raise UsageError(
            "the output is not named step-0, so that flame-train would not find it",
            where=output,
            fix=f"Name it {_proposal(output)}, in the folder of the run that is to begin from it",
        )
    if output.exists() or output.is_symlink():
        raise UsageError("the output is there already", where=output, fix="Choose another --output, or delete it")
    if steps := checkpoint_steps(output.parent):
        raise UsageError(
            "the run has checkpoints already, and would go on from the latest of them instead",
            where=output.parent,
            got=", ".join(f"step-{step}" for step in steps),
            fix="Choose the folder of a run that has not begun",
        )


def _proposal(output: Path) -> Path:
    if output.name == "checkpoint":
        return output / _STEP_ZERO
    if re.fullmatch(r"step-?[0-9]*", output.name) or output.parent.name == "checkpoint":
        return output.with_name(_STEP_ZERO)
    return output / "checkpoint" / _STEP_ZERO
