"""Runs that are watched: killed and resumed they stay one run, and a logger that fails does not stop them."""

from __future__ import annotations

import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs import (
    arguments,
    read_metrics,
    read_segments,
    run_training,
    signal_at,
    start_training,
)

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
wandb_records = pytest.importorskip("wandb.proto.wandb_internal_pb2")

STEPS = 60
LOSS = "loss_metrics/global_avg_loss"
BLOCK_BYTES, HEADER_BYTES = 32768, 7  # of a .wandb file, which is a LevelDB log
WHOLE, LAST = 1, 4  # kinds of its chunks that end a record


def stop_at(argv: list[str], step: int, number: signal.Signals, **variables: str) -> None:
    """Go on with a run until a step is told, and send a signal then."""
    with start_training(argv, variables=variables) as process:
        log = signal_at(process, f"step {step:>2}/{STEPS}", number)
        assert process.wait() == (75 if number == signal.SIGTERM else -number), log


def records_of(path: Path) -> Iterator[Any]:
    """The records of a .wandb file, as far as it is whole."""
    data, at, record = path.read_bytes(), HEADER_BYTES, b""
    while at + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEADER_BYTES:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + HEADER_BYTES : at + HEADER_BYTES + size]
        at += HEADER_BYTES + size
        if kind in (WHOLE, LAST):
            yield wandb_records.Record.FromString(record)
            record = b""


def steps_in_wandb(path: Path) -> list[tuple[int, float]]:
    """(step, loss) of every point that one start has logged."""
    points = []
    for record in records_of(path):
        if record.WhichOneof("record_type") == "history":
            values = {(item.key or item.nested_key[0]): item.value_json for item in record.history.item}
            points.append((int(values["step"]), float(values[LOSS])))
    return points


def test_a_run_that_is_killed_and_stopped_stays_one_run_with_each_step_once(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = {"metrics__enable_tensorboard": "true", "metrics__enable_wandb": "true", "checkpoint__interval": 10}
    argv = arguments(folder, run, training__steps=STEPS, **options)
    stop_at(argv, 14, signal.SIGKILL, WANDB_MODE="offline", WANDB_RUN_ID="mine")
    stop_at(argv, 30, signal.SIGTERM, WANDB_MODE="offline", WANDB_RUN_ID="another")
    run_training(argv, variables={"WANDB_MODE": "offline"})

    segments = read_segments(run)
    assert [segment["run_id"] for segment in segments] == ["mine"] * 3
    logged = [(line["step"], line[LOSS]) for line in read_metrics(run)]
    assert [step for step, _ in logged] == list(range(1, STEPS + 1))
    found = event_accumulator.EventAccumulator(str(run / "tb"), {"scalars": 0}).Reload().Scalars(LOSS)
    assert [event.step for event in found] == [step for step, _ in logged]
    assert [event.value for event in found] == pytest.approx([loss for _, loss in logged])

    files = sorted((run / "wandb").glob("offline-run-*-mine/run-mine.wandb"))
    *killed, stopped, ended = files
    for file, begin, end in ((stopped, segments[1], segments[2]["step"]), (ended, segments[2], STEPS)):
        assert steps_in_wandb(file) == logged[begin["step"] : end]
    assert len(killed) <= 1  # it may not have opened its file yet: training waits for no logger
    for file in killed:
        assert steps_in_wandb(file) == logged[: len(steps_in_wandb(file))]


def test_a_logger_that_fails_does_not_stop_a_run_and_all_ranks_may_log(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = {"metrics__enable_tensorboard": "true", "metrics__rank_0_only": "false", "metrics__enable_wandb": "true"}
    argv = arguments(folder, run, training__steps=3, checkpoint__enable_checkpoint="false", **options)
    no_api_key = {"WANDB_MODE": "online", "HOME": str(tmp_path)}
    told = run_training(argv, ranks=2, variables=no_api_key).stderr
    assert told.count("wandb could not be opened, training goes on without it: UsageError") == 1
    for rank in (0, 1):
        events = event_accumulator.EventAccumulator(str(run / "tb" / f"rank-{rank}")).Reload()
        assert [event.step for event in events.Scalars(LOSS)] == [1, 2, 3]
