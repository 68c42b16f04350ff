"""The weights in a DCP folder of the project that this one succeeds: keys `model.<name>`, or bare names.

Its optimizer, schedule and loader states are left alone; it has no complete.json, no configuration and no tokenizer.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from flame.errors import CheckpointError
from flame.train.checkpoint_tensors import MODEL_PREFIX, StoredModel, named_tensors
from flame.train.hf_names import match_names


def open_foreign(checkpoint: Path, model: PreTrainedModel) -> StoredModel:
    """Return the tensors that may be those of `model` (which may be on the meta device).

    Raises `CheckpointError` where the folder has none.
    """
    stored = StoredModel(checkpoint, prefix="")
    if named_tensors(model).keys() <= stored.tensors.keys():
        tops = {name.partition(".")[0] for name in model.state_dict()}
        stored.tensors = {name: kind for name, kind in stored.tensors.items() if name.partition(".")[0] in tops}
    else:
        stored = StoredModel(checkpoint, prefix=MODEL_PREFIX)
    if not stored.tensors:
        raise CheckpointError("the folder holds no model", where=checkpoint, expected="keys such as model.<name>")
    return stored


def stored_rows(stored: StoredModel, model: PreTrainedModel) -> int | None:
    """Return how many embedding rows the weights have: the predecessor raised the configuration's to the tokenizer's.

    None where they have no embedding under the model's name.
    """
    embedding = model.get_input_embeddings().weight
    name = next(name for name, tensor in named_tensors(model).items() if tensor is embedding)
    return int(stored.tensors[name][0][0]) if name in stored.tensors else None


def check_foreign(stored: StoredModel, model: PreTrainedModel) -> None:
    """Raise `CheckpointError` unless the weights are those of `model`, under its own names (see `match_names`)."""
    names = match_names(model, stored.tensors, stored.read, stored.checkpoint)
    if foreign := [name for own, name in names.items() if own != name]:
        raise CheckpointError(
            "the weights have other names than the model's", where=stored.checkpoint, got=", ".join(foreign[:4])
        )
