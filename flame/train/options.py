"""The sections of a training configuration: every option with its default, unit and meaning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from flame.config import option, parse_count
from flame.errors import UsageError

DEFAULT_STEPS = 10_000
DEFAULT_WARMUP_STEPS = 200
PARTS_OF_CHECKPOINTS = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")
"""What checkpoint.exclude_from_loading may name: the predecessor's names."""


def _minus_one_is_none(text: str) -> int | None:
    """The old spelling of "none" for a count."""
    value = int(text)
    return None if value == -1 else value


def _zero_is_none(text: str) -> int | None:
    value = int(text)
    return None if value == 0 else value


def at_least(section: str, config: object, least: float, *names: str) -> None:
    """Raise `UsageError` for the first of these options that is below `least` or no finite number; None is fine."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value < math.inf:
            raise UsageError(f"--{section}.{name} cannot be {value}", expected=f"a number of at least {least:g}")


def lr_factors(texts: tuple[str, ...]) -> list[tuple[str, float]]:
    """Return the (pattern, factor) pairs of optimizer.lr_factors."""
    found: list[tuple[str, float]] = []
    for text in texts:
        pattern, _, number = text.rpartition("=")
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if not pattern or not 0 <= factor < math.inf:
            raise UsageError(
                f"--optimizer.lr_factors cannot contain {text!r}",
                expected="parts of parameters' names, and a factor of at least 0: 'embed*=0.1'",
            )
        found.append((pattern.strip(), factor))
    return found


def _refuse_both(section: str, options: object, steps: str, tokens: str, default: int) -> None:
    if getattr(options, tokens) is not None and getattr(options, steps) != default:
        raise UsageError(f"--{section}.{steps} and --{section}.{tokens} are both given", fix="Give one of them")


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Where a run lives."""

    config_file: Path | None = option(None, help="TOML file of options; the command line wins over it")
    dump_folder: Path = option(Path("exp"), help="the run folder: logs, checkpoints, the final export")
    description: str = option("", help="a text kept with the configuration")
    print_args: bool = option(False, help="print the resolved configuration (it is always written as config.toml)")
    use_for_integration_test: bool = option(False, help="accepted for old command lines; has no effect")
    dry_run: bool = option(False, help="print what the run would be, write nothing and end", aliases=("dry_run",))
    dry_run_ranks: int | None = option(
        None,
        help="how many ranks a dry run plans for; WORLD_SIZE, or as many as would start, if absent",
        unit="ranks",
        aliases=("dry_run_ranks",),
    )

    def __post_init__(self) -> None:
        at_least("job", self, 1, "dry_run_ranks")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What is trained."""

    config: str | None = option(
        None, help="required: model configuration: a JSON file, a folder with config.json, or a Hugging Face name"
    )
    tokenizer_path: str | None = option(None, help="the corpus's own tokenizer if absent; another one is refused")
    norm_type: str | None = option(None, help="rmsnorm or fused_rmsnorm, for families that have both")
    converters: tuple[str, ...] = option((), help="model converters such as float8")
    trust_remote_code: bool = option(False, help="allow a Hugging Face folder's own code to run")
    attention: str = option(
        "auto", help="attention over documents", choices=("auto", "fa4", "torch_varlen", "sdpa"), metavar="NAME"
    )


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Data, batch, length of the run, parallelism."""

    dataset: str | None = option(
        None, help="required: corpus folders (PATH or PATH@SPLIT, comma separated), or one mixture manifest"
    )
    data_probs: tuple[float, ...] | None = option(
        None, help="proportions of the corpora, in tokens; by their size if absent"
    )
    source: tuple[str, ...] = option(
        (),
        help="where sources of the mixture manifest lie now, if not where it says: NAME=PATH, comma separated",
        aliases=("source",),
    )
    dataset_name: str | None = option(None, help="belongs to flame-preprocess build now")
    dataset_split: str | None = option(None, help="belongs to flame-preprocess build now")
    data_dir: str | None = option(None, help="belongs to flame-preprocess build now")
    data_files: str | None = option(None, help="belongs to flame-preprocess build now")
    streaming: bool = option(False, help="belongs to the past: corpora are memory-mapped")
    batch_size: int = option(8, help="micro-batch of each rank", unit="rows")
    seq_len: int = option(2048, help="length of a row", unit="tokens")
    context_len: int | None = option(None, help="longest sequence in a row; seq_len if absent", unit="tokens")
    varlen: bool = option(False, help="packed documents: none sees another")
    window_len: int | None = option(
        None, help="unit of sampling, must divide seq_len; a resumed run keeps its own", unit="tokens"
    )
    packing: str = option(
        "windows",
        choices=("windows", "best_fit"),
        help="how corpus folders are sampled: best_fit takes the packs that flame-preprocess pack made for window_len "
        "(default here context_len), in which no document that fits is cut; needs varlen",
    )
    tokens: int | None = option(None, help="length of the run, instead of steps", unit="tokens", parse=parse_count)
    gradient_accumulation_steps: int = option(1, help="micro-batches a step", unit="micro-batches")
    steps: int = option(DEFAULT_STEPS, help="length of the run, over all its starts", unit="steps")
    max_norm: float = option(1.0, help="gradients are clipped to this norm; inf: not clipped")
    skip_nan_inf: bool = option(False, help="skip, on every rank, an update whose gradient is not finite")
    num_workers: int = option(1, help="reader threads; 0 reads when asked", unit="threads")
    prefetch_factor: int = option(2, help="steps read ahead by each thread", unit="steps")
    pin_memory: bool = option(False, help="accepted: memory is always pinned on a GPU")
    persistent_workers: bool = option(False, help="accepted: threads always stay")
    data_parallel_replicate_degree: int = option(1, help="copies of the weights", unit="ranks")
    data_parallel_shard_degree: int | None = option(
        None, help="ranks that share one copy (FSDP2); -1: those left over", unit="ranks", parse=_minus_one_is_none
    )
    tensor_parallel_degree: int = option(1, help="ranks that share each matrix", unit="ranks")
    disable_loss_parallel: bool = option(False, help="with tensor parallelism, gather the logits for the loss")
    enable_cpu_offload: bool = option(False, help="keep parameters, gradients and moments in CPU memory")
    fsdp_reshard_after_forward: str = option(
        "default", help="when gathered weights are freed", choices=("default", "always", "never")
    )
    mixed_precision_param: str | None = option(
        None, help="what is computed in; bfloat16 on a GPU, float32 on a CPU", choices=("bfloat16", "float32")
    )
    mixed_precision_reduce: str = option("float32", help="what gradients are summed in", choices=("float32",))
    compile: bool = option(False, help="compile each block of the model")
    gc_freq: int = option(50, help="how often Python's garbage is collected", unit="steps")
    seed: int = option(42, help="seed of weights and dropout; data seed of --training.dataset a,b")
    deterministic: bool = option(False, help="only algorithms that give the same bits each time; may be slower")

    def __post_init__(self) -> None:
        at_least(
            "training",
            self,
            1,
            *("batch_size", "seq_len", "context_len", "window_len", "tokens", "gradient_accumulation_steps", "steps"),
            *("prefetch_factor", "data_parallel_replicate_degree", "data_parallel_shard_degree", "gc_freq"),
        )
        at_least("training", self, 0, "num_workers", "seed")
        if not self.max_norm > 0:
            raise UsageError(f"--training.max_norm cannot be {self.max_norm}", expected="above 0; inf: not clipped")
        _refuse_both("training", self, "steps", "tokens", DEFAULT_STEPS)
        self._check_lengths()
        self._check_window()
        self._check_proportions()

    def _check_lengths(self) -> None:
        if self.longest_sequence > self.seq_len:
            raise UsageError(
                "--training.context_len is longer than a row",
                got=f"context_len {self.context_len}, seq_len {self.seq_len}",
                expected="context_len of at most seq_len",
            )
        if not self.varlen and self.longest_sequence != self.seq_len:
            raise UsageError(
                "--training.context_len differs from seq_len, but without varlen nothing cuts a row",
                got=f"context_len {self.context_len}, seq_len {self.seq_len}",
                fix="Add --training.varlen, or leave context_len away",
            )

    def _check_window(self) -> None:
        if self.packing != "windows" and not self.varlen:
            raise UsageError(
                "--training.packing best_fit keeps documents apart, which needs varlen", fix="Add --training.varlen"
            )
        if self.window_len is None:
            return
        if self.seq_len % self.window_len:
            raise UsageError(
                "--training.window_len does not divide a row",
                got=f"window_len {self.window_len}, seq_len {self.seq_len}",
                expected="a divisor of seq_len",
            )
        if not self.varlen and self.window_len != self.seq_len:
            raise UsageError(
                "--training.window_len differs from seq_len, but without varlen a row is one window",
                got=f"window_len {self.window_len}, seq_len {self.seq_len}",
                fix="Add --training.varlen, or leave window_len away",
            )

    def _check_proportions(self) -> None:
        if self.data_probs is None:
            return
        num_corpora = len(self.corpora)
        if len(self.data_probs) != num_corpora:
            raise UsageError(
                "--training.data_probs does not fit --training.dataset",
                got=f"{len(self.data_probs)} proportions for {num_corpora} corpora",
                expected="one for each corpus",
            )
        for proportion in self.data_probs:
            if not 0 < proportion < math.inf:
                raise UsageError(
                    f"--training.data_probs cannot contain {proportion}",
                    expected="numbers above 0",
                    fix="Leave a corpus that is not to be drawn out of --training.dataset",
                )

    @property
    def corpora(self) -> tuple[str, ...]:
        """The comma-separated parts of dataset."""
        return tuple(part.strip() for part in (self.dataset or "").split(",") if part.strip())

    @property
    def packed_len(self) -> int | None:
        """The length of the packs that corpus folders are sampled by; None for windows."""
        return None if self.packing == "windows" else self.window_len or self.longest_sequence

    @property
    def longest_sequence(self) -> int:
        """context_len, or seq_len where it is absent."""
        return self.seq_len if self.context_len is None else self.context_len


