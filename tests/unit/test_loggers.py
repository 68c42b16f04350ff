"""Loggers: the numbers of metrics.jsonl and nothing else, one run over its resumes, and never a reason to stop."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flame.errors import UsageError
from flame.train import loggers
from flame.train.config import flatten, parse_train_config
from flame.train.log import log
from flame.train.loggers import LOGGERS, LoggedRun, LoggerThread, numbers, open_loggers, refuse_absent_loggers
from flame.train.options import MetricsOptions
from tests.tiny_states import file_size_limit

LINE = {
    "step": 7,
    "time": "2026-01-01T00:00:00Z",
    "segment": 0,
    "loss_metrics/global_avg_loss": 2.5,
    "mfu(%)": None,
    "tokens/web": 640,
}
NUMBERS = {"segment": 0, "loss_metrics/global_avg_loss": 2.5, "tokens/web": 640}
MODULES = {"tensorboard": "flame.train.event_file", "wandb": "wandb", "trackio": "trackio"}
STAGES = ["opened", "written to", "closed"]


class StandIn:
    """All three packages: keeps its calls, and fails at one stage."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._fails = fails

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]

    def _keep(self, name: str, stage: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls.append((name, args, kwargs))
        if stage == self._fails:
            raise OSError("no space\nleft")

    def init(self, *args: Any, **kwargs: Any) -> StandIn:
        self._keep("init", "opened", args, kwargs)
        return self

    EventFile = init

    def log(self, *args: Any, **kwargs: Any) -> None:
        self._keep("log", "written to", args, kwargs)

    write = log

    def finish(self, *args: Any, **kwargs: Any) -> None:
        self._keep("finish", "closed", args, kwargs)

    close = finish

    def define_metric(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("define_metric", args, kwargs))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROJECT", "NAME", "DIR", "RUN_ID", "LOGIN_TIMEOUT", "INIT_TIMEOUT", "FINISH_TIMEOUT"):
        monkeypatch.setenv(f"WANDB_{name}", "")  # so that what is set on the way is undone
        monkeypatch.delenv(f"WANDB_{name}")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    monkeypatch.setattr(log, "propagate", True)
    with caplog.at_level(logging.WARNING, logger="flame"):
        yield caplog


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, fails: str = "") -> StandIn:
    module = StandIn(fails)
    monkeypatch.setitem(sys.modules, MODULES[name], module)  # type: ignore[arg-type]
    return module


def logged(folder: Path, *names: str, rank: int = 0, first_step: int = 1, **options: Any) -> LoggedRun:
    config = parse_train_config(["--model.config=m.json", "--training.dataset=corpus", f"--job.dump_folder={folder}"])
    return LoggedRun(
        folder=folder,
        run_id="0123456789abcdef",
        first_step=first_step,
        rank=rank,
        options=MetricsOptions(**{f"enable_{name}": True for name in names}, **options),
        config=flatten(config),
    )


def test_only_known_numbers_are_plotted() -> None:
    assert numbers(LINE | {"flag": True}) == NUMBERS


def test_nothing_is_opened_that_was_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = [pretend(monkeypatch, name) for name in LOGGERS]
    with open_loggers(logged(tmp_path)) as write:
        write(LINE)
    assert not any(stand_in.calls for stand_in in stand_ins) and not list(tmp_path.iterdir())


def test_wandb_gets_the_run_and_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pretend(monkeypatch, "wandb")
    with open_loggers(logged(tmp_path / "a-run", "wandb")) as write:
        write(LINE)
    (((), init),) = wandb.named("init")
    config = init.pop("config")
    assert config["optimizer.lr"] == 1e-3 and config["job.dump_folder"] == str(tmp_path / "a-run")
    assert init == {
        "project": "flame",
        "name": "a-run",
        "id": "0123456789abcdef",
        "resume": "allow",
        "dir": str(tmp_path / "a-run"),
    }
    assert wandb.named("define_metric") == [(("step",), {}), (("*",), {"step_metric": "step"})]
    assert wandb.named("log") == [(({"step": 7, **NUMBERS},), {})]
    assert wandb.named("finish") == [((), {"exit_code": 0})]


