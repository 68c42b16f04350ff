"""Everything before step 1: the data, the model, the checkpoint to go on from, and the run's folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.optim import Optimizer

from flame.kernels.tuning import keep_tuned_configurations
from flame.sampling.geometry import BatchGeometry
from flame.sampling.history import Segment
from flame.sampling.position import DataPosition
from flame.sampling.sampler import Sampler
from flame.train.beginning import Beginning, beginning_told, find_beginning, loads_moments
from flame.train.checkpoint import load_checkpoint
from flame.train.checkpoint_files import abandon_later
from flame.train.config import TrainConfig, flatten, to_toml
from flame.train.data import TrainingData
from flame.train.distributed import World, on_main
from flame.train.exclusions import MODEL
from flame.train.flops import ModelFlops, model_flops
from flame.train.identity import DataIdentity
from flame.train.initial import load_initial_weights
from flame.train.log import log
from flame.train.model import CausalLMLoss
from flame.train.model_setup import build_for_run
from flame.train.optimizer import build_optimizer
from flame.train.run import (
    SegmentEntry,
    abandon_metrics,
    append_segment,
    check_shared_folder,
    check_start,
    keep_mixture,
    write_config,
    write_status,
)
from flame.train.run_data import RunData, open_run_data
from flame.train.train_state import TrainState
from flame.train.validation import ValidationSet


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, ready for its next step.

    `latest` is the checkpoint that `state` was loaded from, if any; `load_seconds` what loading took.
    """

    config: TrainConfig
    world: World
    drawn: RunData
    module: CausalLMLoss
    optimizer: Optimizer
    flops: ModelFlops | None
    num_embeddings: int
    hf_files: Mapping[str, bytes]
    state: TrainState
    latest: Path | None
    load_seconds: float | None
    segment: SegmentEntry

    @property
    def data(self) -> TrainingData:
        return self.drawn.data

    @property
    def identity(self) -> DataIdentity:
        return self.drawn.identity

    @property
    def geometry(self) -> BatchGeometry:
        return self.drawn.geometry

    @property
    def sampler(self) -> Sampler:
        return self.drawn.sampler

    @property
    def validation_sets(self) -> Sequence[ValidationSet]:
        return self.drawn.validation_sets

    @property
    def total_steps(self) -> int:
        return self.drawn.total_steps

    @property
    def warmup_steps(self) -> int:
        return self.config.warmup_steps(self.geometry.tokens_per_step)

    def position_at(self, state: TrainState) -> DataPosition:
        """Return where `state` stands in the data, and what the run draws from there on."""
        return self.drawn.position_at(state)


def prepare(config: TrainConfig, world: World, argv: Sequence[str]) -> Run:
    """Open, build, load and check all that a run needs; every rank calls it. Raises before anything is trained."""
    if config.training.deterministic:
        torch.use_deterministic_algorithms(True)
    if world.device.type == "cuda":
        keep_tuned_configurations(torch.cuda.get_device_name(world.device))
    check_shared_folder(config.job.dump_folder, world)
    look = partial(find_beginning, config, fast_open=config.checkpoint.fast_open)
    beginning = on_main("looking for what to begin from", look, world)
    drawn = open_run_data(config, beginning, world.dp_size)
    module, hf_files = build_for_run(
        config, world, drawn.data, drawn.validation_sets, beginning.choice, beginning.initial
    )
    optimizer = build_optimizer(module.model, config.optimizer, world.device)
    state, load_seconds = _load(beginning, drawn, module, optimizer, world)
    drawn.check_caps(state)
    position = drawn.position_at(state)
    log.info("data position: %s", position)
    flops = model_flops(module.model, module.model.config)
    if flops is None:
        log.info("no formula for the operations of this kind of model: mfu is not logged")
    open_folder = partial(_open_run_folder, config, world, beginning, state, drawn, position, argv)
    return Run(
        config=config,
        world=world,
        drawn=drawn,
        module=module,
        optimizer=optimizer,
        flops=flops,
        num_embeddings=module.model.config.vocab_size,
        hf_files=hf_files,
        state=state,
        latest=None if beginning.choice is None else beginning.choice.path,
        load_seconds=load_seconds,
        segment=on_main("opening the run folder", open_folder, world),
    )


def _load(
    beginning: Beginning, drawn: RunData, module: CausalLMLoss, optimizer: Optimizer, world: World
) -> tuple[TrainState, float | None]:
    """Fill the model and the optimizer, say with what; returns where the run stands, and the seconds that it took."""
    began, state, moments_loaded = time.monotonic(), TrainState(), False
    if beginning.choice is not None:
        moments_loaded = loads_moments(beginning, drawn.total_steps)
        state = load_checkpoint(
            beginning.choice,
            model=module.model,
            optimizer=optimizer if moments_loaded else None,
            world=world,
            with_weights=MODEL not in beginning.left_out,
        )
        if beginning.in_data is None:
            state = TrainState()
    elif beginning.initial is not None:
        load_initial_weights(beginning.initial, module.model, world)
    seconds = None if beginning.path is None else time.monotonic() - began
    state = drawn.in_segment(state)
    log.info(beginning_told(beginning, state, moments_loaded=moments_loaded, load_seconds=seconds))
    return state, seconds


def _open_run_folder(
    config: TrainConfig,
    world: World,
    beginning: Beginning,
    state: TrainState,
    drawn: RunData,
    position: DataPosition,
    argv: Sequence[str],
) -> SegmentEntry:
    """Write down this start in the run folder, and put away what it takes back (rank 0)."""
    folder, geometry, choice = config.job.dump_folder, drawn.geometry, beginning.choice
    check_start(folder, flatten(config), resuming=choice is not None)
    if choice is not None:
        abandon_later(config.checkpoint_folder, state.step)
    abandon_metrics(folder, state.step)
    write_config(folder, to_toml(config))
    keep_mixture(folder, drawn.data.mixture)
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
            mixture_fingerprint=drawn.data.mixture.fingerprint,
            data_segment=drawn.identity.data_segment,
            data_seed=drawn.identity.segment_seed,
        ),
        argv,
    )
    latest = None if choice is None else choice.path
    write_status(folder, "running", step=state.step, checkpoint=latest, data=position.to_json())
    return entry
