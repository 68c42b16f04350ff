"""What of a checkpoint a start does not load: `checkpoint.exclude_from_loading`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from flame.errors import UsageError
from flame.train.checkpoint_files import Choice
from flame.train.log import log
from flame.train.run import changed_options

MODEL, OPTIMIZER, TRAIN_STATE, DATALOADER = "model", "optimizer", "train_state", "dataloader"
_OPTION = "checkpoint.exclude_from_loading"
PARTS_TOLD = {
    MODEL: "weights begin as they are made from training.seed",
    OPTIMIZER: "moments begin at zero",
    "lr_scheduler": "never kept: the learning rate is the configuration's, at the run's step",
    DATALOADER: "a new data segment begins, with its first sample",
    TRAIN_STATE: "the run begins at step 0, and its data with the first sample",
}


def parts_left_out(
    names: Collection[str], choice: Choice | None, values: Mapping[str, Any], *, own: bool
) -> frozenset[str]:
    """Return which parts of `choice`, the checkpoint to go on from, are not to be loaded; says so where that is none.

    `own`: it is the run's own checkpoint. Of these, one that was saved with the same exclusions is loaded whole: they
    were heeded when the run went on from an earlier one, and the same command must be able to go on. `values` is the
    configuration, flattened. Raises `UsageError` where a run would begin anew in a folder that holds its later steps.
    """
    if not names:
        return frozenset()
    if choice is None:
        log.info("%s: no checkpoint is gone on from, so it changes nothing", _OPTION)
        return frozenset()
    saved: Collection[str] = ()
    if own:
        saved, _ = changed_options(choice.path / "config.toml", values).get(_OPTION, (names, names))
    parts = [name for name in PARTS_TOLD if name in names and name not in (saved or ())]
    if own and TRAIN_STATE in parts:
        raise UsageError(
            f"--{_OPTION} train_state would begin the run again at step 0, in the folder of its later steps",
            got=choice.path,
            fix="Give it as --checkpoint.initial_load_path to a run with another job.dump_folder, "
            "with --checkpoint.initial_load_model_weights_only false",
        )
    if not parts:
        log.info(
            "%s was heeded when this run went on from an earlier checkpoint: %s is loaded whole", _OPTION, choice.path
        )
    return frozenset(parts)
