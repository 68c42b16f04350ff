"""Everything before step 1: the data, the model, the checkpoint to go on from, and the run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch.optim import Optimizer

from flame.sampling.history import Segment, mixture_name
from flame.sampling.mixture import Mixture
from flame.sampling.mixture_file import read_mixture
from flame.sampling.position import DataPosition, check_windows_drawn, data_position
from flame.sampling.sampler import BatchGeometry, Sampler, check_packs, default_window_len
from flame.train.checkpoint import DataSegment, TrainState, agree_on_checkpoint, load_checkpoint
from flame.train.checkpoint_files import Choice, abandon_later
from flame.train.config import TrainConfig, flatten, to_toml
from flame.train.data import TrainingData, check_tokenizer, open_training_data, open_validation_splits
from flame.train.distributed import World, on_main
from flame.train.exclusions import DATALOADER, MODEL, OPTIMIZER, TRAIN_STATE, parts_left_out
from flame.train.flops import ModelFlops, model_flops
from flame.train.identity import DataIdentity, settle_data_identity
from flame.train.initial import (
    InitialWeights,
    agree_on_initial,
    load_initial_weights,
)
from flame.train.log import log
from flame.train.model import CausalLMLoss
from flame.train.model_setup import build_for_run
from flame.train.optimizer import build_optimizer
from flame.train.run import (
    SegmentEntry,
    abandon_metrics,
    append_segment,
    changed_options,
    check_shared_folder,
    check_start,
    keep_mixture,
    write_config,
    write_status,
)
from flame.train.validation import ValidationSet, validation_sets


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, ready for its next step. `latest` is the checkpoint that `state` was loaded from, if any."""

    config: TrainConfig
    world: World
    data: TrainingData
    identity: DataIdentity
    geometry: BatchGeometry
    sampler: Sampler
    validation_sets: Sequence[ValidationSet]
    module: CausalLMLoss
    optimizer: Optimizer
    flops: ModelFlops | None
    num_embeddings: int
    hf_files: Mapping[str, bytes]
    state: TrainState
    latest: Path | None
    segment: SegmentEntry

    @property
    def total_steps(self) -> int:
        return self.config.total_steps(self.geometry.tokens_per_step)

    @property
    def warmup_steps(self) -> int:
        return self.config.warmup_steps(self.geometry.tokens_per_step)

    def position_at(self, state: TrainState) -> DataPosition:
        """Return where `state` stands in the data, and what the run draws from there on."""
        return data_position(
            self.sampler,
            consumed_samples=state.consumed_samples,
            last_sample=_last_sample(self.config, self.geometry, state),
            data_segment=self.identity.data_segment,
        )


def prepare(config: TrainConfig, world: World, argv: Sequence[str]) -> Run:
    """Open, build, load and check all that a run needs; every rank calls it. Raises before anything is trained."""
    if config.training.deterministic:
        torch.use_deterministic_algorithms(True)
    options = config.training
    data = open_training_data(
        config.dataset, options.data_probs, options.seed, moved=options.source, packed_len=options.packed_len
    )
    check_tokenizer(config.model.tokenizer_path, data)
    check_shared_folder(config.job.dump_folder, world)
    own, initial = _choose(config, world)
    choice = own if initial is None or config.checkpoint.initial_load_model_weights_only else initial.choice
    look = partial(parts_left_out, config.checkpoint.exclude_from_loading, choice, flatten(config), own=own is not None)
    left_out = on_main("reading what is not to be loaded", look, world)
    in_data = None if TRAIN_STATE in left_out else choice  # whose place in the data is gone on from
    geometry = batch_geometry(config, world.dp_size, in_data, data.mixture)
    identity = data.identity(geometry.window_len)
    if in_data is not None:
        identity = settle_data_identity(
            in_data.complete.identity,
            identity,
            extends=_goes_on(data.mixture, in_data, config.job.dump_folder, geometry.window_len),
            allow_change=config.checkpoint.allow_data_change or DATALOADER in left_out,
            where=in_data.path,
        )
        saved = in_data.complete.identity
        if DATALOADER in left_out and saved is not None:
            identity = replace(identity, data_segment=saved.data_segment + 1)
    sampler = Sampler(replace(data.mixture, data_seed=identity.segment_seed), data.splits, geometry.window_len)
    held_out = validation_sets(
        open_validation_splits(config.validation.dataset, data),
        window_len=geometry.window_len,
        num_tokens=config.validation.tokens,
    )
    module, hf_files = build_for_run(config, world, data, held_out, choice, initial)
    optimizer = build_optimizer(module.model, config.optimizer, world.device)
    state = TrainState()
    if choice is not None:
        # A finished run needs no moments: its last checkpoint may hold weights only (checkpoint.model_weights_only).
        finished = choice.step >= config.total_steps(geometry.tokens_per_step) and not choice.complete.has_optimizer
        state = load_checkpoint(
            choice,
            model=module.model,
            optimizer=None if finished or OPTIMIZER in left_out else optimizer,
            world=world,
            with_weights=MODEL not in left_out,
        )
        if TRAIN_STATE in left_out:
            state = TrainState()
        log.info("resumed from %s: step %d, %d samples consumed", choice.path, state.step, state.consumed_samples)
    elif initial is not None:
        load_initial_weights(initial, module.model, world)
    state = _in_segment(state, identity)
    last_sample = _last_sample(config, geometry, state)
    check_windows_drawn(sampler, last_sample)
    position = data_position(
        sampler,
        consumed_samples=state.consumed_samples,
        last_sample=last_sample,
        data_segment=identity.data_segment,
    )
    log.info("data position: %s", position)
    flops = model_flops(module.model, module.model.config)
    if flops is None:
        log.info("no formula for the operations of this kind of model: mfu is not logged")
    open_folder = partial(
        _open_run_folder, config, world, choice, state, geometry, data.mixture, identity, position, argv
    )
    return Run(
        config=config,
        world=world,
        data=data,
        identity=identity,
        geometry=geometry,
        sampler=sampler,
        validation_sets=held_out,
        module=module,
        optimizer=optimizer,
        flops=flops,
        num_embeddings=module.model.config.vocab_size,
        hf_files=hf_files,
        state=state,
        latest=None if choice is None else choice.path,
        segment=on_main("opening the run folder", open_folder, world),
    )