@dataclass(frozen=True, kw_only=True)
class ValidationOptions:
    """What is validated on, and how often."""

    dataset: str | None = option(None, help="[NAME=]PATH[@SPLIT], comma separated; the split is val if there is one")
    freq: int = option(500, help="how often; always at the end, too", unit="steps")
    tokens: int = option(1_000_000, help="at most this much of each set", unit="tokens", parse=parse_count)

    def __post_init__(self) -> None:
        at_least("validation", self, 1, "freq", "tokens")


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """How weights are updated."""

    name: str = option("AdamW", help="the optimizer", choices=("AdamW", "Adam", "SGD", "Muon"))
    lr: float = option(1e-3, help="learning rate at its highest")
    beta1: float = option(0.9, help="decay of the first moment (SGD: its momentum)")
    beta2: float = option(0.95, help="decay of the second moment")
    eps: float = option(1e-8, help="added to the root of the second moment")
    weight_decay: float = option(0.1, help="decoupled weight decay (Adam, SGD: L2)")
    implementation: str | None = option(
        None, help="fused on a GPU, foreach on a CPU, if absent", choices=("fused", "foreach", "for-loop")
    )
    fused: bool | None = option(None, help="old spelling: implementation fused, or for-loop if false")
    decay_all: bool = option(False, help="the old rule: norms, biases and marked parameters are decayed, too")
    lr_factors: tuple[str, ...] = option(
        (), help="factors on lr by parts of parameters' names, the last that matches: 'embed*=0.1,lm_head=0.5'"
    )
    muon_momentum: float = option(0.95, help="decay of Muon's momentum; beta1, beta2 and eps are its AdamW's")
    muon_adjust_lr: str = option(
        "match_rms_adamw",
        help="Muon's factor on lr: as large updates as AdamW's, or √max(1, rows/columns)",
        choices=("match_rms_adamw", "original"),
    )
    early_step_in_backward: bool = option(False, help="update each weight in backward, once its gradient is there")
    scheduler: str | None = option(
        None, help="old name of lr_scheduler.decay_type", choices=("wsd", "cosine", "linear")
    )

    def __post_init__(self) -> None:
        at_least("optimizer", self, 0, "lr", "beta1", "beta2", "eps", "weight_decay", "muon_momentum")
        lr_factors(self.lr_factors)
        for name in ("beta1", "beta2", "muon_momentum"):
            if getattr(self, name) >= 1:
                raise UsageError(f"--optimizer.{name} cannot be {getattr(self, name)}", expected="a number below 1")


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """How the learning rate goes: up, flat, down."""

    warmup_steps: int = option(
        DEFAULT_WARMUP_STEPS, help="steps of the way up", unit="steps", aliases=("training.warmup_steps",)
    )
    warmup_tokens: int | None = option(None, help="instead of warmup_steps", unit="tokens", parse=parse_count)
    decay_ratio: float | None = option(None, help="share of the steps on the way down; all after warm-up if absent")
    decay_type: str = option("cosine", help="shape of the way down", choices=("cosine", "linear", "sqrt"))
    lr_min: float = option(0.1, help="where it ends, as a share of optimizer.lr", aliases=("optimizer.min_lr_ratio",))

    def __post_init__(self) -> None:
        at_least("lr_scheduler", self, 0, "warmup_steps", "warmup_tokens", "decay_ratio", "lr_min")
        _refuse_both("lr_scheduler", self, "warmup_steps", "warmup_tokens", DEFAULT_WARMUP_STEPS)
        for name in ("decay_ratio", "lr_min"):
            value = getattr(self, name)
            if value is not None and value > 1:
                raise UsageError(f"--lr_scheduler.{name} cannot be {value}", expected="a ratio, from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """What is logged; metrics.jsonl always is."""

    log_freq: int = option(10, help="how often a step is logged", unit="steps")
    enable_tensorboard: bool = option(False, help="log to TensorBoard")
    save_tb_folder: str = option("tb", help="TensorBoard's folder in the run folder")
    enable_wandb: bool = option(False, help="log to Weights & Biases")
    enable_trackio: bool = option(False, help="log to trackio")
    peak_tflops: float | None = option(
        None, help="what a device can do, for mfu(%); by a table of devices if absent", unit="10^12 operations a second"
    )
    disable_color_printing: bool = option(False, help="plain console lines")
    rank_0_only: bool = option(True, help="only rank 0 logs to TensorBoard")
    save_for_all_ranks: bool | None = option(None, help="old spelling: the opposite of rank_0_only")

    def __post_init__(self) -> None:
        at_least("metrics", self, 1, "log_freq")
        if self.peak_tflops is not None and not 0 < self.peak_tflops < math.inf:
            raise UsageError(f"--metrics.peak_tflops cannot be {self.peak_tflops}", expected="a number above 0")


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """What is saved, loaded and exported."""

    enable_checkpoint: bool = option(True, help="save, and resume from what was saved")
    folder: str = option("checkpoint", help="the checkpoints' folder in the run folder")
    interval: int = option(500, help="how often a checkpoint is saved; the last step always is", unit="interval_type")
    interval_type: str = option("steps", help="unit of interval", choices=("steps", "seconds"))
    load_step: int | None = option(
        None, help="resume from this step; -1: from the latest", unit="steps", parse=_minus_one_is_none
    )
    keep_latest_k: int | None = option(
        None, help="keep this many checkpoints; 0: all", unit="checkpoints", parse=_zero_is_none
    )
    exclude_from_loading: tuple[str, ...] = option(
        (), help="parts of a checkpoint not to load: model, optimizer, dataloader, train_state (lr_scheduler: no part)"
    )
    model_weights_only: bool = option(
        False,
        help="at the last step save weights only: a third of the size, and the run can be made no longer",
        aliases=("checkpoint.last_save_model_weights_only",),
    )
    export_dtype: str = option(
        "float32", help="number format of the final export", choices=("float32", "bfloat16", "float16")
    )
    create_seed_checkpoint: bool = option(False, help="save the fresh weights as step-0 and end")
    initial_load_path: Path | None = option(
        None, help="begin from the weights in this folder: a checkpoint, a Hugging Face model, or a predecessor's DCP"
    )
    initial_load_model_weights_only: bool = option(
        True, help="of initial_load_path, take weights only; off: step, moments and place in the data too"
    )
    export_hf: bool = option(True, help="at the end, export the model to hf/ in the run folder")
    fast_open: bool = option(False, help="trust the sizes of a checkpoint's files instead of checking every byte")
    allow_data_change: bool = option(
        False, help="where the data are not the run's, go on with them as a new data segment"
    )
    async_mode: str = option(
        "disabled", help="save beside training", choices=("disabled", "async", "async_with_pinned_mem")
    )

    def __post_init__(self) -> None:
        at_least("checkpoint", self, 1, "interval", "keep_latest_k")
        at_least("checkpoint", self, 0, "load_step")
        for part in self.exclude_from_loading:
            if part not in PARTS_OF_CHECKPOINTS:
                raise UsageError(
                    f"--checkpoint.exclude_from_loading cannot contain {part!r}",
                    expected=", ".join(PARTS_OF_CHECKPOINTS),
                )
        if "model" in self.exclude_from_loading and self.initial_load_path and self.initial_load_model_weights_only:
            raise UsageError(
                "--checkpoint.exclude_from_loading model leaves nothing of --checkpoint.initial_load_path to load",
                fix="Leave one of them away, or add --checkpoint.initial_load_model_weights_only false",
            )


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointOptions:
    """Computing activations again instead of keeping them."""

    mode: str = option("none", help="which activations are computed again", choices=("none", "selective", "full"))
    selective_ac_option: str = option(
        "2", help="of selective: every n-th block; op: every block, but for attention and every second matrix product"
    )

    def __post_init__(self) -> None:
        value = self.selective_ac_option
        if value != "op" and not (value.isdecimal() and int(value) > 0):
            raise UsageError(
                "--activation_checkpoint.selective_ac_option is no choice",
                got=value,
                expected="a number of blocks, or op",
            )


@dataclass(frozen=True, kw_only=True)
class ActivationOffloadOptions:
    """Keeping activations in host memory, pinned, from forward to backward."""

    mode: str = option("none", help="which activations are offloaded", choices=("none", "full"))


@dataclass(frozen=True, kw_only=True)
class Float8Options:
    """8-bit matrix products (torchao)."""

    enable_float8_linear: bool = option(False, help="run linear layers in float8")
    enable_fsdp_float8_all_gather: bool = option(False, help="gather weights in float8")
    precompute_float8_dynamic_scale_for_fsdp: bool = option(False, help="compute all scales at once")
    force_recompute_fp8_weight_in_bwd: bool = option(False, help="cast weights again in backward")
    recipe_name: str | None = option(None, help="a recipe of torchao")
    scaling_type_input: str = option("dynamic", help="scaling of inputs", choices=("dynamic", "delayed"))
    scaling_type_weight: str = option("dynamic", help="scaling of weights", choices=("dynamic", "delayed"))
    scaling_type_grad_output: str = option("dynamic", help="scaling of gradients", choices=("dynamic", "delayed"))


@dataclass(frozen=True, kw_only=True)
class CommOptions:
    """How long ranks wait for one another."""

    init_timeout_seconds: float = option(
        300.0, help="how long ranks wait for one another until the first step of a process is done", unit="seconds"
    )
    train_timeout_seconds: float = option(100.0, help="the same after that step", unit="seconds")
    shutdown_timeout_seconds: float = option(600.0, help="the same for a save, and for the end", unit="seconds")
    trace_buf_size: int = option(20_000, help="entries of NCCL's flight recorder; 0: off", unit="entries")

    def __post_init__(self) -> None:
        at_least("comm", self, 1, "init_timeout_seconds", "train_timeout_seconds", "shutdown_timeout_seconds")
        at_least("comm", self, 0, "trace_buf_size")


@dataclass(frozen=True, kw_only=True)
class ProfilingOptions:
    """Traces of what a step does, and snapshots of what holds memory."""

    enable_profiling: bool = option(False, help="write profiler traces")
    save_traces_folder: str = option("profile_traces", help="their folder in the run folder")
    profile_freq: int = option(10, help="how often a trace and a snapshot are written, at least 2", unit="steps")
    enable_memory_snapshot: bool = option(False, help="write memory snapshots, also when a GPU's memory runs out")
    save_memory_snapshot_folder: str = option("memory_snapshot", help="their folder in the run folder")

    def __post_init__(self) -> None:
        at_least("profiling", self, 2, "profile_freq")  # the profiler needs a step to warm up in


@dataclass(frozen=True, kw_only=True)
class MemoryEstimationOptions:
    """Memory without running."""

    enabled: bool = option(False, help="estimate the memory of a rank, write nothing and end")
    disable_fake_mode: bool = option(False, help="watch a step on real tensors, on the GPU if there is one")


@dataclass(frozen=True, kw_only=True)
class ExperimentalOptions:
    """Custom models, and parallelism beyond data."""

    custom_model_path: str | None = option(None, help="a module to import before the model is built")
    enable_async_tensor_parallel: bool = option(False, help="overlap tensor parallelism with its transfers")
    context_parallel_degree: int = option(1, help="ranks that share a sequence", unit="ranks")
    context_parallel_rotate_method: str = option(
        "allgather", help="how keys and values go round", choices=("allgather", "alltoall")
    )
    pipeline_parallel_degree: int = option(1, help="ranks that share the layers", unit="ranks")
    pipeline_parallel_split_points: tuple[str, ...] = option((), help="modules that begin a stage")
    pipeline_parallel_schedule: str = option("1F1B", help="order of forward and backward")
    pipeline_parallel_schedule_csv: str | None = option(None, help="a schedule of your own")
    pipeline_parallel_microbatches: int | None = option(None, help="pieces of a batch", unit="micro-batches")
    enable_compiled_autograd: bool = option(False, help="compile the backward as a whole")
