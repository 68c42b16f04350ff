"""A run writes the traces and memory snapshots that it was asked for."""

from __future__ import annotations

import json
from pathlib import Path

from flame.cli.train import main
from tests.runs import arguments


def test_a_run_traces_the_last_step_of_each_period_and_no_save_but_by_its_name(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = {"profiling__enable_profiling": "true", "profiling__profile_freq": 2, "training__steps": 5}
    options |= {"profiling__enable_memory_snapshot": "true", "checkpoint__interval": 2}
    assert main(arguments(folder, run, **options)) == 0
    traces = sorted(run.glob("profile_traces/*/rank0_trace.json"))
    assert [trace.parent.name for trace in traces] == ["iteration_2", "iteration_4"]
    texts = [trace.read_text() for trace in traces]
    assert all('"aten::mm"' in text and "flame: save" not in text for text in texts), "step 2's save follows its trace"
    snapshots = sorted(run.glob("memory_snapshot/*/rank0_memory_snapshot.json"))
    assert [path.parent.name for path in snapshots] == ["iteration_2", "iteration_4"]
    shapes = [group["shape"] for group in json.loads(snapshots[0].read_text())["tensors"]]
    assert [512, 32] in shapes, "the embeddings, their moments"
    assert (run / "checkpoint/step-4/complete.json").is_file()
