"""What a build says of itself where there is no terminal: a line a minute, with what is done and what is left."""

from __future__ import annotations

import pytest

from flame.preprocess import progress
from flame.preprocess.reports import Progress


def test_a_line_a_minute(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.BuildProgress(total_bytes=1000, done_bytes=100) as shown:
        for second in range(0, 150, 10):
            now = 1000.0 + second
            shown.add(Progress(input_bytes=30, num_documents=2, num_tokens=600))
        assert (shown.num_documents, shown.num_tokens) == (30, 9000)
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert lines == [
        "31.0% of the input, 14 documents, 4,200 tokens, 70 tokens/s, 3 min left",
        "49.0% of the input, 26 documents, 7,800 tokens, 65 tokens/s, 3 min left",
    ]


def test_more_than_was_planned_is_all(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.BuildProgress(total_bytes=10, done_bytes=0) as shown:
        shown.add(Progress(input_bytes=25))
        assert shown.line().startswith("100.0% of the input")
    with progress.BuildProgress(total_bytes=0, done_bytes=0) as shown:
        shown.add(Progress(input_bytes=0))
    assert not capsys.readouterr().out
