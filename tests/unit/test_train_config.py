"""flame-train's options: the whole surface, old spellings, wrong values, and configurations that parse back."""

from __future__ import annotations

import dataclasses
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flame.config import options_of, parse_flat
from flame.errors import UsageError
from flame.preprocess.config import BuildOptions
from flame.train.config import TrainConfig, flatten, parse_train_config, to_toml
from flame.train.moved import refuse_dataset_name
from flame.train.options import TrainingOptions

NEEDED = ("--model.config", "m.json", "--training.dataset", "corpus")
OPTIONS = {option.name: option for option in options_of(TrainConfig)}

# Everything that users of the predecessor type, and what is new, each with its default. -1 and 0 that mean "none" are
# None; None otherwise: no default.
SURFACE: dict[str, Any] = {
    "job.config_file": None,
    "job.dump_folder": Path("exp"),
    "job.description": "",
    "job.print_args": False,
    "job.use_for_integration_test": False,
    "job.dry_run": False,
    "job.dry_run_ranks": None,
    "model.config": None,
    "model.tokenizer_path": None,
    "model.norm_type": None,
    "model.converters": (),
    "model.trust_remote_code": False,
    "model.attention": "auto",
    "training.dataset": None,
    "training.data_probs": None,
    "training.source": (),
    "training.dataset_name": None,
    "training.dataset_split": None,
    "training.data_dir": None,
    "training.data_files": None,
    "training.streaming": False,
    "training.batch_size": 8,
    "training.seq_len": 2048,
    "training.context_len": None,
    "training.varlen": False,
    "training.window_len": None,
    "training.packing": "windows",
    "training.tokens": None,
    "training.gradient_accumulation_steps": 1,
    "training.steps": 10_000,
    "training.max_norm": 1.0,
    "training.skip_nan_inf": False,
    "training.num_workers": 1,
    "training.prefetch_factor": 2,
    "training.pin_memory": False,
    "training.persistent_workers": False,
    "training.data_parallel_replicate_degree": 1,
    "training.data_parallel_shard_degree": None,
    "training.tensor_parallel_degree": 1,
    "training.disable_loss_parallel": False,
    "training.enable_cpu_offload": False,
    "training.fsdp_reshard_after_forward": "default",
    "training.mixed_precision_param": None,
    "training.mixed_precision_reduce": "float32",
    "training.compile": False,
    "training.gc_freq": 50,
    "training.seed": 42,
    "training.deterministic": False,
    "validation.dataset": None,
    "validation.freq": 500,
    "validation.tokens": 1_000_000,
    "optimizer.name": "AdamW",
    "optimizer.lr": 1e-3,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.1,
    "optimizer.implementation": None,
    "optimizer.fused": None,
    "optimizer.decay_all": False,
    "optimizer.lr_factors": (),
    "optimizer.muon_momentum": 0.95,
    "optimizer.muon_adjust_lr": "match_rms_adamw",
    "optimizer.early_step_in_backward": False,
    "optimizer.scheduler": None,
    "lr_scheduler.warmup_steps": 200,
    "lr_scheduler.warmup_tokens": None,
    "lr_scheduler.decay_ratio": None,
    "lr_scheduler.decay_type": "cosine",
    "lr_scheduler.lr_min": 0.1,
    "metrics.log_freq": 10,
    "metrics.enable_tensorboard": False,
    "metrics.save_tb_folder": "tb",
    "metrics.enable_wandb": False,
    "metrics.enable_trackio": False,
    "metrics.disable_color_printing": False,
    "metrics.peak_tflops": None,
    "metrics.rank_0_only": True,
    "metrics.save_for_all_ranks": None,
    "checkpoint.enable_checkpoint": True,
    "checkpoint.folder": "checkpoint",
    "checkpoint.interval": 500,
    "checkpoint.interval_type": "steps",
    "checkpoint.load_step": None,
    "checkpoint.keep_latest_k": None,
    "checkpoint.exclude_from_loading": (),
    "checkpoint.model_weights_only": False,
    "checkpoint.export_dtype": "float32",
    "checkpoint.create_seed_checkpoint": False,
    "checkpoint.initial_load_path": None,
    "checkpoint.initial_load_model_weights_only": True,
    "checkpoint.export_hf": True,
    "checkpoint.fast_open": False,
    "checkpoint.allow_data_change": False,
    "checkpoint.async_mode": "disabled",
    "activation_checkpoint.mode": "none",
    "activation_checkpoint.selective_ac_option": "2",
    "activation_offload.mode": "none",
    "float8.enable_float8_linear": False,
    "float8.enable_fsdp_float8_all_gather": False,
    "float8.precompute_float8_dynamic_scale_for_fsdp": False,
    "float8.force_recompute_fp8_weight_in_bwd": False,
    "float8.recipe_name": None,
    "float8.scaling_type_input": "dynamic",
    "float8.scaling_type_weight": "dynamic",
    "float8.scaling_type_grad_output": "dynamic",
    "comm.init_timeout_seconds": 300.0,
    "comm.train_timeout_seconds": 100.0,
    "comm.shutdown_timeout_seconds": 600.0,
    "comm.trace_buf_size": 20_000,
    "profiling.enable_profiling": False,
    "profiling.save_traces_folder": "profile_traces",
    "profiling.profile_freq": 10,
    "profiling.enable_memory_snapshot": False,
    "profiling.save_memory_snapshot_folder": "memory_snapshot",
    "memory_estimation.enabled": False,
    "memory_estimation.disable_fake_mode": False,
    "experimental.custom_model_path": None,
    "experimental.enable_async_tensor_parallel": False,
    "experimental.context_parallel_degree": 1,
    "experimental.context_parallel_rotate_method": "allgather",
    "experimental.pipeline_parallel_degree": 1,
    "experimental.pipeline_parallel_split_points": (),
    "experimental.pipeline_parallel_schedule": "1F1B",
    "experimental.pipeline_parallel_schedule_csv": None,
    "experimental.pipeline_parallel_microbatches": None,
    "experimental.enable_compiled_autograd": False,
}

