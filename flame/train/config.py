"""A training configuration: sections over a TOML file and a command line, with the old spellings still understood."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flame.config import options_of, parse_sections
from flame.errors import UsageError
from flame.train.options import (
    ActivationCheckpointOptions,
    ActivationOffloadOptions,
    CheckpointOptions,
    CommOptions,
    ExperimentalOptions,
    Float8Options,
    JobOptions,
    MemoryEstimationOptions,
    MetricsOptions,
    ModelOptions,
    OptimizerOptions,
    ProfilingOptions,
    SchedulerOptions,
    TrainingOptions,
    ValidationOptions,
)

# Options whose engine is not here: accepted by the parser, refused when they ask for anything.
NOT_AVAILABLE_YET = (
    "model.converters",
    *("training.tensor_parallel_degree", "training.disable_loss_parallel", "training.enable_cpu_offload"),
    "optimizer.early_step_in_backward",
    *("metrics.enable_tensorboard", "metrics.enable_wandb", "metrics.enable_trackio", "metrics.rank_0_only"),
    *("checkpoint.exclude_from_loading", "checkpoint.model_weights_only", "checkpoint.create_seed_checkpoint"),
    *("checkpoint.initial_load_path", "checkpoint.initial_load_model_weights_only"),
    *("checkpoint.allow_data_change", "checkpoint.async_mode"),
    *("activation_checkpoint.mode", "activation_offload.mode"),
    *("float8.enable_float8_linear", "float8.enable_fsdp_float8_all_gather", "float8.recipe_name"),
    *("float8.precompute_float8_dynamic_scale_for_fsdp", "float8.force_recompute_fp8_weight_in_bwd"),
    *("profiling.enable_profiling", "profiling.enable_memory_snapshot", "memory_estimation.enabled"),
    *("experimental.enable_async_tensor_parallel", "experimental.context_parallel_degree"),
    *("experimental.pipeline_parallel_degree", "experimental.pipeline_parallel_split_points"),
    *("experimental.pipeline_parallel_schedule_csv", "experimental.pipeline_parallel_microbatches"),
    "experimental.enable_compiled_autograd",
)
NOT_AVAILABLE_CHOICES = {"optimizer.name": "Muon", "checkpoint.interval_type": "seconds"}

_PREPROCESSING = ("dataset_name", "dataset_split", "data_dir", "data_files")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The resolved configuration of a run."""

    job: JobOptions = field(default_factory=JobOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    validation: ValidationOptions = field(default_factory=ValidationOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    lr_scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    activation_checkpoint: ActivationCheckpointOptions = field(default_factory=ActivationCheckpointOptions)
    activation_offload: ActivationOffloadOptions = field(default_factory=ActivationOffloadOptions)
    float8: Float8Options = field(default_factory=Float8Options)
    comm: CommOptions = field(default_factory=CommOptions)
    profiling: ProfilingOptions = field(default_factory=ProfilingOptions)
    memory_estimation: MemoryEstimationOptions = field(default_factory=MemoryEstimationOptions)
    experimental: ExperimentalOptions = field(default_factory=ExperimentalOptions)

    @property
    def model_config(self) -> str:
        """model.config, which every run needs."""
        assert self.model.config is not None, "checked when parsed"
        return self.model.config

    @property
    def dataset(self) -> str:
        """training.dataset, which every run needs."""
        assert self.training.dataset is not None, "checked when parsed"
        return self.training.dataset

    @property
    def checkpoint_folder(self) -> Path:
        return self.job.dump_folder / self.checkpoint.folder

    def total_steps(self, tokens_per_step: int) -> int:
        """Return training.steps, or training.tokens rounded up to steps."""
        tokens = self.training.tokens
        return self.training.steps if tokens is None else -(-tokens // tokens_per_step)

    def warmup_steps(self, tokens_per_step: int) -> int:
        """Return lr_scheduler.warmup_steps, or warmup_tokens rounded up to steps."""
        tokens = self.lr_scheduler.warmup_tokens
        return self.lr_scheduler.warmup_steps if tokens is None else -(-tokens // tokens_per_step)


def parse_train_config(argv: Sequence[str]) -> TrainConfig:
    """Return the configuration of a command line, over the TOML file that it names; `UsageError` if it cannot run."""
    config: TrainConfig = parse_sections(TrainConfig, argv, program="flame-train", translate=_translate)
    refuse_preprocessing(config.training)
    refuse_not_available(config)
    if config.model.config is None:
        raise UsageError("flame-train needs --model.config", fix="For example --model.config configs/llama_340M.json")
    if config.training.dataset is None:
        raise UsageError(
            "flame-train needs --training.dataset",
            expected="a corpus folder, several separated by commas, or a mixture manifest",
            fix="Make a corpus with flame-preprocess build, a mixture with flame-mix create",
        )
    return config


def _translate(texts: dict[str, list[str]], origin: str) -> dict[str, list[str]]:
    """Turn old spellings into today's, for one origin of options."""
    found = dict(texts)
    if "training.steps" in found and "training.tokens" in found:
        raise UsageError("training.steps and training.tokens are both given", where=origin, fix="Give one of them")
    scheduler = found.pop("optimizer.scheduler", None)
    if scheduler is not None:
        shape = scheduler[-1]
        found.setdefault("lr_scheduler.decay_type", ["linear" if shape == "wsd" else shape])
        if shape == "wsd":
            found.setdefault("lr_scheduler.decay_ratio", ["0.1"])
    fused = found.pop("optimizer.fused", None)
    if fused is not None:
        found.setdefault("optimizer.implementation", ["fused" if fused[-1].lower() == "true" else "for-loop"])
    all_ranks = found.pop("metrics.save_for_all_ranks", None)
    if all_ranks is not None:
        found.setdefault("metrics.rank_0_only", ["false" if all_ranks[-1].lower() == "true" else "true"])
    if found.get("checkpoint.interval_type", [""])[-1] == "step":
        found["checkpoint.interval_type"] = ["steps"]
    return found


def refuse_preprocessing(training: TrainingOptions) -> None:
    """Answer options of the predecessor that read text while training with the command that does it now."""
    given = {name: getattr(training, name) for name in _PREPROCESSING if getattr(training, name) is not None}
    if not given and not training.streaming:
        return
    names = [f"training.{name}" for name in given] + ["training.streaming"] * training.streaming
    dataset = training.dataset or "DATASET"
    words = ["flame-preprocess", "build", "--dataset", dataset]
    for name, value in given.items():
        words += [f"--{name}", value]
    words += ["--tokenizer", "TOKENIZER", "--output", "corpora/" + Path(dataset).name]
    raise UsageError(
        f"{' and '.join(names)} read text, which training no longer does",
        fix=f"Build a corpus once: {shlex.join(words)} and train with --training.dataset corpora/{Path(dataset).name}",
    )


def refuse_not_available(config: TrainConfig) -> None:
    """Refuse options that ask for what is not here yet, by name."""
    values = flatten(config)
    defaults = flatten(TrainConfig())
    for name in ("float8.scaling_type_input", "float8.scaling_type_weight", "float8.scaling_type_grad_output"):
        if values[name] == "delayed":
            raise UsageError(
                f"--{name} cannot be delayed: torchao no longer has delayed scaling", fix="Use dynamic scaling"
            )
    for name in NOT_AVAILABLE_YET:
        if values[name] != defaults[name]:
            raise UsageError(f"--{name} is not available yet", got=_shown(values[name]), fix="Leave it away")
    for name, choice in NOT_AVAILABLE_CHOICES.items():
        if values[name] == choice:
            raise UsageError(f"--{name} {choice} is not available yet", fix=f"The default is {defaults[name]}")


def flatten(config: TrainConfig) -> dict[str, Any]:
    """Return every option's value by its dotted name."""
    values: dict[str, Any] = {}
    for section in dataclasses.fields(config):
        options = getattr(config, section.name)
        values |= {
            f"{section.name}.{option.name}": getattr(options, option.name) for option in dataclasses.fields(options)
        }
    return values


def to_toml(config: TrainConfig) -> str:
    """Return the configuration as TOML that parses back to an equal one; options that are None are left away."""
    lines: list[str] = []
    values = flatten(config)
    section = None
    for option in options_of(TrainConfig):
        head, _, name = option.name.partition(".")
        value = values[option.name]
        if value is None or option.name == "job.config_file":
            continue
        if head != section:
            lines += ["", f"[{head}]"] if section is not None else [f"[{head}]"]
            section = head
        lines.append(f"{name} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str | Path):
        escaped = "".join(_TOML_ESCAPES.get(c, c) if c >= " " else f"\\u{ord(c):04x}" for c in str(value))
        return f'"{escaped}"'
    return repr(value)


_TOML_ESCAPES = {"\\": "\\\\", '"': '\\"', "\x7f": "\\u007f"}


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()
