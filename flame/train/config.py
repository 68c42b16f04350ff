"""A training configuration: sections over a TOML file and a command line, with the old spellings still understood."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flame.config import convert, options_of, parse_sections
from flame.errors import UsageError
from flame.train.loggers import refuse_absent_loggers
from flame.train.moved import refuse_preprocessing
from flame.train.options import (
    DEFAULT_STEPS,
    DEFAULT_WARMUP_STEPS,
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

# Options whose engine is not here yet: accepted by the parser, refused by name. Beside each, the values that are
# refused; None: all but the default. A row goes when its engine comes.
NOT_AVAILABLE_YET: dict[str, tuple[Any, ...] | None] = {
    "model.converters": None,
    "training.tensor_parallel_degree": None,
    "training.disable_loss_parallel": None,
    "float8.enable_float8_linear": None,
    "float8.enable_fsdp_float8_all_gather": None,
    "float8.precompute_float8_dynamic_scale_for_fsdp": None,
    "float8.force_recompute_fp8_weight_in_bwd": None,
    "float8.recipe_name": None,
    "experimental.enable_async_tensor_parallel": None,
    "experimental.context_parallel_degree": None,
    "experimental.context_parallel_rotate_method": None,
    "experimental.pipeline_parallel_degree": None,
    "experimental.pipeline_parallel_split_points": None,
    "experimental.pipeline_parallel_schedule": None,
    "experimental.pipeline_parallel_schedule_csv": None,
    "experimental.pipeline_parallel_microbatches": None,
    "experimental.enable_compiled_autograd": None,
}

# Why, where it is not only that nobody has written it.
_REASONS = {
    "experimental.enable_compiled_autograd": "torch runs no hooks of FSDP2 in a backward that is compiled as a whole, "
    "so that gradients would not be summed over the ranks; training.compile compiles each block's backward",
}

_FLOAT8_SCALING = ("float8.scaling_type_input", "float8.scaling_type_weight", "float8.scaling_type_grad_output")


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
    def only_plans(self) -> bool:
        """Whether nothing is to be trained: the plan, or its estimate of memory, is told, and that is all."""
        return self.job.dry_run or self.memory_estimation.enabled

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
    refuse_preprocessing(config.training, config.model.tokenizer_path)
    refuse_not_available(config)
    refuse_with_early_step(config)
    refuse_absent_loggers(config.metrics)
    if config.model.config is None:
        raise UsageError("flame-train needs --model.config", fix="For example --model.config configs/llama_374M.json")
    if config.training.dataset is None:
        raise UsageError(
            "flame-train needs --training.dataset",
            expected="a corpus folder, several separated by commas, or a mixture manifest",
            fix="Make a corpus with flame-preprocess build, a mixture with flame-mix create",
        )
    return config


def _translate(texts: dict[str, list[str]], origin: str) -> dict[str, list[str]]:
    """Turn old spellings into today's, for one origin of options; what is given here replaces its like elsewhere."""
    found = dict(texts)
    _one_of(found, "training.steps", "training.tokens", DEFAULT_STEPS, origin)
    _one_of(found, "lr_scheduler.warmup_steps", "lr_scheduler.warmup_tokens", DEFAULT_WARMUP_STEPS, origin)
    scheduler = _pop(found, "optimizer.scheduler")
    if scheduler is not None:
        decay_type, decay_ratio = ("linear", "0.1") if scheduler == "wsd" else (scheduler, "none")
        _replace(found, "optimizer.scheduler", "lr_scheduler.decay_type", decay_type, origin)
        found.setdefault("lr_scheduler.decay_ratio", [decay_ratio])
    fused = _pop(found, "optimizer.fused")
    if fused is not None:
        implementation = "fused" if fused else "for-loop"
        _replace(found, "optimizer.fused", "optimizer.implementation", implementation, origin)
    all_ranks = _pop(found, "metrics.save_for_all_ranks")
    if all_ranks is not None:
        rank_0_only = "false" if all_ranks else "true"
        _replace(found, "metrics.save_for_all_ranks", "metrics.rank_0_only", rank_0_only, origin)
    if found.get("checkpoint.interval_type", [""])[-1] == "step":
        found["checkpoint.interval_type"] = ["steps"]
    return found