def _choose(config: TrainConfig, world: World) -> tuple[Choice | None, InitialWeights | None]:
    """Return the run's own checkpoint to go on from; where it has none, the weights that it is to begin with."""
    options = config.checkpoint
    own: Choice | None = None
    if options.enable_checkpoint:
        own = agree_on_checkpoint(
            config.checkpoint_folder, world, load_step=options.load_step, fast_open=options.fast_open
        )
    if options.initial_load_path is None:
        return own, None
    if own is not None:
        log.info("the run has a checkpoint of its own: checkpoint.initial_load_path is left alone")
        return own, None
    return None, agree_on_initial(
        options.initial_load_path,
        world,
        weights_only=options.initial_load_model_weights_only,
        fast_open=options.fast_open,
    )


def batch_geometry(config: TrainConfig, dp_size: int, choice: Choice | None, mixture: Mixture) -> BatchGeometry:
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


def _last_sample(config: TrainConfig, geometry: BatchGeometry, state: TrainState) -> int:
    """Return the sample that the run's last step ends before, if it goes on from `state` as it is configured now."""
    steps = max(config.total_steps(geometry.tokens_per_step) - state.step, 0)
    return state.consumed_samples + steps * geometry.samples_per_step


def _in_segment(state: TrainState, identity: DataIdentity) -> TrainState:
    """Return where the run stands in its data segment: at the first sample of one that begins here."""
    if state.data_segments and state.data_segments[-1].number == identity.data_segment:
        return state
    segment = DataSegment(
        number=identity.data_segment,
        mixture_fingerprint=identity.mixture_fingerprint,
        data_seed=identity.segment_seed,
        first_step=state.step + 1,
    )
    return replace(state, consumed_samples=0, data_segments=(*state.data_segments, segment))


def _goes_on(mixture: Mixture, choice: Choice, folder: Path, window_len: int) -> bool:
    """Return whether the mixture is an edit of the run's own that changes nothing which was drawn."""
    saved = choice.complete.identity
    if saved is None or saved.mixture_fingerprint == mixture.fingerprint:
        return False
    kept = folder / mixture_name(saved.mixture_fingerprint)
    return kept.is_file() and mixture.is_continuation_of(
        read_mixture(kept), consumed_samples=choice.complete.consumed_samples, window_len=window_len
    )


def _open_run_folder(
    config: TrainConfig,
    world: World,
    choice: Choice | None,
    state: TrainState,
    geometry: BatchGeometry,
    mixture: Mixture,
    identity: DataIdentity,
    position: DataPosition,
    argv: Sequence[str],
) -> SegmentEntry:
    """Write down this start in the run folder, and put away what it takes back (rank 0)."""
    folder = config.job.dump_folder
    check_start(folder, flatten(config), resuming=choice is not None)
    if choice is not None:
        if choice.complete.identity is not None:  # not a seed, nor a converted model
            for name, (old, new) in changed_options(choice.path / "config.toml", flatten(config)).items():
                log.info("changed since the checkpoint: %s was %s, is %s", name, old, new)
        abandon_later(config.checkpoint_folder, state.step)
    abandon_metrics(folder, state.step)
    write_config(folder, to_toml(config))
    keep_mixture(folder, mixture)
    entry = append_segment(
        folder,
        Segment(
            step=state.step,
            consumed_samples=state.consumed_samples,
            world_size=world.size,
            dp_size=world.dp_size,
            micro_batch=geometry.micro_batch,
            accumulation=geometry.accumulation,
            seq_len=geometry.seq_len,
            window_len=geometry.window_len,
            samples_per_step=geometry.samples_per_step,
            mixture_fingerprint=mixture.fingerprint,
            data_segment=identity.data_segment,
            data_seed=identity.segment_seed,
        ),
        argv,
    )
    latest = None if choice is None else choice.path
    write_status(folder, "running", step=state.step, checkpoint=latest, data=position.to_json())
    return entry
