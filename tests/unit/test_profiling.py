"""Traces: where they lie, and what they hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flame.errors import UsageError
from flame.train.options import ProfilingOptions
from flame.train.profiling import profiling


@pytest.mark.parametrize(("period", "expected"), [(2, [6, 8]), (4, [8]), (6, [])])
def test_the_last_step_of_each_period_is_traced(tmp_path: Path, period: int, expected: list[int]) -> None:
    options = ProfilingOptions(enable_profiling=True, save_traces_folder="traces", profile_freq=period)
    with profiling(options, tmp_path, rank=3, step=4) as step_done:
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


def test_a_period_without_a_step_to_warm_up_in_is_refused(tmp_path: Path) -> None:
    options = ProfilingOptions(enable_profiling=True, profile_freq=1)
    with pytest.raises(UsageError, match="profile_freq cannot be 1"), profiling(options, tmp_path, rank=0, step=0):
        pass


def test_nothing_is_written_when_off(tmp_path: Path) -> None:
    with profiling(ProfilingOptions(), tmp_path, rank=0, step=0) as step_done:
        step_done()
    assert not list(tmp_path.iterdir())