def _one_of(found: dict[str, list[str]], steps: str, tokens: str, default_steps: int, origin: str) -> None:
    if steps in found and tokens in found:
        raise UsageError(f"--{steps} and --{tokens} are both given", where=origin, fix="Give one of them")
    if tokens in found:
        found[steps] = [str(default_steps)]
    elif steps in found:
        found[tokens] = ["none"]


def _pop(found: dict[str, list[str]], name: str) -> Any:
    texts = found.pop(name, None)
    return None if texts is None else convert(_OPTIONS[name], texts)


def _replace(found: dict[str, list[str]], old: str, name: str, text: str, origin: str) -> None:
    if name in found and convert(_OPTIONS[name], found[name]) != convert(_OPTIONS[name], [text]):
        raise UsageError(
            f"--{old} is an old spelling of --{name} {text}, and both are given",
            where=origin,
            got=f"--{name} {found[name][-1]}",
            fix=f"Leave --{old} away",
        )
    found[name] = [text]


_OPTIONS = {option.name: option for option in options_of(TrainConfig)}


def refuse_not_available(config: TrainConfig) -> None:
    """Refuse options that ask for what is not here yet, by name."""
    values = flatten(config)
    for name in _FLOAT8_SCALING:
        if values[name] == "delayed":
            raise UsageError(
                f"--{name} cannot be delayed: torchao, which computes in float8, no longer has delayed scaling",
                fix="Leave it away: scaling is dynamic",
            )
    for name, refused in NOT_AVAILABLE_YET.items():
        default = _OPTIONS[name].default
        if values[name] in refused if refused is not None else values[name] != default:
            fix = "Leave it away" if default in (None, ()) else f"Leave it away: the default is {_shown(default)}"
            reason = f": {_REASONS[name]}" if name in _REASONS else ""
            raise UsageError(f"--{name} {_shown(values[name])} is not available yet{reason}", fix=fix)


def refuse_with_early_step(config: TrainConfig) -> None:
    """Refuse what needs the whole gradient, or several backwards, where weights are updated in backward."""
    if not config.optimizer.early_step_in_backward:
        return
    training = config.training
    for name, value, needed in (
        ("training.max_norm", training.max_norm, math.inf),
        ("training.skip_nan_inf", training.skip_nan_inf, False),
        ("training.gradient_accumulation_steps", training.gradient_accumulation_steps, 1),
    ):
        if value != needed:
            raise UsageError(
                "--optimizer.early_step_in_backward updates each weight before the whole gradient is known",
                got=f"--{name} {_shown(value)}",
                fix=f"Add --{name} {_shown(needed)}, or leave early_step_in_backward away",
            )
    if config.optimizer.name == "Muon":
        raise UsageError(
            "--optimizer.early_step_in_backward updates one weight at a time, and Muon needs several: ranks share them",
            fix="Choose another --optimizer.name, or leave early_step_in_backward away",
        )


def flatten(config: TrainConfig) -> dict[str, Any]:
    """Return every option's value by its dotted name, as resolved.

    Without job.config_file, whose options are among these; steps that a number of tokens replaces are None.
    """
    values: dict[str, Any] = {}
    for section in dataclasses.fields(config):
        options = getattr(config, section.name)
        values |= {
            f"{section.name}.{option.name}": getattr(options, option.name) for option in dataclasses.fields(options)
        }
    del values["job.config_file"]
    if config.training.tokens is not None:
        values["training.steps"] = None
    if config.lr_scheduler.warmup_tokens is not None:
        values["lr_scheduler.warmup_steps"] = None
    return values


def to_toml(config: TrainConfig) -> str:
    """Return the configuration as TOML that parses back to an equal one; options that are None are left away."""
    lines: list[str] = []
    values = flatten(config)
    section = None
    for option, value in values.items():
        head, _, name = option.partition(".")
        if value is None:
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
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