ALIASES = {
    "dry_run": "job.dry_run",
    "dry_run_ranks": "job.dry_run_ranks",
    "source": "training.source",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "optimizer.min_lr_ratio": "lr_scheduler.lr_min",
    "checkpoint.last_save_model_weights_only": "checkpoint.model_weights_only",
}

USUAL_CALL = """
    --job.dump_folder exp/a --model.config configs/transformer_340M.json --model.tokenizer_path tok
    --optimizer.name AdamW --optimizer.eps 1e-15 --optimizer.lr 1e-3 --lr_scheduler.warmup_steps 1024
    --lr_scheduler.lr_min 0.1 --lr_scheduler.decay_type cosine --training.batch_size 1 --training.seq_len 65536
    --training.context_len 4096 --training.varlen --training.gradient_accumulation_steps 1 --training.steps 20480
    --training.max_norm 1.0 --training.skip_nan_inf --training.num_workers 32 --training.prefetch_factor 2
    --training.seed 42 --training.compile --checkpoint.interval 2048 --checkpoint.load_step -1
    --checkpoint.keep_latest_k 2 --metrics.log_freq 1
"""
USUAL_DATA = """
    --training.dataset HuggingFaceFW/fineweb-edu --training.dataset_name sample-100BT
    --training.dataset_split train --training.streaming
"""


def parse(*argv: str) -> TrainConfig:
    return parse_train_config([*NEEDED, *argv])


def with_toml(folder: Path, text: str, *argv: str) -> TrainConfig:
    file = folder / "run.toml"
    file.write_text(text)
    return parse("--job.config_file", str(file), *argv)


def test_the_whole_surface_with_its_defaults() -> None:
    assert {name: option.default for name, option in OPTIONS.items()} == SURFACE
    assert {alias: option.name for option in OPTIONS.values() for alias in option.info.aliases} == ALIASES


def test_a_plain_command_line_gives_the_defaults() -> None:
    given = {"model.config": "m.json", "training.dataset": "corpus"}
    expected = {name: value for name, value in SURFACE.items() if name != "job.config_file"} | given
    assert flatten(parse()) == expected


def test_what_may_be_none_is_none_by_default() -> None:
    # to_toml leaves None away: a default other than None would come back in its place.
    for option in OPTIONS.values():
        if "None" in str(option.type):
            assert option.default is None, option.name


def test_the_usual_call_of_the_predecessor() -> None:
    call = USUAL_CALL.split()
    old_data = USUAL_DATA.split()
    with pytest.raises(UsageError) as refused:
        parse_train_config([*call, *old_data])
    command = (
        "flame-preprocess build --dataset HuggingFaceFW/fineweb-edu --dataset_name sample-100BT --dataset_split train "
        "--tokenizer tok --output corpora/fineweb-edu"
    )
    assert command in str(refused.value) and "--training.dataset corpora/fineweb-edu" in str(refused.value)

    config = parse_train_config([*call, "--training.dataset", "corpora/fineweb-edu"])
    assert (
        config.optimizer.eps == 1e-15 and config.checkpoint.load_step is None and config.checkpoint.keep_latest_k == 2
    )
    assert config.training.longest_sequence == 4096 and config.training.skip_nan_inf and config.training.compile


