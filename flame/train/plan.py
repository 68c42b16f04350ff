"""`--dry_run`: what a run would be, told without starting it. Nothing is written, and no weight is made."""

from __future__ import annotations

import os

import torch

from flame.errors import UsageError
from flame.files import free_bytes
from flame.sampling.geometry import BatchGeometry
from flame.sampling.position import DataPosition
from flame.train.beginning import Beginning, find_beginning
from flame.train.config import TrainConfig, flatten
from flame.train.distributed import mesh_shape
from flame.train.families import check_family, family_of
from flame.train.memory import RankMemory, StepShape, estimate_memory, parameters_by_kind
from flame.train.model import CausalLMLoss
from flame.train.model_setup import configure_model, param_dtype
from flame.train.optimizer import parameter_groups
from flame.train.run import check_start
from flame.train.run_data import RunData, open_run_data
from flame.train.train_state import TrainState
from flame.words import counted

_FP32_BYTES = 4
_GIB = 1 << 30


def dry_run(config: TrainConfig, ranks: int) -> int:
    """Print the plan of a run of so many ranks, and return 0; raises what a start would find in its data and model."""
    beginning = find_beginning(config, fast_open=True)
    check_start(config.job.dump_folder, flatten(config), resuming=beginning.choice is not None)
    drawn = open_run_data(config, beginning, ranks)
    state = _state_at(beginning, drawn)
    drawn.check_caps(state)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = _build_without_weights(config, beginning, drawn, device)
    kinds = parameters_by_kind(module.model)
    groups = parameter_groups(module.model, config.optimizer)
    decayed = sum(p.numel() for group in groups if group["name"] == "decayed" for p in group["params"])
    matrices = sum(p.numel() for group in groups if group["hidden_matrices"] for p in group["params"])
    total = sum(kinds.values())
    moments = _moments_per_weight(config, matrices / total)
    memory = _rank_memory(config, module, ranks, moments, device)  # changes the module
    begins = "fresh weights" if beginning.path is None else f"step {state.step}, {beginning.path}"
    lines = [f"dry run: {config.job.dump_folder} is not written; {counted(ranks, 'rank')}, from {begins}"]
    if not config.memory_estimation.enabled:
        lines += _data_lines(config, drawn.geometry, drawn.position_at(state), drawn.total_steps)
        lines += _model_lines(kinds, decayed)
    lines += _memory_lines(memory)
    if not config.memory_estimation.enabled:
        lines += _disk_lines(config, round(total * _FP32_BYTES * (1 + moments)), total, drawn.total_steps)
    print("\n".join(lines))
    return 0


def _state_at(beginning: Beginning, drawn: RunData) -> TrainState:
    """Return where the run would stand after loading, as far as complete.json tells."""
    choice = beginning.in_data
    if choice is None:
        return TrainState()
    saved = choice.complete.identity
    stays = saved is None or saved.data_segment == drawn.identity.data_segment
    return TrainState(step=choice.step, consumed_samples=choice.complete.consumed_samples if stays else 0)


def _build_without_weights(
    config: TrainConfig, beginning: Beginning, drawn: RunData, device: torch.device
) -> CausalLMLoss:
    """Return the run's model on the meta device."""
    model_config = configure_model(config, drawn.data, drawn.validation_sets, beginning.choice, beginning.initial)
    check_family(
        model_config,
        varlen=config.training.varlen,
        device=device,
        longest_sequence=config.training.longest_sequence,
    )
    family = family_of(model_config)
    with torch.device("meta"):
        module = CausalLMLoss(family.construct(model_config, "sdpa"), family)
    return module.train()


def _rank_memory(
    config: TrainConfig, module: CausalLMLoss, ranks: int, moments_per_weight: float, device: torch.device
) -> RankMemory:
    training = config.training
    _, dp_shard = mesh_shape(ranks, training.data_parallel_replicate_degree, training.data_parallel_shard_degree)
    shape = StepShape(
        micro_batch=training.batch_size,
        seq_len=training.seq_len,
        param_dtype=param_dtype(config, device),
        checkpoint_mode=config.activation_checkpoint.mode,
        checkpoint_option=config.activation_checkpoint.selective_ac_option,
        real_tensors_on=device if config.memory_estimation.disable_fake_mode else None,
    )
    return estimate_memory(
        module,
        shape,
        dp_shard=dp_shard,
        moments_per_weight=moments_per_weight,
        reshard_after_forward=training.fsdp_reshard_after_forward,
    )


