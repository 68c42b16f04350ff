"""`flame-train --dry_run` tells what the run then is, for any number of ranks, and leaves nothing behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from flame.cli.train import main
from flame.train.families import family_of
from flame.train.memory import StepShape, parameters_by_kind, watched_activations
from flame.train.model import CausalLMLoss
from flame.train.model_config import load_model_config
from tests.runs import PROJECT, arguments, refused


def told(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    capsys.readouterr()
    assert main(argv) == 0
    return capsys.readouterr().out


def test_a_plan_is_arithmetic_over_the_ranks_and_writes_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    options = {"checkpoint__interval": 8, "checkpoint__keep_latest_k": 2, "training__data_probs": "0.7,0.3"}
    argv = [*arguments(folder, run, **options), "--dry_run"]
    plan = told(capsys, [*argv, "--dry_run_ranks=4"])
    assert "global batch  1,024 tokens: 8 windows of 128" in plan  # 4 ranks × 2 rows of 128
    assert "steps         20, 20,480 tokens" in plan and "warm-up       4 steps, 4,096 tokens" in plan
    drawn = [int(number.replace(",", "")) for number in re.findall(r"source .*: ([0-9,]+) tokens", plan)]
    assert sum(drawn) == 20_480 and drawn[0] == pytest.approx(0.7 * 20_480, abs=8 * 128)
    # 512 rows of 32; a layer: q 32×32, k and v 16×32 each, o 32×32, three of 64×32; five norms of 32
    assert "parameters    51,360: embedding 16,384, head 16,384, matrices 18,432, vectors 160" in plan
    assert "decayed       51,200; not decayed 160" in plan and "for the 2 kept" in plan
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "global batch  512 tokens" in told(capsys, argv)
    assert told(capsys, [*arguments(folder, run), "--memory_estimation.enabled"]).count("\n") == 2
    assert not run.exists()


def test_a_plan_finds_what_a_start_would(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    absent = arguments(folder, run, training__dataset=tmp_path / "absent", training__data_probs="1")
    refused(capsys, [*absent, "--dry_run"], 2, "absent")
    refused(capsys, [*arguments(folder, run, checkpoint__load_step=3), "--dry_run"], 1, "no checkpoint of step 3")
    assert not run.exists()


def test_activations_are_watched_without_memory() -> None:
    config = load_model_config(str(PROJECT / "configs/llama_340M.json"), vocab_size=32_000, eos_id=0)
    config.num_hidden_layers = 6
    peaks = {}
    for mode in ("none", "full"):
        with torch.device("meta"):
            module = CausalLMLoss(family_of(config).construct(config, "sdpa"), family_of(config))
        kinds = parameters_by_kind(module.model)
        assert sum(kinds.values()) == sum(p.numel() for p in module.parameters())
        shape = StepShape(micro_batch=1, seq_len=1024, param_dtype=torch.bfloat16, checkpoint_mode=mode)
        peaks[mode] = watched_activations(module, shape)
    row = 1024 * 1024 * 2  # what passes between two blocks
    assert peaks["none"] > 3 * 6 * row and 6 * row < peaks["full"] < peaks["none"] / 1.5


def test_real_tensors_are_watched_too_and_take_as_much(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_model_config(str(folder / "llama.json"), vocab_size=512, eos_id=0)
    peaks = []
    for device in (None, torch.device("cpu")):
        with torch.device("meta"):
            module = CausalLMLoss(family_of(config).construct(config, "sdpa"), family_of(config))
        shape = StepShape(micro_batch=2, seq_len=128, param_dtype=torch.float32, real_tensors_on=device)
        peaks.append(watched_activations(module, shape))
    assert peaks[1] == pytest.approx(peaks[0], rel=0.1)

    monkeypatch.setattr("flame.train.memory.FakeTensorMode", None)  # whoever calls it fails
    argv = [*arguments(folder, tmp_path / "run"), "--memory_estimation.enabled"]
    assert "(a rule of thumb)" in told(capsys, argv)
    assert "(a rule of thumb)" not in told(capsys, [*argv, "--memory_estimation.disable_fake_mode"])
