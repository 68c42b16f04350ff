"""`tools/bench_scale.py` as it is run on GPUs, with a tiny model on gloo."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.runs import LLAMA, PROJECT, VOCABULARY


@pytest.fixture
def bench_scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(PROJECT / "tools")
    import bench_scale

    return bench_scale


def test_two_ranks_are_measured_against_one(
    bench_scale: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "tiny.json"
    model.write_text(json.dumps(LLAMA))
    words = ["bench_scale.py", "--device=cpu", "--seq_len=256", "--context_len=64", "--steps=6", "--ranks=2"]
    words += [f"--config={model}", "--layouts=hsdp,fsdp", "--options=--metrics.peak_tflops=0.01"]
    rows: list[dict[str, Any]] = []
    measure_model = bench_scale.measure_model

    def measured_once(*arguments: Any) -> list[dict[str, Any]]:
        if not rows:
            rows.extend(measure_model(*arguments))
        return rows

    monkeypatch.setattr(bench_scale, "measure_model", measured_once)
    told = []
    for form in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", [*words, *form])
        bench_scale.main()
        told.append(capsys.readouterr().out.splitlines())
    table, objects = told
    assert [json.loads(line) for line in objects] == rows
    one, two = rows
    assert (one["layout"], one["ranks"], two["layout"], two["ranks"]) == ("one", 1, "fsdp", 2), "two have no hsdp"
    assert one["ratio"] == 1.0 and two["ratio"] == two["value"] / one["value"] == two["value"] / two["peer_value"]
    for row in rows:
        assert row["value"] * row["step_seconds"] == pytest.approx(256), "tokens of a rank"
        assert 0 <= row["exposed_least_percent"] <= row["exposed_percent"] <= row["communication_percent"] < 100
        assert row["mfu"] > 0 and 0.1 < row["peak_gib"] < 10 and row["loss"] < 1.1 * math.log(VOCABULARY)
    assert two["communication_percent"] > 0

    titles = [title for title, _, _ in bench_scale.COLUMNS.values()]
    assert table[0] == "tiny" and table[1].split() == " ".join(titles).split() and len(table) == 4
    assert [line.split()[:2] for line in table[2:]] == [["one", "1"], ["fsdp", "2"]]
    assert all(len(line.split()) == len(titles) for line in table[2:])


def test_each_layout_has_as_many_ranks_as_it_needs(bench_scale: ModuleType) -> None:
    names = "fsdp,hsdp,ddp,4x2"
    assert bench_scale.layouts_at(1, names) == [("one", 1, 1)]
    assert bench_scale.layouts_at(2, names) == [("fsdp", 1, 2), ("ddp", 2, 1)]
    assert bench_scale.layouts_at(4, names) == [("fsdp", 1, 4), ("hsdp", 2, 2), ("ddp", 4, 1)]
    assert bench_scale.layouts_at(8, names) == [("fsdp", 1, 8), ("hsdp", 2, 4), ("ddp", 8, 1), ("4x2", 2, 4)]
    with pytest.raises(SystemExit, match="there is no layout zero: fsdp, hsdp, ddp, or shards and replicas"):
        bench_scale.layouts_at(8, "zero")