def planned_ranks(config: TrainConfig, launched: int) -> int:
    """Return for how many ranks to plan: job.dry_run_ranks, else WORLD_SIZE, else as many as would be launched."""
    if config.job.dry_run_ranks is not None:
        return config.job.dry_run_ranks
    text = os.environ.get("WORLD_SIZE", str(launched))
    if not text.isdecimal() or int(text) < 1:
        raise UsageError("WORLD_SIZE is no count", got=text, expected="a whole number of at least 1")
    return int(text)


def _moments_per_weight(config: TrainConfig, share_of_matrices: float) -> float:
    """Return how many numbers the optimizer keeps for each weight."""
    return {"SGD": 1.0 if config.optimizer.beta1 else 0.0, "Muon": 2.0 - share_of_matrices}.get(
        config.optimizer.name, 2.0
    )


def _data_lines(config: TrainConfig, geometry: BatchGeometry, position: DataPosition, steps: int) -> list[str]:
    warmup = config.warmup_steps(geometry.tokens_per_step)
    lines = [
        f"  global batch  {geometry.tokens_per_step:,} tokens: {counted(geometry.samples_per_step, 'window')} of "
        f"{geometry.window_len:,}",
        f"  steps         {steps:,}, {steps * geometry.tokens_per_step:,} tokens",
        f"  warm-up       {counted(warmup, 'step')}, {warmup * geometry.tokens_per_step:,} tokens",
    ]
    for name, source in position.sources.items():
        lines.append(f"  source        {name}: {source.remaining_tokens:,} tokens, {source.final_epochs:.4f} epochs")
    return lines


def _model_lines(kinds: dict[str, int], decayed: int) -> list[str]:
    total = sum(kinds.values())
    return [
        f"  parameters    {total:,}: " + ", ".join(f"{kind} {number:,}" for kind, number in kinds.items()),
        f"  decayed       {decayed:,}; not decayed {total - decayed:,}",
    ]


def _memory_lines(memory: RankMemory) -> list[str]:
    guessed = "" if memory.watched else " (a rule of thumb)"
    return [
        f"  memory a rank {memory.total / _GIB:.2f} GiB: weights {memory.weights / _GIB:.2f}, "
        f"gradients {memory.gradients / _GIB:.2f}, moments {memory.moments / _GIB:.2f}, "
        f"gathered weights {memory.gathered / _GIB:.2f}, "
        f"activations and logits {memory.activations / _GIB:.2f}{guessed}"
    ]


def _disk_lines(config: TrainConfig, checkpoint_bytes: int, num_parameters: int, steps: int) -> list[str]:
    """Return the lines about checkpoints; one more than is kept lies there while the next one is written."""
    options = config.checkpoint
    saves = 0 if not options.enable_checkpoint else 1
    if options.enable_checkpoint and options.interval_type == "steps":
        saves = -(-steps // options.interval)
    kept = saves if options.keep_latest_k is None else min(saves, options.keep_latest_k)
    width = {"float32": 4, "bfloat16": 2, "float16": 2}[options.export_dtype]
    export = num_parameters * width if saves and options.export_hf else 0
    needed = checkpoint_bytes * min(saves, kept + 1) + export
    free = free_bytes(config.job.dump_folder)
    lines = [
        f"  checkpoint    {checkpoint_bytes / _GIB:.2f} GiB each, {checkpoint_bytes * kept / _GIB:.2f} GiB "
        f"for the {kept:,} kept, {export / _GIB:.2f} GiB for the export",
        f"  disk          {needed / _GIB:.2f} GiB needed, {free / _GIB:.2f} GiB free",
    ]
    if needed > free:
        lines.append("there is no room for it: lower checkpoint.keep_latest_k, or choose another job.dump_folder")
    return lines
