"""Whole runs on a GPU: the same code path as on a CPU, resumed to the last bit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from flame.train.update import UpdateAfterBackward
from tests.runs import arguments, losses_and_norms, read_metrics, run_training, tensors_of
from tests.tiny_states import differences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_resumed_run_is_bitwise_the_straight_one(folder: Path, tmp_path: Path) -> None:
    options = {"training__deterministic": "true", "training__steps": 50, "checkpoint__interval": 25}
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    run_training(arguments(folder, straight, **options))
    run_training(arguments(folder, stopped, **options))
    expected = losses_and_norms(straight)
    assert losses_and_norms(stopped) == expected, "twice the same"
    assert expected[-1][1] < expected[0][1]
    run_training(arguments(folder, stopped, **options, checkpoint__load_step=25))
    assert losses_and_norms(stopped) == expected
    assert len((stopped / "metrics.abandoned.jsonl").read_text().splitlines()) == 25


def test_bf16_on_the_gpu_follows_fp32_on_a_cpu(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_training(arguments(folder, tmp_path / "gpu"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run_training(arguments(folder, tmp_path / "cpu"))
    gpu, cpu = losses_and_norms(tmp_path / "gpu"), losses_and_norms(tmp_path / "cpu")
    assert len(gpu) == len(cpu) == 20
    for (_, on_gpu, _), (_, on_cpu, _) in zip(gpu, cpu, strict=True):
        assert on_gpu == pytest.approx(on_cpu, rel=1e-2)


def test_compiled_blocks_follow_the_others(folder: Path, tmp_path: Path) -> None:
    run_training(arguments(folder, tmp_path / "eager"))
    run_training(arguments(folder, tmp_path / "compiled", training__compile="true"))
    eager, compiled = losses_and_norms(tmp_path / "eager"), losses_and_norms(tmp_path / "compiled")
    for (_, one, _), (_, other, _) in zip(eager, compiled, strict=True):
        assert one == pytest.approx(other, rel=1e-2)


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"optimizer__name": "Muon"},
        {"optimizer__early_step_in_backward": "true", "training__max_norm": "inf"},
        {"checkpoint__async_mode": "async_with_pinned_mem"},
    ],
    ids=["after backward", "Muon", "in backward", "saved beside training"],
)
def test_shards_in_host_memory_train_as_those_on_the_gpu(folder: Path, tmp_path: Path, others: dict[str, str]) -> None:
    options = {"training__deterministic": "true", "training__steps": 8, "checkpoint__interval": 4, **others}
    run_training(arguments(folder, tmp_path / "gpu", **options))
    host = tmp_path / "host"
    argv = arguments(folder, host, **options, training__enable_cpu_offload="true")
    assert "lie in host memory" in run_training(argv).stderr
    there, here = losses_and_norms(tmp_path / "gpu"), losses_and_norms(host)
    for (_, one, _), (_, other, _) in zip(there, here, strict=True):
        assert one == pytest.approx(other, rel=1e-2)
    on_gpu, in_host_memory = (read_metrics(tmp_path / run)[-1]["memory/max_active(GiB)"] for run in ("gpu", "host"))
    assert in_host_memory < on_gpu
    weights = tensors_of(host / "checkpoint" / "step-8")
    run_training([*argv, "--checkpoint.load_step=4"])
    assert losses_and_norms(host) == here
    assert not differences(weights, tensors_of(host / "checkpoint" / "step-8"))


def test_the_gpus_memory_is_logged(folder: Path, tmp_path: Path) -> None:
    run_training(arguments(folder, tmp_path / "run", training__steps=2))
    assert read_metrics(tmp_path / "run")[-1]["memory/max_active(GiB)"] > 0


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_an_update_that_may_be_skipped_waits_for_nothing(value: float) -> None:
    weights = [torch.ones(64, 64, device="cuda", requires_grad=True) for _ in range(3)]
    optimizer = torch.optim.AdamW(weights, fused=True)
    update = UpdateAfterBackward(optimizer, weights, max_norm=1.0, skip_not_finite=True, before_update=lambda: None)
    for number in (value, 1.0):  # the first makes the moments
        update.begin(1)
        for weight in weights:
            weight.grad = torch.full_like(weight, number)
        before = [weight.detach().clone() for weight in weights]
        torch.cuda.set_sync_debug_mode("error")
        try:
            _, skip = update.finish()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        skipped = not math.isfinite(number)
        assert skip.read() is skipped
        assert all(torch.equal(*pair) is skipped for pair in zip(before, weights, strict=True))
