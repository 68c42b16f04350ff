"""What a run draws from its start on: the mixture, how samples become steps, in which order, and what is held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flame.errors import CheckpointError
from flame.sampling.geometry import BatchGeometry, default_window_len
from flame.sampling.history import mixture_name
from flame.sampling.mixture import Mixture
from flame.sampling.mixture_file import read_mixture
from flame.sampling.position import DataPosition, check_windows_drawn, data_position
from flame.sampling.sampler import Sampler, check_packs
from flame.train.beginning import Beginning
from flame.train.checkpoint_files import Choice
from flame.train.config import TrainConfig
from flame.train.data import TrainingData, check_tokenizer, open_training_data, open_validation_splits
from flame.train.exclusions import DATALOADER
from flame.train.identity import DataIdentity, settle_data_identity
from flame.train.train_state import DataSegment, TrainState
from flame.train.validation import ValidationSet, validation_sets


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data of a run as it is configured now; `total_steps` are those of the whole run."""

    data: TrainingData
    identity: DataIdentity
    geometry: BatchGeometry
    sampler: Sampler
    validation_sets: Sequence[ValidationSet]
    total_steps: int

    def in_segment(self, state: TrainState) -> TrainState:
        """Return where the run stands in its data segment: at the first sample of one that begins here."""
        if state.data_segments and state.data_segments[-1].number == self.identity.data_segment:
            return state
        segment = DataSegment(
            number=self.identity.data_segment,
            mixture_fingerprint=self.identity.mixture_fingerprint,
            data_seed=self.identity.segment_seed,
            first_step=state.step + 1,
        )
        return replace(state, consumed_samples=0, data_segments=(*state.data_segments, segment))

    def position_at(self, state: TrainState) -> DataPosition:
        """Return where `state` stands in the data, and what the run draws from there on."""
        return data_position(
            self.sampler,
            consumed_samples=state.consumed_samples,
            last_sample=self._last_sample(state),
            data_segment=self.identity.data_segment,
        )

    def check_caps(self, state: TrainState) -> None:
        """Raise `MixtureError` where the rest of the run, from `state` on, would pass a source's max_epochs."""
        check_windows_drawn(self.sampler, self._last_sample(state))

    def _last_sample(self, state: TrainState) -> int:
        steps = max(self.total_steps - state.step, 0)
        return state.consumed_samples + steps * self.geometry.samples_per_step


def open_run_data(config: TrainConfig, beginning: Beginning, dp_size: int) -> RunData:
    """Open the data that a start draws from on `dp_size` ranks, and refuse others than the run's own."""
    options = config.training
    data = open_training_data(
        config.dataset, options.data_probs, options.seed, moved=options.source, packed_len=options.packed_len
    )
    check_tokenizer(config.model.tokenizer_path, data)
    geometry = _batch_geometry(config, dp_size, beginning.in_data, data.mixture)
    identity = _settled_identity(config, beginning, data, geometry.window_len)
    return RunData(
        data=data,
        identity=identity,
        geometry=geometry,
        sampler=Sampler(replace(data.mixture, data_seed=identity.segment_seed), data.splits, geometry.window_len),
        validation_sets=validation_sets(
            open_validation_splits(config.validation.dataset, data),
            window_len=geometry.window_len,
            num_tokens=config.validation.tokens,
        ),
        total_steps=config.total_steps(geometry.tokens_per_step),
    )


def _batch_geometry(config: TrainConfig, dp_size: int, choice: Choice | None, mixture: Mixture) -> BatchGeometry:
    """Return how samples become steps; a resumed run keeps its window_len unless another is asked for."""
    training = config.training
    check_packs(mixture, varlen=training.varlen)
    window_len = training.window_len or mixture.packed_len
    if window_len is None and choice is not None and choice.complete.identity is not None:
        window_len = choice.complete.identity.window_len
    if window_len is None:
        window_len = default_window_len(training.seq_len, training.longest_sequence, varlen=training.varlen)
    return BatchGeometry(
        seq_len=training.seq_len,
        window_len=window_len,
        context_len=training.longest_sequence,
        micro_batch=training.batch_size,
        accumulation=training.gradient_accumulation_steps,
        dp_size=dp_size,
        varlen=training.varlen,
    )


def _settled_identity(config: TrainConfig, beginning: Beginning, data: TrainingData, window_len: int) -> DataIdentity:
    """Return what the data are, with the number of their data segment; `CheckpointError` for others than the run's."""
    identity, choice = data.identity(window_len), beginning.in_data
    if choice is None:
        return identity
    begins_anew = DATALOADER in beginning.left_out
    allow_change = config.checkpoint.allow_data_change or begins_anew
    extends = _goes_on(data.mixture, choice, config.job.dump_folder, window_len, allow_change=allow_change)
    identity = settle_data_identity(
        choice.complete.identity, identity, extends=extends, allow_change=allow_change, where=choice.path
    )
    saved = choice.complete.identity
    return replace(identity, data_segment=saved.data_segment + 1) if begins_anew and saved is not None else identity


def _goes_on(mixture: Mixture, choice: Choice, folder: Path, window_len: int, *, allow_change: bool) -> bool:
    """Return whether the mixture is an edit of the run's own that changes nothing which was drawn.

    One that does is a change of the data: unless these may change, `CheckpointError` tells from where on it could not.
    """
    saved, consumed = choice.complete.identity, choice.complete.consumed_samples
    if saved is None or saved.mixture_fingerprint == mixture.fingerprint:
        return False
    kept = folder / mixture_name(saved.mixture_fingerprint)
    if not kept.is_file():
        return False
    earlier = read_mixture(kept)
    goes_on = mixture.is_continuation_of(earlier, consumed_samples=consumed, window_len=window_len)
    changed = mixture.changes_from(earlier)
    if not goes_on and changed is not None and saved.window_len == window_len and not allow_change:
        raise CheckpointError(
            "the run has passed the token from which its mixture was edited",
            where=choice.path,
            got=f"an edit from token {changed:,} on, {consumed * window_len:,} tokens consumed",
            fix=f"Edit it from a later token on: flame-mix edit --run {folder} --start …; or go on from an earlier "
            "checkpoint: --checkpoint.load_step",
        )
    return goes_on
