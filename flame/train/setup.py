"""Everything before step 1: the data, the model, the checkpoint to go on from, and the run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.optim import Optimizer

from flame.errors import TrainingError
from flame.files import canonical_json
from flame.sampling.mixture import Mixture, read_mixture
from flame.sampling.sampler import BatchGeometry, Sampler, default_window_len
from flame.train.checkpoint import DataSegment, TrainState, agree_on_checkpoint, load_checkpoint
from flame.train.checkpoint_files import Choice, abandon_later
from flame.train.config import TrainConfig, flatten, to_toml
from flame.train.data import TrainingData, check_tokenizer, open_training_data, open_validation_splits
from flame.train.distributed import World, raise_together
from flame.train.flops import ModelFlops, model_flops
from flame.train.hf_files import build_hf_files
from flame.train.identity import DataIdentity, compare_data_identity, compare_model_config, read_model_config
from flame.train.log import log
from flame.train.model import CausalLMLoss, build_model
from flame.train.model_config import check_token_ids, load_model_config
from flame.train.optimizer import build_optimizer
from flame.train.parallelize import parallelize
from flame.train.run import (
    Segment,
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
from flame.train.validation import ValidationSet, validation_set


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


def prepare(config: TrainConfig, world: World, argv: Sequence[str]) -> Run:
    """Open, build, load and check all that a run needs; every rank calls it. Raises before anything is trained."""
    if config.training.deterministic:
        torch.use_deterministic_algorithms(True)
    data = open_training_data(config.dataset, config.training.data_probs, config.training.seed)
    check_tokenizer(config.model.tokenizer_path, data)
    check_shared_folder(config.job.dump_folder, world)
    choice = _choose(config, world)
    geometry = batch_geometry(config, world.dp_size, choice)
    sampler = Sampler(data.mixture, data.splits, geometry.window_len)
    identity = data.identity(geometry.window_len)
    if choice is not None:
        extends = _goes_on(data.mixture, choice, config.job.dump_folder, geometry.window_len)
        compare_data_identity(choice.complete.identity, identity, extends=extends, where=choice.path)
    validation_sets = [
        validation_set(name, split, window_len=geometry.window_len, num_tokens=config.validation.tokens)
        for name, split in open_validation_splits(config.validation.dataset, data).items()
    ]
    module, hf_files = _build(config, world, data, validation_sets, choice)
    optimizer = build_optimizer(module.model, config.optimizer, world.device)
    state = _new_state(identity)
    if choice is not None:
        state = load_checkpoint(choice, model=module.model, optimizer=optimizer, world=world)
        log.info("resumed from %s: step %d, %d samples consumed", choice.path, state.step, state.consumed_samples)
    total_steps = config.total_steps(geometry.tokens_per_step)
    _check_epochs(data.mixture, sampler, state, total_steps, geometry)
    log.info("data position: %s", _data_position(data.mixture, sampler, state.consumed_samples))
    flops = model_flops(module.model, module.model.config)
    if flops is None:
        log.info("no formula for the operations of this kind of model: mfu is not logged")
    return Run(
        config=config,
        world=world,
        data=data,
        identity=identity,
        geometry=geometry,
        sampler=sampler,
        validation_sets=validation_sets,
        module=module,
        optimizer=optimizer,
        flops=flops,
        num_embeddings=module.model.config.vocab_size,
        hf_files=hf_files,
        state=state,
        latest=None if choice is None else choice.path,
        segment=_open_run_folder(config, world, choice, state, geometry, data.mixture, argv),
    )


def _choose(config: TrainConfig, world: World) -> Choice | None:
    if not config.checkpoint.enable_checkpoint:
        return None
    return agree_on_checkpoint(
        config.checkpoint_folder,
        world,
        load_step=config.checkpoint.load_step,
        fast_open=config.checkpoint.fast_open,
    )


def batch_geometry(config: TrainConfig, dp_size: int, choice: Choice | None) -> BatchGeometry:
    """Return how samples become steps; a resumed run keeps its window_len unless another is asked for."""
    training = config.training
    window_len = training.window_len
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


def param_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Return what the model computes in: training.mixed_precision_param, or the device's default."""
    name = config.training.mixed_precision_param
    if name is None:
        name = "bfloat16" if device.type == "cuda" else "float32"
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def _build(
    config: TrainConfig,
    world: World,
    data: TrainingData,
    validation_sets: Sequence[ValidationSet],
    choice: Choice | None,
) -> tuple[CausalLMLoss, dict[str, bytes]]:
    """Return the model, spread over the ranks, and the small files that go with its weights."""
    tokenizer = data.tokenizer
    model_config = load_model_config(
        config.model_config,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        bos_id=tokenizer.bos_id,
        norm_type=config.model.norm_type,
        trust_remote_code=config.model.trust_remote_code,
        custom_model_path=config.experimental.custom_model_path,
    )
    for split in (*data.splits, *(chosen.split for chosen in validation_sets)):
        check_token_ids(split.max_token_id, model_config.vocab_size, f"{split.corpus.path}, split {split.name}")
    dtype = param_dtype(config, world.device)
    module = build_model(
        model_config,
        seed=config.training.seed,
        rank=world.rank,
        device=world.device,
        dtype=dtype,
        varlen=config.training.varlen,
        attention=config.model.attention,
        deterministic=config.training.deterministic,
    )
    hf_files = build_hf_files(module.model, data.tokenizer_folder, eos_id=tokenizer.eos_id, bos_id=tokenizer.bos_id)
    if choice is not None:
        compare_model_config(read_model_config(choice.path), json.loads(hf_files["config.json"]), where=choice.path)
    parallelize(
        module,
        world.mesh,
        device=world.device,
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        reshard_after_forward=config.training.fsdp_reshard_after_forward,
        compile_blocks=config.training.compile,
    )
    return module, hf_files