# ---- spellings


@pytest.mark.parametrize(
    ("argv", "name", "expected"),
    [
        ("--checkpoint.load_step -1", "checkpoint.load_step", None),
        ("--checkpoint.load_step=-1", "checkpoint.load_step", None),
        ("--checkpoint.load_step 0", "checkpoint.load_step", 0),
        ("--checkpoint.keep_latest_k 0", "checkpoint.keep_latest_k", None),
        ("--training.data_parallel_shard_degree -1", "training.data_parallel_shard_degree", None),
        ("--training.data-parallel-shard-degree 2", "training.data_parallel_shard_degree", 2),
        ("--checkpoint.interval_type step", "checkpoint.interval_type", "steps"),
        ("--training.warmup_steps 7", "lr_scheduler.warmup_steps", 7),
        ("--optimizer.min_lr_ratio 0.2", "lr_scheduler.lr_min", 0.2),
        ("--optimizer.fused", "optimizer.implementation", "fused"),
        ("--optimizer.fused=1", "optimizer.implementation", "fused"),
        ("--optimizer.fused false", "optimizer.implementation", "for-loop"),
        ("--optimizer.fused --optimizer.implementation fused", "optimizer.implementation", "fused"),
        ("--metrics.save_for_all_ranks false", "metrics.rank_0_only", True),
        ("--metrics.save_for_all_ranks", "metrics.rank_0_only", False),
        ("--optimizer.scheduler wsd", "lr_scheduler.decay_type", "linear"),
        ("--optimizer.scheduler wsd", "lr_scheduler.decay_ratio", 0.1),
        ("--optimizer.scheduler wsd --lr_scheduler.decay_ratio 0.3", "lr_scheduler.decay_ratio", 0.3),
        ("--optimizer.scheduler linear", "lr_scheduler.decay_type", "linear"),
        ("--optimizer.scheduler linear", "lr_scheduler.decay_ratio", None),
        ("--optimizer.scheduler cosine", "lr_scheduler.decay_type", "cosine"),
        ("--training.tokens 1.5M", "training.tokens", 1_500_000),
        ("--training.max_norm inf", "training.max_norm", float("inf")),
        ("--training.data_probs 0.7 --training.dataset a", "training.data_probs", (0.7,)),
        ("--training.varlen false", "training.varlen", False),
    ],
)
def test_spellings(argv: str, name: str, expected: Any) -> None:
    assert flatten(parse(*argv.split()))[name] == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--optimizer.fused --optimizer.implementation foreach", "optimizer.fused is an old spelling"),
        ("--optimizer.scheduler wsd --lr_scheduler.decay_type cosine", "optimizer.scheduler is an old spelling"),
        ("--optimizer.scheduler step", "--optimizer.scheduler cannot be 'step'"),
        ("--optimizer.fused=perhaps", "--optimizer.fused cannot be 'perhaps'"),
        ("--training.steps 5 --training.tokens 1M", "--training.steps and --training.tokens are both given"),
        ("--training.warmup_steps 5 --lr_scheduler.warmup_tokens 1M", "warmup_tokens are both given"),
    ],
)
def test_contradictions_and_wrong_old_values(argv: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(*argv.split())


# ---- the file and the command line


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    text = '[training]\nsteps = 5\nseq_len = 64\n[optimizer]\nscheduler = "wsd"\nfused = true\n'
    config = with_toml(tmp_path, text, "--training.seq-len", "32", "--optimizer.fused", "false")
    assert (config.training.steps, config.training.seq_len) == (5, 32)
    assert config.optimizer.implementation == "for-loop"
    assert (config.lr_scheduler.decay_type, config.lr_scheduler.decay_ratio) == ("linear", 0.1)


def test_a_scheduler_on_the_command_line_replaces_all_of_the_files(tmp_path: Path) -> None:
    config = with_toml(tmp_path, '[optimizer]\nscheduler = "wsd"\n', "--optimizer.scheduler", "cosine")
    assert (config.lr_scheduler.decay_type, config.lr_scheduler.decay_ratio) == ("cosine", None)


@pytest.mark.parametrize("tokens_in_file", [True, False])
def test_steps_and_tokens_replace_each_other(tmp_path: Path, tokens_in_file: bool) -> None:
    if tokens_in_file:
        config = with_toml(tmp_path, "training.tokens = 1000000", "--training.steps", "5")
        assert config.training.tokens is None and config.total_steps(1000) == 5
    else:
        config = with_toml(tmp_path, "training.steps = 5", "--training.tokens", "1M")
        assert config.total_steps(1000) == 1000 and flatten(config)["training.steps"] is None


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"training\.seq_len"):
        parse("--training.seqlen", "5")
    with pytest.raises(UsageError, match=r"no option 'training\.stepz' .*run\.toml.*training\.steps"):
        with_toml(tmp_path, "[training]\nstepz = 5\n")


