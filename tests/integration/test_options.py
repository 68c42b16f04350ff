"""Options of flame-train that no other test shows at work: that they change what they say, or nothing where they must.

tests/unit/test_option_surface.py names the test of every option.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from flame.train import loop, model_setup
from flame.train.__main__ import main
from flame.train.config import parse_train_config
from tests.runs import PROJECT, arguments, losses_and_norms, read_metrics, refused, tensors_of
from tests.tokenizers import write_tiny_tokenizer
from tests.unit.test_train_config import USUAL_CALL, USUAL_DATA

SHORT = {"training__steps": 3, "lr_scheduler__warmup_steps": 0, "checkpoint__enable_checkpoint": "false"}

pytestmark = pytest.mark.usefixtures("handlers_kept")


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of a run with nothing but SHORT."""
    run = tmp_path_factory.mktemp("plain")
    assert main(arguments(folder, run, **SHORT)) == 0
    assert not (run / "checkpoint").exists() and not (run / "hf").exists()
    return losses_and_norms(run)


def test_options_of_saving_telling_and_reading_leave_the_numbers_alone(
    folder: Path,
    tmp_path: Path,
    plain: list[tuple[int, float, float]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, options = tmp_path / "run", {"training__num_workers": 0, "training__prefetch_factor": 5}
    options |= {f"training__{name}": "true" for name in ("pin_memory", "persistent_workers")}
    told = {"job__description": "a text", "job__print_args": "true", "job__use_for_integration_test": "true"}
    saved = {"checkpoint__enable_checkpoint": "true", "checkpoint__folder": "saves", "checkpoint__interval": 2}
    saved |= {"checkpoint__export_hf": "true", "checkpoint__export_dtype": "bfloat16"}
    held_out = {"validation__dataset": folder / "web", "validation__freq": 2, "validation__tokens": 256}
    chosen = SHORT | options | told | saved | held_out | {"metrics__log_freq": 1}
    assert main(arguments(folder, run, **chosen)) == 0
    assert losses_and_norms(run) == plain
    printed = capsys.readouterr().err
    assert f"resolved configuration:\n{(run / 'config.toml').read_text()}" in printed
    assert 'description = "a text"' in printed and "job.use_for_integration_test has no effect" in printed
    assert sorted(path.name for path in (run / "saves").iterdir()) == ["step-2", "step-3"]
    with safe_open(run / "hf" / "model.safetensors", "pt") as exported:
        assert {exported.get_tensor(name).dtype for name in exported.keys()} == {torch.bfloat16}  # noqa: SIM118
    scores = [line.get("validation/web/loss") for line in read_metrics(run)]
    assert scores[0] is None and scores[1] and scores[2], "every 2 steps, and at the end"
    # A smaller share of the set has another loss.
    assert main(arguments(folder, tmp_path / "less", **chosen | {"validation__tokens": 128})) == 0
    assert read_metrics(tmp_path / "less")[1]["validation/web/loss"] != scores[1]


@pytest.mark.parametrize(
    ("option", "value", "within"),
    [
        ("training__seed", 7, None),  # other weights
        ("training__mixed_precision_param", "bfloat16", 0.02),
        ("training__varlen", "false", 0.05),
    ],
)
def test_what_changes_the_first_loss(
    folder: Path, tmp_path: Path, plain: list[tuple[int, float, float]], option: str, value: Any, within: float | None
) -> None:
    options = SHORT | {option: value, "training__steps": 1}
    if option == "training__varlen":
        options["training__context_len"] = 128  # nothing cuts a row
    assert main(arguments(folder, tmp_path / "run", **options)) == 0
    ((_, loss, _),) = losses_and_norms(tmp_path / "run")
    assert loss != plain[0][1]
    assert within is None or loss == pytest.approx(plain[0][1], rel=within)


Updated = tuple[tuple[int, float, float], dict[str, torch.Tensor]]


def train_updated(folder: Path, run: Path, options: dict[str, Any]) -> Updated:
    """Train with an eps that matters; returns what the first step logged, and the weights after the third."""
    chosen = SHORT | {"optimizer__eps": 1e-4, "optimizer__weight_decay": 1.0, "checkpoint__enable_checkpoint": "true"}
    assert main(arguments(folder, run, **chosen | options)) == 0
    return losses_and_norms(run)[0], tensors_of(run / "checkpoint" / "step-3", "model.")


@pytest.fixture(scope="module")
def updated(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Updated:
    return train_updated(folder, tmp_path_factory.mktemp("updated"), {})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("training__max_norm", 0.01),  # as eps is not small beside such gradients
        ("optimizer__beta1", 0.5),
        ("optimizer__beta2", 0.5),
        ("optimizer__eps", 1e-2),
        ("optimizer__weight_decay", 5.0),
        ("optimizer__decay_all", "true"),
        ("optimizer__lr", 1e-2),
        ("optimizer__lr_factors", "embed*=0.1"),
        ("lr_scheduler__lr_min", 0.9),
        ("lr_scheduler__decay_type", "linear"),
        ("lr_scheduler__decay_ratio", 0.0),
    ],
)
def test_what_changes_updates_and_not_the_first_loss(
    folder: Path, tmp_path: Path, updated: Updated, option: str, value: Any
) -> None:
    first, weights = train_updated(folder, tmp_path / "run", {option: value})
    assert first == updated[0]
    assert any(not torch.equal(tensor, weights[name]) for name, tensor in updated[1].items())


def test_a_damage_that_sizes_hide_passes_where_sizes_are_trusted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    saved = SHORT | {"checkpoint__enable_checkpoint": "true", "checkpoint__fast_open": "true"}
    assert main(arguments(folder, run, **saved)) == 0
    small = run / "checkpoint/step-3/config.toml"
    small.write_bytes(small.read_bytes().replace(b"[job]", b"[JOB]"))
    again = saved | {"training__steps": 4}
    refused(
        capsys,
        arguments(folder, run, **again | {"checkpoint__fast_open": "false"}),
        1,
        "every checkpoint of this run is damaged",
    )
    assert main(arguments(folder, run, **again)) == 0


def test_another_tokenizer_and_another_attention_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    other = write_tiny_tokenizer(tmp_path / "other", vocab_size=300)
    refused(capsys, arguments(folder, run, model__tokenizer_path=other), 1, "model.tokenizer_path is another tokenizer")
    mistyped = arguments(folder, run, model__tokenizer_path=f"{other}s")
    refused(capsys, mistyped, 2, "model.tokenizer_path names no tokenizer", f"Did you mean {other}?")
    refused(capsys, arguments(folder, run, model__attention="fa4"), 2, "fa4")
    refused(capsys, arguments(folder, run, model__norm_type="rmsnorm"), 1, "model.norm_type")


class ToldError(Exception):
    """What is looked at has been told; the rest of the run is not needed."""


WIRED: dict[str, tuple[str, Any]] = {
    "training.num_workers": ("3", ("StepLoader", "num_threads", 3)),
    "training.prefetch_factor": ("4", ("StepLoader", "prefetch_steps", 4)),
    "training.fsdp_reshard_after_forward": ("never", ("parallelize", "reshard_after_forward", "never")),
    "training.enable_cpu_offload": ("true", ("parallelize", "cpu_offload", True)),
    "training.compile": ("true", ("parallelize", "compile_blocks", True)),
    "activation_checkpoint.mode": ("full", ("parallelize", "checkpoint_mode", "full")),
    "activation_checkpoint.selective_ac_option": ("op", ("parallelize", "checkpoint_option", "op")),
    "training.deterministic": ("true", ("build_model", "deterministic", True)),
    "model.attention": ("sdpa", ("build_model", "attention", "sdpa")),
    "model.trust_remote_code": ("true", ("load_model_config", "trust_remote_code", True)),
    "experimental.custom_model_path": ("json", ("load_model_config", "custom_model_path", "json")),
    "training.data_parallel_replicate_degree": ("2", ("join_world", "replicate", 2)),
    "training.data_parallel_shard_degree": ("2", ("join_world", "shard", 2)),
    "comm.init_timeout_seconds": ("7", ("join_world", "init_timeout_seconds", 7.0)),
    "comm.shutdown_timeout_seconds": ("8", ("join_world", "shutdown_timeout_seconds", 8.0)),
}
OWNERS: dict[str, Any] = {
    "StepLoader": loop,
    "join_world": loop,
    "parallelize": model_setup,
    "build_model": model_setup,
    "load_model_config": model_setup,
}


@pytest.mark.parametrize("option", WIRED)
def test_an_option_reaches_the_function_that_is_tested_by_itself(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    value, (function, parameter, expected) = WIRED[option]
    given: dict[str, Any] = {}

    def told(*_: Any, **named: Any) -> Any:
        given.update(named)
        raise ToldError

    monkeypatch.setattr(OWNERS[function], function, told)
    argv = [*arguments(folder, tmp_path / "run", training__num_workers=1), f"--{option}={value}"]
    try:
        with pytest.raises(ToldError):
            loop.train(parse_train_config(argv))
    finally:
        torch.use_deterministic_algorithms(False)
    assert given[parameter] == expected and type(given[parameter]) is type(expected)


def test_the_flight_recorder_is_as_large_as_asked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # torch warns of the second, its old name
    found: list[tuple[str | None, ...]] = []

    def told(*_: Any) -> int:
        found.append(tuple(os.environ.get(name) for name in names))
        return 0

    monkeypatch.setattr(loop, "train", told)
    for name in names:
        monkeypatch.setenv(name, "")  # so that what is set on the way is undone
        monkeypatch.delenv(name)
    argv = [*arguments(folder, tmp_path / "run"), "--comm.trace_buf_size=77"]
    assert main(argv) == 0
    monkeypatch.delenv(names[0])
    monkeypatch.setenv(names[1], "88")  # the user's own wins
    assert main(argv) == 0
    assert found == [("77", None), (None, "88")]


def test_the_usual_call_of_the_predecessor_is_planned_once_its_corpus_is_there(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PROJECT)  # configs/transformer_340M.json is relative
    corpus, tokenizer = str(folder / "web"), str(folder / "web" / "tokenizer")
    call = USUAL_CALL.replace("exp/a", str(tmp_path / "run")).replace("--model.tokenizer_path tok", "").split()
    argv = [*call, "--model.tokenizer_path", tokenizer]
    refused(capsys, [*argv, *USUAL_DATA.split()], 2, "flame-preprocess build --dataset HuggingFaceFW/fineweb-edu")
    capsys.readouterr()
    assert main([*argv, "--training.dataset", corpus, "--dry_run", "--dry_run_ranks", "1"]) == 0
    plan = capsys.readouterr().out
    assert "global batch  65,536 tokens" in plan and "20,480" in plan and "warm-up       1,024 steps" in plan
