"""A rank that hangs: the others stop in time, name it, and its stack tells where it stands."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from flame.train.run import read_status
from tests.faults import in_ranks
from tests.runs import arguments, read_metrics, start_training


def test_a_rank_that_hangs_is_named_with_its_stack(folder: Path, tmp_path: Path) -> None:
    run, notes = tmp_path / "run", tmp_path / "notes"
    # Without the shorter timeout after the first step, the ranks would wait for 300 seconds.
    argv = arguments(folder, run, training__batch_size=1, comm__train_timeout_seconds=6)
    process = start_training(argv, ranks=2, variables=in_ranks(notes, hang_in=2))
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("flame-train: "):  # it listens to no signal that asks
            with contextlib.suppress(ProcessLookupError):
                os.kill(int((notes / "rank-1.pid").read_text()), signal.SIGKILL)
    assert process.wait(timeout=60) == 1, "".join(lines)
    told = next(line for line in lines if line.startswith("flame-train: "))
    assert "this rank waited 6 s for another in a collective" in told and "in step 2" in told
    assert "rank 1 is not in a collective, but in sleep_for_ever (" in told and "rank 0 " not in told
    assert "stacks/rank-N.txt" in told and "--comm.train_timeout_seconds" in told
    assert any("step 2 takes" in line and "rank 1 is not in a collective" in line for line in lines), "before the end"
    assert told.strip().removeprefix("flame-train: ") == read_status(run)["reason"]
    assert [line["step"] for line in read_metrics(run)] == [1]
    stacks = (run / "stacks" / "rank-1.txt").read_text()
    assert "in sleep_for_ever" in stacks and "in train_step" in stacks and "in run_steps" in stacks
    assert "torch/distributed/" in (run / "stacks" / "rank-0.txt").read_text()