def test_tokens_are_rounded_up_to_steps() -> None:
    config = parse("--training.tokens", "1001", "--lr_scheduler.warmup_tokens", "11")
    assert config.total_steps(10) == 101 and config.warmup_steps(10) == 2
    assert parse().total_steps(10) == 10_000 and parse().warmup_steps(10) == 200


# ---- what cannot run


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--training.batch_size 0", "--training.batch_size cannot be 0"),
        ("--training.seq_len -4", "--training.seq_len cannot be -4"),
        ("--training.steps 0", "--training.steps cannot be 0"),
        ("--training.tokens 0", "--training.tokens cannot be 0"),
        ("--training.max_norm 0", "--training.max_norm cannot be 0"),
        ("--training.max_norm nan", "--training.max_norm cannot be nan"),
        ("--training.seed -1", "--training.seed cannot be -1"),
        ("--training.data_parallel_shard_degree 0", "data_parallel_shard_degree cannot be 0"),
        ("--training.data_parallel_shard_degree -2", "data_parallel_shard_degree cannot be -2"),
        ("--training.context_len 4096", "longer than a row"),
        ("--training.context_len 512", "without varlen"),
        ("--training.window_len 512", "without varlen"),
        ("--training.varlen --training.window_len 1000", "does not divide"),
        ("--training.varlen --training.window_len 4096", "does not divide"),
        ("--training.data_probs 0.5,0.5", "2 proportions for 1 corpora"),
        ("--training.dataset a,b --training.data_probs 1,0", "cannot contain 0.0"),
        ("--training.dataset a,b --training.data_probs 1,nan", "cannot contain nan"),
        ("--optimizer.lr nan", "--optimizer.lr cannot be nan"),
        ("--optimizer.lr inf", "--optimizer.lr cannot be inf"),
        ("--optimizer.beta2 1", "--optimizer.beta2 cannot be 1.0"),
        ("--optimizer.name Lion", "--optimizer.name cannot be 'Lion'"),
        ("--lr_scheduler.decay_ratio 1.1", "--lr_scheduler.decay_ratio cannot be 1.1"),
        ("--lr_scheduler.lr_min -0.1", "--lr_scheduler.lr_min cannot be -0.1"),
        ("--lr_scheduler.warmup_steps -1", "--lr_scheduler.warmup_steps cannot be -1"),
        ("--checkpoint.interval 0", "--checkpoint.interval cannot be 0"),
        ("--checkpoint.load_step -2", "--checkpoint.load_step cannot be -2"),
        ("--metrics.log_freq 0", "--metrics.log_freq cannot be 0"),
        ("--validation.freq 0", "--validation.freq cannot be 0"),
        ("--comm.train_timeout_seconds 0", "--comm.train_timeout_seconds cannot be 0"),
        ("--training.seq_len many", "--training.seq_len cannot be 'many'"),
    ],
)
def test_values_that_cannot_be(argv: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(*argv.split())


def test_a_window_that_fits_is_taken() -> None:
    assert parse("--training.window_len", "2048").training.window_len == 2048
    config = parse("--training.varlen", "--training.window_len", "512", "--training.context_len", "100")
    assert config.training.window_len == 512 and config.training.longest_sequence == 100


@pytest.mark.parametrize("missing", ["model.config", "training.dataset"])
def test_what_every_run_needs(missing: str) -> None:
    argv = [f"--{name}=x" for name in ("model.config", "training.dataset") if name != missing]
    with pytest.raises(UsageError, match=f"a run needs --{missing}"):
        parse_train_config(argv)


# ---- what moved, and what is not here yet


@pytest.mark.parametrize(
    ("argv", "commands"),
    [
        (
            "--training.dataset=raw --training.data_files=a.jsonl,b.jsonl --training.data_dir=x",
            ["--dataset raw --data_dir x --data_files a.jsonl,b.jsonl --tokenizer TOKENIZER --output corpora/raw"],
        ),
        (
            "--training.dataset=a/x,b/x --training.dataset_name=p,q --training.dataset_split=train "
            "--training.data_probs=.5,.5 --model.tokenizer_path=tok",
            [
                "--dataset a/x --dataset_name p --dataset_split train --tokenizer tok --output corpora/x",
                "--dataset b/x --dataset_name q --dataset_split train --tokenizer tok --output corpora/x-q",
            ],
        ),
        ("--training.streaming", ["--dataset DATASET --tokenizer TOKENIZER --output corpora/DATASET"]),
    ],
)
def test_reading_text_is_answered_with_the_commands_to_type(argv: str, commands: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        parse_train_config(["--model.config=m.json", *argv.split()])
    message = str(refused.value)
    found = re.findall(r"flame-preprocess build (.*?);", message)
    assert found == commands
    outputs = [shlex.split(command)[-1] for command in commands]
    assert message.endswith(f"--training.dataset {','.join(outputs)}.")
    known = {option.name for option in options_of(BuildOptions)}
    assert {word[2:] for command in commands for word in shlex.split(command) if word.startswith("--")} <= known


def test_the_command_for_files_parses() -> None:
    with pytest.raises(UsageError) as refused:
        parse("--training.dataset", "my raw", "--training.data_files", "a b.jsonl")
    words = shlex.split(re.findall(r"flame-preprocess build (.*?);", str(refused.value))[0])
    options = parse_flat(BuildOptions, words, program="flame-preprocess build")
    assert options.dataset == ("my raw",) and options.data_files == ("a b.jsonl",)


def test_streaming_false_is_fine() -> None:
    assert parse("--training.streaming", "false").training.streaming is False


def test_options_of_text_are_only_to_be_left_away_where_the_corpus_is_built(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "manifest.json").touch()
    (tmp_path / "mix.json").touch()
    for dataset in (f"{tmp_path / 'web'},{tmp_path / 'web'}@train", f"{tmp_path / 'mix.json'}"):
        with pytest.raises(UsageError, match=rf"streaming .* Leave that away: {dataset} is built already\.$"):
            parse("--training.dataset", dataset, "--training.streaming")


def test_the_name_of_a_dataset_is_answered_with_the_command_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpora").mkdir()
    for path in ("corpora/web", "web", "mix.json", str(tmp_path / "web"), "a/b/c", "a/x,b/y"):
        refuse_dataset_name(TrainingOptions(dataset=path), None)  # absent ones are told when they are opened
    with pytest.raises(UsageError, match=r"build --dataset nobody/web --tokenizer tok --output corpora/web; then"):
        refuse_dataset_name(TrainingOptions(dataset="nobody/web"), "tok")


# ---- the saved configuration


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@given(description=texts, folder=texts.filter(lambda text: "\0" not in text), lr=st.floats(0, 1e300), data=st.data())
def test_a_configuration_parses_back(
    tmp_path_factory: pytest.TempPathFactory, description: str, folder: str, lr: float, data: st.DataObject
) -> None:
    argv = [f"--job.description={description}", f"--job.dump_folder={folder}", f"--optimizer.lr={lr}"]
    argv += data.draw(
        st.sampled_from(
            [
                [],
                ["--training.max_norm=inf", "--training.context_len=2048"],
                ["--training.tokens=1M", "--lr_scheduler.warmup_tokens=10"],
                ["--optimizer.scheduler=wsd", "--optimizer.fused", "--checkpoint.load_step=3"],
                ["--training.dataset=a,b@val", "--training.data_probs=0.1,1e-7", "--training.varlen"],
            ]
        )
    )
    config = parse(*argv)
    file = tmp_path_factory.mktemp("saved") / "config.toml"
    file.write_text(to_toml(config), "utf-8")
    again = parse_train_config(["--job.config_file", str(file)])
    assert again == dataclasses.replace(config, job=dataclasses.replace(config.job, config_file=file))
    assert to_toml(again) == to_toml(config)


def test_the_saved_configuration_says_what_counts() -> None:
    tables = tomllib.loads(to_toml(parse("--training.tokens=1M", "--optimizer.scheduler=wsd")))
    assert tables["training"]["tokens"] == 1_000_000 and "steps" not in tables["training"]
    assert tables["lr_scheduler"] == {"warmup_steps": 200, "decay_ratio": 0.1, "decay_type": "linear", "lr_min": 0.1}
    assert "scheduler" not in tables["optimizer"] and "config_file" not in tables["job"]


def test_sections_are_frozen_and_checked_however_they_are_made() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse().training.steps = 5  # type: ignore[misc]
    with pytest.raises(UsageError, match="both given"):
        TrainingOptions(steps=5, tokens=100)