def test_wandb_s_own_variables_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROJECT": "p", "NAME": "n", "DIR": "/d", "INIT_TIMEOUT": "7"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb = pretend(monkeypatch, "wandb")
    with open_loggers(logged(tmp_path, "wandb")):
        pass
    assert (os.environ["WANDB_INIT_TIMEOUT"], os.environ["WANDB_FINISH_TIMEOUT"]) == ("7", "5")
    ((_, init),) = wandb.named("init")
    assert (init["project"], init["name"], init["dir"]) == ("p", "n", "/d")


def test_wandb_is_told_of_a_run_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pretend(monkeypatch, "wandb")
    with pytest.raises(ZeroDivisionError), open_loggers(logged(tmp_path, "wandb")):
        raise ZeroDivisionError
    assert wandb.named("finish") == [((), {"exit_code": 1})]


def test_trackio_gets_a_name_that_a_resume_finds_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = pretend(monkeypatch, "trackio")
    with open_loggers(logged(tmp_path / "a-run", "trackio")) as write:
        write(LINE)
    ((_, init),) = trackio.named("init")
    assert (init["project"], init["name"], init["resume"]) == ("flame", "a-run-01234567", "allow")
    assert trackio.named("log") == [((NUMBERS,), {"step": 7})]
    assert trackio.named("finish") == [((), {})]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", LOGGERS)
def test_a_logger_that_fails_is_told_once_and_off_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture, name: str, stage: str
) -> None:
    stand_ins = {other: pretend(monkeypatch, other, stage if other == name else "") for other in LOGGERS}
    with open_loggers(logged(tmp_path, *LOGGERS)) as write:
        for step in (1, 2, 3):
            write(LINE | {"step": step})
    assert [record.getMessage() for record in warnings.records] == [
        f"{name} could not be {stage}, training goes on without it: OSError: no space left"
    ]
    expected = dict.fromkeys(LOGGERS, 3) | {name: {"opened": 0, "written to": 1, "closed": 3}[stage]}
    assert {other: len(stand_in.named("log")) for other, stand_in in stand_ins.items()} == expected
    closed = {other: len(stand_in.named("finish")) for other, stand_in in stand_ins.items()}
    assert closed == {other: int(other != name or stage != "opened") for other in LOGGERS}, "none is left open"


@pytest.mark.parametrize("name", LOGGERS)
def test_a_package_that_cannot_be_imported_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setitem(sys.modules, MODULES[name], None)  # type: ignore[arg-type]
    with open_loggers(logged(tmp_path, name)) as write:
        write(LINE)
    (record,) = warnings.records
    assert record.getMessage().startswith(f"{name} could not be opened, training goes on without it")


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], StandIn]]:
    """Make wandb hang in one of its calls until the test is over; the end waits for it for a moment only."""
    released = threading.Event()
    monkeypatch.setattr(loggers, "CLOSE_SECONDS", 0.2)

    def hang(name: str) -> StandIn:
        stand_in = pretend(monkeypatch, "wandb")
        monkeypatch.setattr(stand_in, name, lambda *_args, **_kwargs: released.wait())
        return stand_in

    yield hang
    released.set()
    for thread in threading.enumerate():
        if thread.name.startswith("flame-"):
            thread.join(10)


@pytest.mark.parametrize(("call", "lost"), [("init", 5), ("log", 4), ("finish", 0)])
def test_a_logger_that_hangs_holds_up_nothing_and_what_is_lost_is_told(
    tmp_path: Path,
    hanging: Callable[[str], StandIn],
    monkeypatch: pytest.MonkeyPatch,
    warnings: pytest.LogCaptureFixture,
    call: str,
    lost: int,
) -> None:
    hanging(call)
    pytest.importorskip("tensorboard")
    importlib.import_module("flame.train.event_file")  # which takes its time, once
    waits: list[float] = []
    wait = LoggerThread.wait
    monkeypatch.setattr(LoggerThread, "wait", lambda self, seconds: (waits.append(seconds), wait(self, seconds))[1])
    with open_loggers(logged(tmp_path, "wandb", "tensorboard")) as write:
        for step in range(1, 6):
            write(LINE | {"step": step})
    assert warnings.messages == [
        f"wandb has not ended in time and is left to itself: {lost} logged steps are lost"
    ]  # tensorboard has, though it is asked last
    assert list((tmp_path / "tb").iterdir())
    assert len(waits) == 2 and 0 <= min(waits) <= max(waits) <= 0.2  # all loggers together


