"""A run writes the traces that it was asked for."""

from __future__ import annotations

from pathlib import Path

from flame.cli.train import main
from tests.runs import arguments


def test_a_run_traces_the_last_step_of_each_period(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = {"profiling__enable_profiling": "true", "profiling__profile_freq": 2, "training__steps": 5}
    assert main(arguments(folder, run, **options)) == 0
    traces = sorted(run.glob("profile_traces/*/rank0_trace.json"))
    assert [trace.parent.name for trace in traces] == ["iteration_2", "iteration_4"]
    assert all('"aten::mm"' in trace.read_text() for trace in traces)
