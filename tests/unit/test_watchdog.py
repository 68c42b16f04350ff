"""What the watchdog writes of a rank that takes long, and what it makes of a collective's failure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flame.errors import TrainingError
from flame.train.watchdog import (
    INIT_TIMEOUT,
    SHUTDOWN_TIMEOUT,
    STACKS,
    TRAIN_TIMEOUT,
    Watchdog,
    place_of,
    read_place,
)
from tests.processes import until

TIMEOUTS = {INIT_TIMEOUT: 3600.0, TRAIN_TIMEOUT: 0.05, SHUTDOWN_TIMEOUT: 3600.0}


@pytest.fixture
def watchdog(tmp_path: Path) -> Iterator[Watchdog]:
    (tmp_path / STACKS).mkdir()
    (tmp_path / STACKS / "rank-1.txt").write_text("of an earlier start")
    started = Watchdog(tmp_path, rank=1, world_size=3, timeouts=TIMEOUTS)
    yield started
    started.close()


def test_stacks_are_there_while_a_step_is_late_and_gone_after_it(tmp_path: Path, watchdog: Watchdog) -> None:
    stacks = tmp_path / STACKS / "rank-1.txt"
    assert not stacks.exists()
    watchdog.begin("step 7", TRAIN_TIMEOUT)
    assert until(lambda: stacks.exists() and "(most recent call first)" in stacks.read_text())
    assert '"phase": "step 7"' in stacks.read_text() and "until" in stacks.read_text()
    place = read_place(stacks)
    assert place is not None and place.in_collective is False
    watchdog.begin("the save of step 7", SHUTDOWN_TIMEOUT)
    assert until(lambda: not stacks.exists())


def test_a_collective_that_fails_tells_which_rank_to_look_at(tmp_path: Path, watchdog: Watchdog) -> None:
    watchdog.begin("step 7", INIT_TIMEOUT)
    for rank, inside in enumerate(("true", "false")):
        head = f'{{"in_collective": {inside}, "where": "place_{rank} (file.py:1)"}}\n'
        (tmp_path / STACKS / f"rank-{rank}.txt").write_text(head)
    with pytest.raises(TrainingError) as timed_out, watchdog.explaining():
        raise RuntimeError("[gloo/unbound_buffer.cc:81] Timed out waiting 3600000ms for recv operation to complete")
    told = str(timed_out.value)
    assert "waited 3600 s" in told and "step 7" in told and "--comm.init_timeout_seconds" in told
    assert "rank 1 is not in a collective, but in place_1" in told and "no stack of rank 2" in told
    assert "rank 0" not in told and "place_0" not in told
    gone = r"gone: Connection closed by peer \[::1\]:1234 \(in step 7\)"
    with pytest.raises(TrainingError, match=gone), watchdog.explaining():
        raise RuntimeError("[/gloo/tcp/pair.cc:553] Connection closed by peer [::1]:1234. It is typically a crash.")
    with pytest.raises(TrainingError, match=r": \[Rank 1\] timeout x{183}… \(in step 7"), watchdog.explaining():
        raise RuntimeError("[Rank 1] timeout " + 300 * "x" + "\nException raised from somewhere")
    with pytest.raises(RuntimeError, match=r"^out of range$"), watchdog.explaining():
        raise RuntimeError("out of range")


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("/lib/torch/distributed/distributed_c10d.py", True),
        ("/lib/torch/distributed/checkpoint/filesystem.py", False),
        ("/lib/torch/cuda/streams.py", None),
        ("/project/model.py", False),
    ],
)
def test_where_a_stack_waits_is_told_by_its_innermost_file(file: str, expected: bool | None) -> None:
    namespace = {"sys": sys}
    exec(compile("def wait(): return sys._getframe()", file, "exec"), namespace)
    place = place_of(namespace["wait"]())  # type: ignore[operator]
    assert place.in_collective is expected and place.where == f"wait ({file}:1)"


def test_a_folder_that_takes_no_file_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / STACKS).write_text("a file, where a folder should be")
    watchdog = Watchdog(tmp_path, rank=0, world_size=1, timeouts=TIMEOUTS)
    watchdog._write(watchdog._phase)
    watchdog.close()