def _new_state(identity: DataIdentity) -> TrainState:
    segment = DataSegment(
        number=0, mixture_fingerprint=identity.mixture_fingerprint, data_seed=identity.data_seed, first_step=1
    )
    return TrainState(data_segments=(segment,))


def _goes_on(mixture: Mixture, choice: Choice, folder: Path, window_len: int) -> bool:
    """Return whether the mixture is an edit of the run's own that changes nothing which was drawn."""
    saved = choice.complete.identity
    if saved is None or saved.mixture_fingerprint == mixture.fingerprint:
        return False
    kept = folder / f"mixture-{saved.mixture_fingerprint}.json"
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
    argv: Sequence[str],
) -> SegmentEntry:
    """Write down this start in the run folder (rank 0), and put away what it takes back."""
    folder = config.job.dump_folder
    entry = SegmentEntry(number=0, run_id="")
    error: Exception | None = None
    try:
        if world.is_main:
            check_start(folder, flatten(config), resuming=choice is not None)
            if choice is not None:
                for name, (old, new) in changed_options(choice.path / "config.toml", flatten(config)).items():
                    log.info("changed since the checkpoint: %s was %s, is %s", name, old, new)
                abandon_later(config.checkpoint_folder, state.step)
            abandon_metrics(folder, state.step)
            write_config(folder, to_toml(config))
            keep_mixture(folder, mixture.fingerprint, canonical_json(mixture.to_json()))
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
                    argv=argv,
                ),
            )
            write_status(folder, "running", step=state.step, checkpoint=None if choice is None else choice.path)
    except Exception as caught:
        error = caught
    raise_together(error, world, "opening the run folder")
    return entry


def _check_epochs(
    mixture: Mixture, sampler: Sampler, state: TrainState, total_steps: int, geometry: BatchGeometry
) -> None:
    """Raise `TrainingError` if the rest of the run draws a source more often than its max_epochs allows."""
    last = state.consumed_samples + max(total_steps - state.step, 0) * geometry.samples_per_step
    for source, drawn, windows in zip(mixture.sources, sampler.counts(last), sampler.num_windows, strict=True):
        if source.max_epochs is not None and windows and drawn > source.max_epochs * windows:
            raise TrainingError(
                f"the run would draw source {source.name!r} more often than its mixture allows",
                got=f"{drawn / windows:.2f} epochs by step {total_steps}",
                expected=f"at most {source.max_epochs:g} (max_epochs)",
                fix="Train fewer steps, or make a mixture with a smaller weight or a larger max_epochs",
            )


def _data_position(mixture: Mixture, sampler: Sampler, consumed_samples: int) -> str:
    """Return where each source stands, in words."""
    counts = sampler.counts(consumed_samples)
    parts = [
        f"{source.name} {drawn / windows:.3f} epochs" if windows else f"{source.name} not drawn"
        for source, drawn, windows in zip(mixture.sources, counts, sampler.num_windows, strict=True)
    ]
    return f"{consumed_samples:,} samples; " + ", ".join(parts)
