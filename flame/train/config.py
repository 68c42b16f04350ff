"""A training configuration: sections over a TOML file and a command line, with the old spellings still understood."""

from __future__ import annotations

import dataclasses
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
from flame.train.refusals import refuse_not_available, refuse_with_early_step


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
    values = flatten(config)
    refuse_not_available(values, _OPTIONS)
    refuse_with_early_step(values)
    refuse_absent_loggers(config.metrics)
    if config.model.config is None:
        raise UsageError("a run needs --model.config", fix="For example --model.config configs/llama_374M.json")
    if config.training.dataset is None:
        raise UsageError(
            "a run needs --training.dataset",
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
