"""`--dry_run`: what a run would be, told without starting it. Nothing is written, and no weight is made."""

from __future__ import annotations

import os

import torch

from flame.errors import UsageError
from flame.files import free_bytes
from flame.sampling.position import DataPosition, check_windows_drawn, data_position
from flame.sampling.sampler import BatchGeometry, Sampler
from flame.train.checkpoint_files import choose_checkpoint
from flame.train.config import TrainConfig, flatten
from flame.train.data import check_tokenizer, open_training_data, open_validation_splits
from flame.train.distributed import mesh_shape
from flame.train.families import check_family, family_of
from flame.train.initial import find_initial
from flame.train.memory import RankMemory, StepShape, estimate_memory, parameters_by_kind
from flame.train.model import CausalLMLoss
from flame.train.model_config import check_token_ids, load_model_config
from flame.train.model_setup import param_dtype
from flame.train.optimizer import parameter_groups
from flame.train.run import check_start
from flame.train.setup import batch_geometry
from flame.train.validation import validation_sets

_FP32_BYTES = 4
_GIB = 1 << 30


def dry_run(config: TrainConfig, ranks: int) -> int:
    """Print the plan of a run of so many ranks, and return 0; raises what a start would find in its data and model."""
    _, dp_shard = mesh_shape(
        ranks, config.training.data_parallel_replicate_degree, config.training.data_parallel_shard_degree
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = open_training_data(
        config.dataset,
        config.training.data_probs,
        config.training.seed,
        moved=config.training.source,
        packed_len=config.training.packed_len,
    )
    check_tokenizer(config.model.tokenizer_path, data)
    options = config.checkpoint
    choice = None
    if options.enable_checkpoint:
        choice = choose_checkpoint(config.checkpoint_folder, load_step=options.load_step, fast_open=True)
    initial = None
    if choice is None and options.initial_load_path is not None:
        weights_only = options.initial_load_model_weights_only
        initial = find_initial(options.initial_load_path, weights_only=weights_only, fast_open=True)
    check_start(config.job.dump_folder, flatten(config), resuming=choice is not None)
    geometry = batch_geometry(config, ranks, choice, data.mixture)
    sampler = Sampler(data.mixture, data.splits, geometry.window_len)
    total_steps = config.total_steps(geometry.tokens_per_step)
    last_sample = total_steps * geometry.samples_per_step
    check_windows_drawn(sampler, last_sample)
    held_out = validation_sets(
        open_validation_splits(config.validation.dataset, data),
        window_len=geometry.window_len,
        num_tokens=config.validation.tokens,
    )
    tokenizer = data.tokenizer
    model_config = load_model_config(
        config.model_config,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        bos_id=tokenizer.bos_id,
        norm_type=config.model.norm_type,
        trust_remote_code=config.model.trust_remote_code,
        custom_model_path=config.experimental.custom_model_path,
        keep_rows=choice is not None or initial is not None,
    )
    for split in (*data.splits, *(chosen.split for chosen in held_out)):
        check_token_ids(split.max_token_id, model_config.vocab_size, f"{split.corpus.path}, split {split.name}")
    family = family_of(model_config)
    check_family(model_config, varlen=config.training.varlen, device=device)
    with torch.device("meta"):
        module = CausalLMLoss(family.construct(model_config, "sdpa"), family)
    module.train()
    kinds = parameters_by_kind(module.model)
    groups = parameter_groups(module.model, config.optimizer)
    decayed = sum(p.numel() for group in groups if group["name"] == "decayed" for p in group["params"])
    matrices = sum(p.numel() for group in groups if group["hidden_matrices"] for p in group["params"])
    total = sum(kinds.values())
    moments = _moments_per_weight(config, matrices / total)
    memory = estimate_memory(
        module,
        StepShape(
            micro_batch=config.training.batch_size,
            seq_len=config.training.seq_len,
            param_dtype=param_dtype(config, device),
            checkpoint_mode=config.activation_checkpoint.mode,
            checkpoint_option=config.activation_checkpoint.selective_ac_option,
        ),
        dp_shard=dp_shard,
        moments_per_weight=moments,
        reshard_after_forward=config.training.fsdp_reshard_after_forward,
    )
    position = data_position(sampler, consumed_samples=0, last_sample=last_sample, data_segment=0)
    begins = f"step {choice.step}, {choice.path}" if choice else str(initial.path) if initial else "fresh weights"
    lines = [f"dry run: {config.job.dump_folder} is not written; {ranks} ranks, from {begins}"]
    if not config.memory_estimation.enabled:
        lines += _data_lines(config, geometry, position, total_steps)
        lines += _model_lines(kinds, decayed)
    lines += _memory_lines(memory)
    if not config.memory_estimation.enabled:
        lines += _disk_lines(config, round(total * _FP32_BYTES * (1 + moments)), total, total_steps)
    print("\n".join(lines))
    return 0


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
        f"  global batch  {geometry.tokens_per_step:,} tokens: {geometry.samples_per_step:,} windows of "
        f"{geometry.window_len:,}",
        f"  steps         {steps:,}, {steps * geometry.tokens_per_step:,} tokens",
        f"  warm-up       {warmup:,} steps, {warmup * geometry.tokens_per_step:,} tokens",
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
