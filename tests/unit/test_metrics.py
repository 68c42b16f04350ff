"""The logged line: every name that people plot, null where there is no number, and never a reason to stop."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flame.train.console import clock, console_line, live_line
from flame.train.interval import Interval, IntervalClock, SaveTimes
from flame.train.log import log
from flame.train.losses import LossReport, Row, Spike
from flame.train.metrics import MemoryUse, MetricsFile, StepMetrics, memory_use
from tests.tiny_states import file_size_limit

NAMES_THAT_PEOPLE_PLOT = {
    "loss_metrics/global_avg_loss",
    "loss_metrics/global_max_loss",
    "throughput(tps)",
    "tflops",
    "mfu(%)",
    "time_metrics/end_to_end(s)",
    "time_metrics/data_loading(s)",
    "time_metrics/data_loading(%)",
    "time_metrics/load(s)",
    "time_metrics/save(s)",
    "time_metrics/save_stall(s)",
    "memory/max_active(GiB)",
    "memory/max_reserved(GiB)",
    "memory/num_alloc_retries",
    "memory/num_ooms",
    "optimizer/lr",
    "optimizer/grad_norm",
    "optimizer/skipped_step",
}
ROW = Row(rank=1, micro_step=0, batch_row=3, first_sample=40, stop_sample=42, loss=6.5)
INTERVAL = Interval(num_steps=10, seconds=20.0, wait_seconds=0.5, num_tokens=8_000, flops=4_000_000_000_000)


def losses(**changes: Any) -> LossReport:
    arguments: dict[str, Any] = {
        "avg_loss": 3.25,
        "max_loss": 4.5,
        "balance_loss": None,
        "by_source": (3.0, None),
        "tokens_by_source": (6_000, 2_000),
        "rows": (ROW,),
        "spikes": (),
        **changes,
    }
    return LossReport(**arguments)


def metrics(**changes: Any) -> StepMetrics:
    arguments: dict[str, Any] = {
        "step": 30,
        "consumed_samples": 960,
        "consumed_tokens": 24_000,
        "segment": 1,
        "stage": 0,
        "losses": losses(),
        "source_names": ("web", "code"),
        "lr": 1e-3,
        "grad_norm": 0.75,
        "skipped_steps": 2,
        "interval": INTERVAL,
        "world_size": 4,
        **changes,
    }
    return StepMetrics(**arguments)


def test_every_name_is_there_and_the_arithmetic_is_right() -> None:
    line = metrics(
        peak_flops=1e12,
        memory=MemoryUse(max_active_gib=1.5, max_reserved_gib=2.0, num_alloc_retries=0, num_ooms=0),
        saves=SaveTimes(save_seconds=12.0, stalled_seconds=3.0),
        validation={"web": {"loss": 3.5, "ppl": 33.1, "bpb": None}},
    ).to_json()
    assert set(line) >= NAMES_THAT_PEOPLE_PLOT
    assert {"step", "time", "consumed_samples", "consumed_tokens", "segment", "stage"} < set(line)
    assert line["throughput/global(tps)"] == 400.0 and line["throughput(tps)"] == 100.0
    assert line["tflops"] == pytest.approx(0.05) and line["mfu(%)"] == pytest.approx(5.0)
    assert line["time_metrics/end_to_end(s)"] == 2.0
    assert line["time_metrics/data_loading(s)"] == 0.05 and line["time_metrics/data_loading(%)"] == 2.5
    assert line["time_metrics/load(s)"] is None and metrics(load_seconds=1.5).to_json()["time_metrics/load(s)"] == 1.5
    assert line["time_metrics/save(s)"] == 12.0 and line["time_metrics/save_stall(s)"] == 0.3
    assert line["loss/web"] == 3.0 and line["loss/code"] is None and line["tokens/code"] == 2_000
    assert line["validation/web/loss"] == 3.5 and line["validation/web/bpb"] is None


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf"), None])
def test_null_never_nan(tmp_path: Path, number: float | None) -> None:
    row = replace(ROW, loss=float("inf") if number is None else number)
    spike = Spike(step=29, loss=row.loss, limit=4.0, rows=(row,))
    told = losses(avg_loss=number, max_loss=number, by_source=(number, None), rows=(row,), spikes=(spike,))
    line = metrics(losses=told, grad_norm=number).to_json()
    MetricsFile(tmp_path / "metrics.jsonl").write(line)
    read = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert read["loss_metrics/global_avg_loss"] is None and read["optimizer/grad_norm"] is None
    assert read["loss/web"] is None and read["highest_losses"][0]["loss"] is read["loss_spikes"][0]["loss"] is None
    console_line(line, total_steps=100, elapsed_seconds=1.0)


def test_what_is_not_known_is_null() -> None:
    line = metrics(interval=Interval(num_steps=10, seconds=20.0, wait_seconds=0.0, num_tokens=1, flops=None)).to_json()
    assert line["tflops"] is None and line["mfu(%)"] is None and line["memory/num_ooms"] is None
    assert metrics().to_json()["mfu(%)"] is None and metrics().to_json()["tflops"] is not None
    empty = metrics(interval=Interval(num_steps=0, seconds=0.0, wait_seconds=0.0, num_tokens=0, flops=0)).to_json()
    assert set(empty) >= NAMES_THAT_PEOPLE_PLOT and empty["throughput(tps)"] is None
    assert "[0:00:01 < ?]" in console_line(empty, total_steps=100, elapsed_seconds=1.0)


def test_the_console_line_reads_plainly() -> None:
    line = metrics(validation={"web": {"loss": 3.5}}).to_json()
    text = console_line(line, total_steps=1000, elapsed_seconds=3_725)
    assert text == (
        "step   30/1000  loss 3.2500  grad_norm 0.750  lr 1.000e-03  400 tok/s  skipped 2  validation/web 3.5000  "
        "[1:02:05 < 0:32:20]"
    )
    colored = console_line(line, total_steps=1000, elapsed_seconds=3_725, color=True)
    assert colored != text and "\033[" in colored
    memory = MemoryUse(max_active_gib=56.06, max_reserved_gib=60, num_alloc_retries=0, num_ooms=0)
    on_gpu = metrics(peak_flops=1e12, memory=memory, skipped_steps=0).to_json()
    assert "mfu 5.0%  memory 56.1 GiB  [" in console_line(on_gpu, total_steps=30, elapsed_seconds=0)


def test_the_live_line_leaves_away_what_has_no_room() -> None:
    line = metrics(peak_flops=1e12).to_json()
    whole = "step 30/1000  loss 3.2500  [1:02:05 < 0:32:20]  400 tok/s  mfu 5.0%"
    for width, text in (
        (80, whole),
        (len(whole), whole),
        (len(whole) - 1, whole[:-10]),
        (30, whole[:25]),
        (20, whole[:12]),
    ):
        assert live_line(line, total_steps=1000, elapsed_seconds=3_725, width=width) == text
    colored = live_line(line, total_steps=1000, elapsed_seconds=3_725, width=80, color=True)
    assert re.sub(r"\033\[\d+m", "", colored) == whole != colored


def test_clock() -> None:
    assert [clock(s) for s in (0, 59.6, 3_599, 86_399, 90_061, -5)] == [
        *("0:00:00", "0:01:00", "0:59:59", "23:59:59", "1d 1:01:01", "0:00:00"),
    ]


def test_the_interval_counts_and_leaves_pauses_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 105.0, 135.0, 140.0, 140.0, 141.0, 141.0])
    monkeypatch.setattr("flame.train.interval.time.perf_counter", lambda: next(now))
    interval_clock = IntervalClock()  # at 100
    interval_clock.count_step(num_tokens=10, wait_seconds=0.25, flops=7)
    with interval_clock.paused():  # 105 to 135
        pass
    interval_clock.count_step(num_tokens=10, wait_seconds=0.25, flops=7)
    assert interval_clock.next_interval() == Interval(  # at 140
        num_steps=2, seconds=10.0, wait_seconds=0.5, num_tokens=20, flops=14
    )
    interval_clock.count_step(num_tokens=10, wait_seconds=0.0, flops=None)
    assert interval_clock.next_interval().flops is None


def test_a_disk_that_refuses_is_told_once_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []  # no handler: one that writes to a file would meet the limit, too
    monkeypatch.setattr(log, "warning", lambda message, *values: told.append(message % values))
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"step": 1})
    with file_size_limit(20):
        for step in (2, 3):
            file.write({"step": step, "text": "x" * 100})
    assert len(told) == 1 and "metrics are not written" in told[0]
    file.write({"step": 4})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 4}]
    MetricsFile(tmp_path / "absent" / "metrics.jsonl").write({"step": 1})
    MetricsFile(None).write({"step": 1})


def test_a_cpu_has_no_memory_metrics_and_no_peak() -> None:
    assert memory_use(torch.device("cpu")) is None


def test_only_a_mixture_of_experts_has_a_load_balancing_loss() -> None:
    name = "loss_metrics/load_balancing_loss"
    assert name not in metrics().to_json()
    assert metrics(losses=losses(balance_loss=2.25)).to_json()[name] == 2.25
    assert metrics(losses=losses(balance_loss=math.nan)).to_json()[name] is None
