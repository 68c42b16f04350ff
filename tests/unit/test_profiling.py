"""Traces and memory snapshots: where they lie, what they hold, and disks that refuse them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from flame.errors import UsageError
from flame.train import snapshots
from flame.train.config import parse_train_config
from flame.train.options import ProfilingOptions
from flame.train.profiling import profiling, write_or_warn

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("error:.*Profiler")
@pytest.mark.parametrize(("period", "expected"), [(2, [6, 8]), (4, [8]), (6, [])])
def test_the_last_step_of_each_period_is_traced(tmp_path: Path, period: int, expected: list[int]) -> None:
    options = ProfilingOptions(enable_profiling=True, save_traces_folder="traces", profile_freq=period)
    with profiling(options, tmp_path, device=CPU, rank=3, step=4) as step_done:
        for step in range(5, 10):
            with torch.profiler.record_function(f"work of {step}"):
                torch.ones(2, 2) @ torch.ones(2, 2)
            step_done()
    found = {int(p.parent.name.removeprefix("iteration_")): p for p in tmp_path.glob("traces/*/rank3_trace.json")}
    assert sorted(found) == expected
    for step, path in found.items():
        names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
        assert "aten::mm" in names
        assert {name for name in names if str(name).startswith("work of")} == {f"work of {step}"}


@pytest.mark.parametrize("period", ["1", "0", "-3"])
def test_a_period_without_a_step_to_warm_up_in_is_refused_when_parsed(period: str) -> None:
    with pytest.raises(UsageError, match=rf"profiling.profile_freq cannot be {period} .*2"):
        parse_train_config([f"--profiling.profile_freq={period}"])


def test_nothing_is_written_when_off(tmp_path: Path) -> None:
    with profiling(ProfilingOptions(), tmp_path, device=CPU, rank=0, step=0) as step_done:
        step_done()
    assert not list(tmp_path.iterdir())


def test_snapshots_tell_the_largest_tensors_of_a_period(tmp_path: Path) -> None:
    layer = nn.Linear(300, 700, bias=False)
    twice = [torch.zeros(123, 457) for _ in range(2)]
    view = twice[0][1:]  # of the same bytes
    traced = FakeTensorMode().from_tensor(layer.weight)  # has no memory, though it says that it is on the CPU
    assert traced.device == CPU
    options = ProfilingOptions(enable_memory_snapshot=True, save_memory_snapshot_folder="memory", profile_freq=2)
    with profiling(options, tmp_path, device=CPU, rank=1, step=4) as step_done:
        for _ in range(5):
            step_done()
    found = sorted(tmp_path.rglob("*.*"))
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        f"memory/iteration_{step}/rank1_memory_snapshot.json" for step in (6, 8)
    ]
    told = json.loads(found[0].read_text())
    sizes = {tuple(group["shape"]): (group["count"], group["bytes"]) for group in told["tensors"]}
    assert sizes[tuple(layer.weight.shape)] == (1, 300 * 700 * 4)
    assert sum(group["count"] for group in told["tensors"] if group["shape"][-1:] == [457]) == 2
    assert told["tensor_bytes"] >= layer.weight.nbytes + 2 * view.untyped_storage().nbytes()
    assert 0 < told["resident_bytes"] <= told["max_resident_bytes"]
    assert [group["bytes"] for group in told["tensors"]] == sorted((g["bytes"] for g in told["tensors"]), reverse=True)


def test_on_a_gpu_torch_keeps_the_record_and_dumps_it_also_where_memory_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def dump(path: str) -> None:
        calls.append("dump")
        Path(path).write_bytes(pickle.dumps({"segments": []}))

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **how: calls.append(how))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    options = ProfilingOptions(enable_memory_snapshot=True, profile_freq=2)
    run = profiling(options, tmp_path, device=torch.device("cuda"), rank=0, step=0)
    with pytest.raises(torch.OutOfMemoryError), run as step_done:
        for _ in range(3):
            step_done()
        raise torch.OutOfMemoryError
    assert calls == [{"max_entries": snapshots._MAX_EVENTS}, "dump", "dump", {"enabled": None}]
    names = sorted(path.parent.name for path in tmp_path.rglob("memory_snapshot/*/rank0_memory_snapshot.pickle"))
    assert names == ["iteration_2", "iteration_4_exit"]


def test_a_disk_that_refuses_is_told_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("profile_traces", "memory_snapshot"):
        (tmp_path / name).write_text("a file stands where the folder would")
    options = ProfilingOptions(enable_profiling=True, enable_memory_snapshot=True, profile_freq=2)
    with profiling(options, tmp_path, device=CPU, rank=0, step=0) as step_done:
        for _ in range(4):
            step_done()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 4 and all("is not written, training goes on" in warning for warning in warnings)


def test_half_a_file_is_not_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def torn(path: Path) -> None:
        path.write_text('{"traceEvents": [')
        raise OSError(28, "No space left on device")

    write_or_warn("the trace", tmp_path / "iteration_2/rank0_trace.json", torn)
    assert not list((tmp_path / "iteration_2").iterdir())
    assert "No space left on device" in caplog.text


def test_a_trace_that_torch_cut_short_is_not_taken_for_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = ProfilingOptions(enable_profiling=True, profile_freq=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.profiler.profile,
            "export_chrome_trace",
            lambda self, path: Path(path).write_text('{"traceEv') and None,
        )
        with profiling(options, tmp_path, device=CPU, rank=0, step=0) as step_done:
            step_done()
            step_done()
    assert "is the disk full?" in caplog.text
    assert not list(tmp_path.rglob("*.json*"))