def test_a_logger_that_is_far_behind_drops_and_counts(
    tmp_path: Path,
    hanging: Callable[[str], StandIn],
    monkeypatch: pytest.MonkeyPatch,
    warnings: pytest.LogCaptureFixture,
) -> None:
    hanging("init")
    monkeypatch.setattr(loggers, "MAX_WAITING", 3)
    with open_loggers(logged(tmp_path, "wandb")) as write:
        for step in range(1, 11):
            write(LINE | {"step": step})
    assert warnings.messages == [
        "wandb is 3 logged steps behind: what it has no room for is dropped",
        "wandb has not ended in time and is left to itself: 10 logged steps are lost",
    ]


def test_a_logger_that_caught_up_tells_what_it_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    wandb, go_on = pretend(monkeypatch, "wandb"), threading.Event()
    opened = wandb.init
    monkeypatch.setattr(wandb, "init", lambda **options: go_on.wait() and opened(**options))
    monkeypatch.setattr(loggers, "MAX_WAITING", 3)
    with open_loggers(logged(tmp_path, "wandb")) as write:
        for step in range(1, 6):
            write(LINE | {"step": step})
        go_on.set()
    assert [args[0]["step"] for args, _ in wandb.named("log")] == [1, 2, 3] and len(wandb.named("finish")) == 1
    assert warnings.messages[-1] == "wandb was too slow: 2 logged steps were dropped"


def test_ranks_but_the_first_log_to_tensorboard_only_and_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins = {name: pretend(monkeypatch, name) for name in LOGGERS}
    with open_loggers(logged(tmp_path, *LOGGERS, rank=1)) as write:
        write(LINE)
    assert not any(stand_in.calls for stand_in in stand_ins.values())
    for rank in (0, 1):
        with open_loggers(logged(tmp_path, *LOGGERS, rank=rank, rank_0_only=False, save_tb_folder="events")):
            pass
    opened = [args for args, _ in stand_ins["tensorboard"].named("init")]
    assert opened == [(tmp_path / "events" / f"rank-{rank}", 1) for rank in (0, 1)]
    assert len(stand_ins["wandb"].named("init")) == len(stand_ins["trackio"].named("init")) == 1


def test_a_resume_drops_what_tensorboard_was_told_of_later_steps(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first_step, loss in ((1, 1.0), (4, 2.0)):
        with open_loggers(logged(tmp_path, "tensorboard", first_step=first_step)) as write:
            for step in range(first_step, first_step + 5):
                write({"step": step, "mfu(%)": loss})
    found = event_accumulator.EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("mfu(%)")
    assert [(event.step, event.value) for event in found] == [
        *((step, 1.0) for step in range(1, 4)),
        *((step, 2.0) for step in range(4, 9)),
    ]


@pytest.mark.parametrize("name", LOGGERS)
def test_an_absent_package_is_told_before_the_run(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / name).mkdir()  # such as wandb makes where it logs to: no package
    with pytest.raises(UsageError, match=rf'enable_{name} needs the package {name}.*pip install "flame\[{name}\]"'):
        refuse_absent_loggers(MetricsOptions(**{f"enable_{name}": True}))
    (tmp_path / name / "__init__.py").touch()
    sys.path_importer_cache.pop(str(tmp_path), None)
    refuse_absent_loggers(MetricsOptions(**{f"enable_{name}": True}))


def test_the_command_line_refuses_an_absent_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(UsageError, match=r"--metrics\.enable_trackio needs the package trackio"):
        parse_train_config(["--model.config=m.json", "--training.dataset=corpus", "--metrics.enable_trackio"])


def test_a_full_disk_stops_tensorboard_and_nothing_else(
    tmp_path: Path, warnings: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    threads = set(threading.enumerate())
    with file_size_limit(4096), open_loggers(logged(tmp_path, "tensorboard")) as write:
        for step in range(1, 200):
            write(LINE | {"step": step})
    (record,) = warnings.records
    assert record.getMessage().startswith("tensorboard could not be written to, training goes on without it: OSError")
    assert set(threading.enumerate()) <= threads and "Traceback" not in capfd.readouterr().err
    found = event_accumulator.EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("tokens/web")
    assert [event.step for event in found] == list(range(1, len(found) + 1)) and len(found) > 10
