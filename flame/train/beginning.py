"""Where a start begins: at the run's own checkpoint, at weights that exist, or at fresh ones; and the table of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flame.train.checkpoint_files import Choice, choose_checkpoint
from flame.train.config import TrainConfig, flatten
from flame.train.exclusions import DATALOADER, MODEL, OPTIMIZER, PARTS_TOLD, TRAIN_STATE, parts_left_out
from flame.train.initial import InitialWeights, find_initial
from flame.train.log import log
from flame.train.refusals import shown
from flame.train.run import changed_options
from flame.train.train_state import TrainState


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a start loads: from `choice`, a checkpoint that it goes on from; from `initial`, weights; or nothing.

    `choice` is the run's own (`is_own`), or `initial` where that is taken whole. `left_out` are the parts of it that
    are not loaded; `changed` are the options that it was saved with other values of: name → (old, new).
    """

    choice: Choice | None
    initial: InitialWeights | None
    is_own: bool
    left_out: frozenset[str]
    changed: Mapping[str, tuple[Any, Any]]

    @property
    def in_data(self) -> Choice | None:
        """The checkpoint whose place in the data is gone on from."""
        return None if TRAIN_STATE in self.left_out else self.choice

    @property
    def path(self) -> Path | None:
        """What is loaded from; None for fresh weights."""
        return self.choice.path if self.choice is not None else None if self.initial is None else self.initial.path


def find_beginning(config: TrainConfig, *, fast_open: bool) -> Beginning:
    """Look at the disk for what a start begins from (rank 0); `fast_open` trusts the sizes of a checkpoint's files.

    Raises what `choose_checkpoint`, `find_initial` and `parts_left_out` do.
    """
    options = config.checkpoint
    own: Choice | None = None
    if options.enable_checkpoint:
        own = choose_checkpoint(config.checkpoint_folder, load_step=options.load_step, fast_open=fast_open)
    initial: InitialWeights | None = None
    weights_only = options.initial_load_model_weights_only
    if options.initial_load_path is not None:
        if own is None:
            initial = find_initial(options.initial_load_path, weights_only=weights_only, fast_open=fast_open)
        else:
            log.info("the run has a checkpoint of its own: checkpoint.initial_load_path is left alone")
    choice = own if initial is None or weights_only else initial.choice
    values = flatten(config)
    changed: dict[str, tuple[Any, Any]] = {}
    if choice is not None and choice.complete.identity is not None:  # not a seed, nor a converted model
        changed = changed_options(choice.path / "config.toml", values)
    return Beginning(
        choice=choice,
        initial=initial,
        is_own=own is not None,
        left_out=parts_left_out(options.exclude_from_loading, choice, values, own=own is not None),
        changed=changed,
    )


def loads_moments(beginning: Beginning, total_steps: int) -> bool:
    """Return whether a start needs the moments of its checkpoint: a finished run's last may hold weights only."""
    choice = beginning.choice
    if choice is None or OPTIMIZER in beginning.left_out:
        return False
    return choice.complete.has_optimizer or choice.step < total_steps


def beginning_told(beginning: Beginning, state: TrainState, *, moments_loaded: bool, load_seconds: float | None) -> str:
    """Return the table of what a start loads and what it does not; `state` is where the run stands after it."""
    path, choice, rows = beginning.path, beginning.choice, dict.fromkeys(PARTS_TOLD, "")
    if path is None:
        return "beginning with fresh weights, at step 0"
    kind = "resumed from" if beginning.is_own else "branching off from" if choice is not None else "beginning with"
    seconds = "" if load_seconds is None else f", loaded in {load_seconds:.1f} s"
    rows[MODEL] = "weights loaded"
    if choice is None:
        rows |= {name: f"not taken: {how}" for name, how in PARTS_TOLD.items() if name != MODEL}
        rows[DATALOADER] = "not taken: the data begin with the first sample"
    else:
        rows[OPTIMIZER] = _moments_told(choice, moments_loaded)
        rows[DATALOADER] = f"{state.consumed_samples:,} samples consumed, data segment {_segment_number(state)}"
        rows[TRAIN_STATE] = f"step {state.step:,}, {state.consumed_tokens:,} tokens"
        rows |= {name: f"left out: {PARTS_TOLD[name]}" for name in beginning.left_out}
    rows["lr_scheduler"] = PARTS_TOLD["lr_scheduler"]
    width = max(map(len, (*rows, *beginning.changed)))
    lines = [f"{kind} {path}: step {state.step:,}, {state.consumed_samples:,} samples consumed{seconds}"]
    lines += [f"  {name:<{width}}  {text}" for name, text in rows.items()]
    lines += [
        f"  {name:<{width}}  was {_typed(old)}, is {_typed(new)}" for name, (old, new) in beginning.changed.items()
    ]
    return "\n".join(lines)


def _typed(value: Any) -> str:
    return "absent" if value is None else shown(value)


def _moments_told(choice: Choice, loaded: bool) -> str:
    if choice.step == 0 and not choice.complete.has_optimizer:
        return "none kept yet: moments begin at zero"
    return "moments loaded" if loaded else "not loaded: the run is finished"


def _segment_number(state: TrainState) -> int:
    return state.data_segments[-1].number if state.data_segments else 0
