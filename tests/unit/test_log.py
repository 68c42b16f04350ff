"""The live line, on a pseudo-terminal: it is drawn over, what is logged passes above it, and pipes see none of it."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from flame.train.log import configure_logging, live_line_erased, live_width, log, show_live
from tests.terminals import COLUMNS, terminal


@pytest.fixture(autouse=True)
def logger_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TERM", "xterm")
    before = list(log.handlers), log.level, log.propagate
    yield
    log.handlers[:], log.propagate = before[0], before[2]
    log.setLevel(before[1])


def test_log_lines_pass_above_the_live_line_and_nothing_of_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal() as (file, screen):
        monkeypatch.setattr(sys, "stderr", file)
        configure_logging(0, 1)
        with live_line_erased():
            assert live_width() == COLUMNS - 1
            show_live("step 1 is a long line")
            log.info("first")
            show_live("step 2")
            log.warning("second\nof two lines")
            file.write("printed by another\n")
            show_live("step 3")
        file.write("the end\n")
    assert [line[9:] if line[2:3] == ":" else line for line in screen.lines()] == [
        *("first", "second", "of two lines", "printed by another", "the end", ""),
    ]
    assert "step 3" in screen.text and "step" not in "".join(screen.lines())


def test_the_live_line_stands_below_what_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal() as (file, screen):
        monkeypatch.setattr(sys, "stderr", file)
        configure_logging(0, 1)
        show_live("step 1 of many")
        log.info("told")
        show_live("step 2")
        log.info("told")
    assert [line[9:] if "told" in line else line for line in screen.lines()] == ["told", "told", "step 2"]


def test_a_terminal_that_does_not_know_its_width_has_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(columns=0) as (file, _):
        monkeypatch.setattr(sys, "stderr", file)
        configure_logging(0, 1)
        assert live_width() == 79


@pytest.mark.parametrize("why", ["a pipe", "a dumb terminal", "plain"])
def test_no_live_line_where_there_is_no_terminal_for_it(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal() as (file, screen):
        stream = io.StringIO() if why == "a pipe" else file
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "dumb" if why == "a dumb terminal" else "xterm")
        configure_logging(0, 1, plain=why == "plain")
        assert live_width() is None
        show_live("step 1")
        log.info("told")
    written = stream.getvalue() if isinstance(stream, io.StringIO) else screen.text
    assert written.endswith(" told\n") and "\033" not in written and "\r" not in written and "step" not in written


def test_other_ranks_warn_above_the_live_line_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal() as (file, screen):
        file.write("\r\033[Kthe live line of rank 0\r")
        monkeypatch.setattr(sys, "stderr", file)
        configure_logging(1, 2)
        log.info("not said")
        log.warning("said")
    assert [line[9:] for line in screen.lines()] == ["rank 1: said", ""]
    assert log.level == logging.WARNING
