"""Tuned configurations of Triton kernels: kept, shipped, taken from Triton's cache, or swept for."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver

from flame.kernels import tuning, tuning_sweep

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((64, 2), (128, 4), (256, 8))]
SETTING = tuning.setting_name("A Device")


class NoDevice:
    """What compiling asks of a Triton driver, for an H100 that is not there."""

    def __init__(self) -> None:
        self.owner = os.getpid()

    def get_current_device(self) -> int:
        assert os.getpid() == self.owner, "a fork asks nothing of the device"
        return 0

    def get_current_stream(self, device: int) -> int:
        assert os.getpid() == self.owner, "a fork asks nothing of the device"
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def double(x_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton reads what stands here
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < count) * 2, mask=at < count)


@pytest.fixture
def timed() -> list[int]:
    """The blocks that were timed."""
    return []


@pytest.fixture
def new_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timed: list[int]) -> Callable[..., Autotuner]:
    """Makes a kernel as a new process would; the middle configuration is the fastest, the first does not fit."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(Autotuner, "prune_configs", Autotuner.prune_configs)  # both are put back at the end
    monkeypatch.setattr(Autotuner, "_bench", Autotuner._bench)
    monkeypatch.setattr(driver, "_active", NoDevice())

    def bench(autotuner: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        timed.append(config.kwargs["BLOCK"])
        return [{64: float("inf"), 128: 1.0, 256: 2.0}[config.kwargs["BLOCK"]]] * 3

    Autotuner._bench = bench

    def new(configs: list[triton.Config] = CONFIGS, **options: Any) -> Autotuner:
        kernel = triton.autotune(configs=configs, key=["count"], **options)(triton.jit(double))
        launch = kernel.fn.run
        kernel.fn.run = lambda *args, **kwargs: launch(*args, **{**kwargs, "warmup": True})  # nothing to launch on
        return kernel

    return new


def run(kernel: Autotuner, count: int = 1000) -> str:
    kernel[(8,)](torch.zeros(1000), count)
    return str(kernel.best_config)


def test_a_sweep_is_run_once_for_each_key_whatever_the_process(
    new_kernel: Callable[..., Autotuner], timed: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sweeps = tuning.replace_pruning(tmp_path / "kept" / SETTING, {})
    with caplog.at_level(logging.INFO, "flame"):
        first = new_kernel()
        assert run(first) == run(first) == str(CONFIGS[1])
    assert timed == [64, 128, 256] and sweeps.count == 1
    assert "tuning double, the 1st sweep of this start: 3 configurations for (1000, 'torch.float32')" in caplog.text
    assert "tuned double: BLOCK: 128, num_warps: 4" in caplog.text
    assert run(new_kernel()) == str(CONFIGS[1]) and sweeps.count == 1
    assert run(new_kernel(), 999) == str(CONFIGS[1]) and sweeps.count == 2  # another key
    (kept,) = [path for path in (tmp_path / "kept").iterdir() if path.is_dir()]
    assert kept.name == SETTING and len(list(kept.iterdir())) == 2
    run(new_kernel([*CONFIGS[1:]]))
    assert sweeps.count == 3  # other candidates


def test_compiling_is_done_by_forks_before_anything_is_timed(
    new_kernel: Callable[..., Autotuner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning_sweep, "num_compilers", lambda _: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    compiled: list[int] = []

    def bench(autotuner: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        compiled.append(len(list((tmp_path / "triton").rglob("*.cubin"))))
        return [1.0] * 3

    Autotuner._bench = bench
    tuning.replace_pruning(tmp_path / "kept" / SETTING, {})
    run(new_kernel())
    assert compiled == [3, 3, 3]


def test_a_candidate_that_cannot_be_compiled_stops_no_other(
    new_kernel: Callable[..., Autotuner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = triton.Config({"BLOCK": 100}, num_warps=4)  # no power of two
    kernel = new_kernel([broken, *CONFIGS[:2]])
    kernel.nargs = {"x_ptr": torch.zeros(1000), "count": 1000}
    args, kwargs = tuple(kernel.nargs.values()), {"grid": (8,), "warmup": False}
    assert tuning_sweep.compile_in_parallel(kernel, args, kwargs, kernel.configs, 2, print) == 3
    assert len(list((tmp_path / "triton").rglob("*.cubin"))) == 2


def test_compilers_that_do_nothing_are_ended(
    new_kernel: Callable[..., Autotuner], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tuning_sweep, "STALL_SECONDS", 0.0)
    monkeypatch.setattr(tuning_sweep, "_compile_jobs", lambda *_: tuning_sweep.signal.pause())
    kernel = new_kernel()
    assert tuning_sweep.compile_in_parallel(kernel, (), {}, CONFIGS, 2, print) == 0
    assert "are ended" in caplog.text


def test_what_was_shipped_is_taken_without_a_sweep_unless_the_kernel_is_another(
    new_kernel: Callable[..., Autotuner], timed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = new_kernel()
    kernel.nargs = {"x_ptr": torch.zeros(1000), "count": 1000}
    name = tuning.outcome_name(kernel, CONFIGS, tuning.tuning_key(kernel, {}))
    shipped = {"outcomes": {name: {"config": str(CONFIGS[2])}}}
    (tmp_path / f"{SETTING}.json").write_text(json.dumps(shipped))
    outcomes = tuning.shipped_outcomes(SETTING, tmp_path)
    tuning.replace_pruning(tmp_path / "kept" / SETTING, outcomes)
    assert run(new_kernel()) == str(CONFIGS[2]) and timed == []
    assert run(new_kernel(CONFIGS[:2])) == str(CONFIGS[1]) and timed == [64, 128]
    assert tuning.shipped_outcomes("another", tmp_path) == {}
    monkeypatch.setenv("FLAME_TUNED_SHIPPED", "off")
    assert tuning.shipped_outcomes(SETTING, tmp_path) == {}


def test_what_triton_kept_is_taken_over(new_kernel: Callable[..., Autotuner], timed: list[int], tmp_path: Path) -> None:
    kernel = new_kernel(cache_results=True)
    run(kernel)
    assert timed == [64, 128, 256]
    sweeps = tuning.replace_pruning(tmp_path / "kept" / SETTING, {})
    assert run(new_kernel(cache_results=True)) == str(CONFIGS[1]) and sweeps.count == 0
    assert len(list((tmp_path / "kept" / SETTING).iterdir())) == 1


def test_a_damaged_or_strange_outcome_is_found_again(
    new_kernel: Callable[..., Autotuner], timed: list[int], tmp_path: Path
) -> None:
    sweeps = tuning.replace_pruning(tmp_path / "kept" / SETTING, {})
    run(new_kernel())
    (path,) = (tmp_path / "kept" / SETTING).iterdir()
    whole = path.read_text()
    for text, count in (("{", 2), ('{"config": "BLOCK: 1"}', 3), ("[]", 4)):
        path.write_text(text)
        assert run(new_kernel()) == str(CONFIGS[1]) and sweeps.count == count
        assert path.read_text() == whole


def test_the_first_outcome_to_be_kept_is_everyones(tmp_path: Path) -> None:
    assert tuning.keep_outcome(tmp_path, "a", {"config": "x"}) == {"config": "x"}
    assert tuning.keep_outcome(tmp_path, "a", {"config": "y"}) == {"config": "x"}
    assert tuning.keep_outcome(tmp_path, "a", {"config": "y"}, replace=True) == {"config": "y"}
    (tmp_path / "file").touch()
    assert tuning.keep_outcome(tmp_path / "file", "a", {"config": "z"}) == {"config": "z"}  # kept nowhere
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "file"]


def test_where_outcomes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLAME_TUNED_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert tuning.tuned_folder() == Path("/cache/flame/tuned")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/triton")
    assert tuning.tuned_folder() == Path("/triton/flame_tuned")
    monkeypatch.setenv("FLAME_TUNED_DIR", "/own")
    assert tuning.tuned_folder() == Path("/own")
    monkeypatch.setenv("FLAME_TUNED_DIR", "off")
    assert tuning.tuned_folder() is None


def test_what_is_shipped_can_be_read() -> None:
    for path in tuning.SHIPPED.glob("*.json"):
        assert all(outcome["config"] for outcome in tuning.shipped_outcomes(path.stem).values())
