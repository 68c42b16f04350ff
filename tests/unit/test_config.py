"""Options out of dataclasses: spellings, values, files, help, and errors that end a program with one paragraph."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flame.config import option, options_of, parse_count, parse_flat, parse_sections
from flame.errors import FlameError, UsageError
from flame.program import Command, guarded, help_text, run_program, take_debug


def _even(text: str) -> int:
    value = int(text)
    if value % 2:
        raise ValueError("it is odd")
    return value


@dataclass(frozen=True, kw_only=True)
class Flat:
    corpus: Path = option(help="what to read", positional=True)
    num_workers: int = option(2, help="processes", unit="processes", aliases=("jobs",))
    val_fraction: float = option(0.5, help="held out")
    limit: int | None = option(None, help="at most", parse=parse_count)
    names: tuple[str, ...] = option((), help="several")
    source: tuple[str, ...] = option((), help="one each time", repeat=True)
    engine: str = option("auto", help="which", choices=("auto", "hf"))
    shuffle: bool = option(True, help="mix")
    verbose: bool | None = option(None, help="say more")
    even: int = option(0, help="even", parse=_even)


def flat(*argv: str) -> Flat:
    return parse_flat(Flat, argv, program="prog run")


@pytest.mark.parametrize(
    ("argv", "attribute", "expected"),
    [
        ("c", "corpus", Path("c")),
        ("--corpus c", "corpus", Path("c")),
        ("c --num_workers 3", "num_workers", 3),
        ("c --num-workers=3", "num_workers", 3),
        ("c --jobs 3", "num_workers", 3),
        ("c --jobs 3 --num_workers 4", "num_workers", 4),
        ("--num_workers 3 c", "num_workers", 3),
        ("c --num_workers -1", "num_workers", -1),
        ("c --num_workers 1_000", "num_workers", 1000),
        ("c --val_fraction 1e-3", "val_fraction", 1e-3),
        ("c --limit 1.5k", "limit", 1500),
        ("c --limit none", "limit", None),
        ("c --names a,b", "names", ("a", "b")),
        ("c --names a, --names b", "names", ("b",)),
        ("c --source a=1,2 --source b", "source", ("a=1,2", "b")),
        ("c --engine hf", "engine", "hf"),
        ("c --shuffle", "shuffle", True),
        ("c --shuffle false", "shuffle", False),
        ("c --shuffle=off", "shuffle", False),
        ("--shuffle c", "corpus", Path("c")),
        ("c --verbose", "verbose", True),
        ("c --verbose no", "verbose", False),
        ("c --even 4", "even", 4),
        ("-- --odd", "corpus", Path("--odd")),
    ],
)
def test_values(argv: str, attribute: str, expected: Any) -> None:
    assert getattr(flat(*argv.split()), attribute) == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "run needs corpus. prog run -h explains every option"),
        ("c --corpus d", "does not know what to do with 'c'"),
        ("c d", "does not know what to do with 'd'"),
        ("c --num_worker 3", "Did you mean 'num_workers'?"),
        ("c --zzz 3", "-h lists every option"),
        ("c --num_workers", "--num_workers needs a value (expected a whole number)"),
        ("c --num_workers --engine hf", "--num_workers needs a value"),
        ("c --num_workers 1.5", "--num_workers cannot be '1.5' (expected a whole number)"),
        ("c --num_workers none", "--num_workers cannot be 'none'"),
        ("c --val_fraction much", "--val_fraction cannot be 'much' (expected a number)"),
        ("c --limit 1.5", "--limit cannot be '1.5': it is no whole count"),
        ("c --engine hg", "--engine cannot be 'hg' (expected one of auto, hf). Did you mean hf?"),
        ("c --shuffle=perhaps", "--shuffle cannot be 'perhaps' (expected true or false)"),
        ("c --even 3", "--even cannot be '3': it is odd"),
    ],
)
def test_wrong_calls_are_told_with_what_to_type(argv: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        flat(*argv.split())
    assert message in str(error.value)


# ---- counts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("100_000", 100_000),
        ("1,000", 1000),
        ("1.5M", 1_500_000),
        ("10B", 10**10),
        ("10g", 10**10),
        ("2T", 2 * 10**12),
        ("2e9", 2 * 10**9),
        ("0.3k", 300),
        ("4.35M", 4_350_000),  # not 4349999, as floats would have it
        ("0", 0),
    ],
)
def test_counts(text: str, expected: int) -> None:
    assert parse_count(text) == expected


@pytest.mark.parametrize("text", ["", "M", "-1", "1.5", "0.0001k", "1MB", "nan", "inf", "ten", "1e400000000"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(UsageError):
        parse_count(text)


@given(st.integers(0, 10**18), st.sampled_from(["", "k", "M", "B", "T"]))
def test_counts_are_exact(value: int, suffix: str) -> None:
    factor = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}[suffix]
    assert parse_count(f"{value}{suffix}") == value * factor


# ---- sections


@dataclass(frozen=True, kw_only=True)
class Job:
    config_file: Path | None = option(None, help="file")
    note: str = option("", help="text")


@dataclass(frozen=True, kw_only=True)
class Training:
    steps: int = option(10, help="steps", aliases=("old.length",))
    parts: tuple[float, ...] | None = option(None, help="parts")
    varlen: bool = option(False, help="packed")


@dataclass(frozen=True, kw_only=True)
class Config:
    job: Job = field(default_factory=Job)
    training: Training = field(default_factory=Training)


def sections(*argv: str, **arguments: Any) -> Config:
    return parse_sections(Config, argv, program="prog", **arguments)


def write(folder: Path, text: str) -> str:
    file = folder / "config.toml"
    file.write_text(text)
    return f"--job.config_file={file}"


def test_sections_from_a_file_and_over_it_the_command_line(tmp_path: Path) -> None:
    file = write(tmp_path, '[job]\nnote = "a, b"\n[training]\nsteps = 5\nparts = [0.25, 0.75]\nvarlen = true\n')
    config = sections(file)
    assert (config.job.note, config.training) == ("a, b", Training(steps=5, parts=(0.25, 0.75), varlen=True))
    config = sections(file, "--training.steps", "7", "--training.varlen", "false", "--training.parts", "none")
    assert config.training == Training(steps=7)


def test_old_names_and_dashes_work_in_a_file(tmp_path: Path) -> None:
    assert sections(write(tmp_path, "[old]\nlength = 3\n")).training.steps == 3
    assert sections(write(tmp_path, '[job]\nnote = "x"\n'), "--job.note=y").job.note == "y"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training]\nstepz = 3\n", "Did you mean 'training.steps'?"),
        ("[model]\nsteps = 3\n", "Did you mean 'training.steps'?"),
        ("training = 3\n", "there is no option 'training'"),
        ("[training\n", "is no TOML"),
        ("[training]\nsteps = 1.5\n", "--training.steps cannot be '1.5'"),
        ('[training]\nvarlen = "perhaps"\n', "--training.varlen cannot be 'perhaps'"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        sections(write(tmp_path, text))
    assert message in str(error.value)


def test_a_file_that_is_absent_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        sections("--job.config_file", str(tmp_path / "absent.toml"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is no TOML"):
        sections("--job.config_file", str(tmp_path / "bytes.toml"))


def test_sections_take_no_lone_words() -> None:
    with pytest.raises(UsageError, match="takes options only"):
        sections("7")


def test_translate_sees_each_origin_by_itself(tmp_path: Path) -> None:
    seen: list[tuple[dict[str, list[str]], str]] = []

    def translate(texts: dict[str, list[str]], origin: str) -> dict[str, list[str]]:
        seen.append((dict(texts), origin))
        return {**texts, "training.steps": ["1"]}

    file = write(tmp_path, "[training]\nsteps = 5\n")
    assert sections(file, "--training.varlen", translate=translate).training == Training(steps=1, varlen=True)
    assert [texts for texts, _ in seen] == [
        {"training.steps": ["5"]},
        {"job.config_file": [str(tmp_path / "config.toml")], "training.varlen": ["true"]},
    ]
    assert [origin for _, origin in seen] == [str(tmp_path / "config.toml"), "the command line"]


# ---- programs


def program(run: Callable[[Any], int], *argv: str) -> int:
    return run_program("prog", "Does things.", [Command(name="run", options=Flat, help="Run it.", run=run)], argv)


def test_a_command_gets_its_options_and_gives_the_exit_code() -> None:
    given: list[Flat] = []

    def run(options: Flat) -> int:
        given.append(options)
        return 3

    assert program(run, "run", "c", "--num_workers=5") == 3
    assert given == [Flat(corpus=Path("c"), num_workers=5)]


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (UsageError("a wrong call", fix="Type it otherwise"), 2, "prog: a wrong call. Type it otherwise.\n"),
        (FlameError("it broke", where="here", got=1, expected=2), 1, "prog: it broke (in here; got 1; expected 2).\n"),
        (FileNotFoundError(2, "No such file", "x"), 1, "prog: No such file (in x).\n"),
        (ValueError("two\nlines"), 1, "prog: unexpected ValueError: two lines. Run it again with --debug for the"),
    ],
)
def test_errors_are_one_paragraph(error: Exception, code: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(options: Flat) -> int:
        raise error

    assert program(fail, "run", "c") == code
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.startswith(told) and stderr.count("\n") == 1
    assert program(fail, "run", "--debug", "c") == code
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_is_130_and_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(options: Flat) -> int:
        raise KeyboardInterrupt

    assert program(interrupted, "run", "c") == 130
    assert capsys.readouterr() == ("", "")


def test_a_closed_pipe_ends_quietly() -> None:
    code = (
        "import sys\nfrom flame.program import guarded\n"
        "def run():\n    for _ in range(100000): print('line')\n    return 0\n"
        "sys.exit(guarded(run, debug=False))"
    )
    read_end, write_end = os.pipe()
    os.close(read_end)
    ended = subprocess.run([sys.executable, "-c", code], stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_unknown_commands_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert program(lambda options: 0, "rum") == 2
    assert "prog has no command 'rum' (expected one of run). Did you mean 'run'?" in capsys.readouterr().err
    assert program(lambda options: 0) == 2
    assert "usage: prog COMMAND" in capsys.readouterr().out


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert program(lambda options: 7, "-h") == 0
    assert "Run it." in capsys.readouterr().out
    assert program(lambda options: 7, "run", "c", "-h") == 0
    assert "usage: prog run CORPUS [options]" in capsys.readouterr().out
    assert program(lambda options: 7, "--version") == 0
    assert capsys.readouterr().out.startswith("prog ")


def test_help_tells_every_option_with_unit_default_choices_and_other_names() -> None:
    text = help_text(Flat, usage="prog run", description="Runs.")
    for known in options_of(Flat):
        assert f"--{known.name}" in text or known.info.positional
        assert known.info.help in text
    assert "--num_workers N\n      processes [unit: processes; default: 2; also: --jobs]" in text
    assert "what to read [required]" in text and "one of auto, hf; default: auto" in text
    assert "mix [default: on]" in text and "may be given several times" in text
    assert "job:\n  --job.config_file" in help_text(Config, usage="prog", description="Runs.")


def test_debug_may_stand_anywhere() -> None:
    assert take_debug(["a", "--debug", "b"]) == (True, ["a", "b"])
    assert take_debug(["a"]) == (False, ["a"])


def test_guarded_passes_exit_codes_through() -> None:
    assert guarded(lambda: 75, debug=False) == 75
