"""Builds in real processes: any number of workers, kills, signals, locks, a full disk. The bytes never change."""

from __future__ import annotations

import fcntl
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flame.preprocess.folder import WORKERS_LOCK
from tests.builds import (
    build_here,
    command,
    environment,
    run_build,
    same_corpus,
    write_parts,
)
from tests.processes import SECONDS_TO_WAIT, processes_of, receipts, running, small_disk, until
from tests.tokenizers import write_tiny_tokenizer

OPTIONS = {"val_fraction": 0.05, "shard_tokens": 20_000, "shuffle_block_tokens": 30_000}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with inputs of some 3 MB, a tokenizer, and the corpus as one process makes it."""
    folder = tmp_path_factory.mktemp("processes")
    write_tiny_tokenizer(folder / "tok")
    write_parts(folder / "raw", 6, 1200)
    build_here(folder / "raw", folder / "expected", folder / "tok", **OPTIONS)
    assert len(list((folder / "expected/build/tasks").iterdir())) > 20
    return folder


def build_command(work: Path, output: Path) -> list[str]:
    return command(work / "raw", output, work / "tok", **OPTIONS)


@pytest.mark.parametrize(("workers", "parallelism"), [(1, "true"), (4, "false")])
def test_any_number_of_workers_gives_the_same_bytes(work: Path, tmp_path: Path, workers: int, parallelism: str) -> None:
    # the tokenizer's threads and the forks must not meet, whatever the user's environment says
    env = environment(TOKENIZERS_PARALLELISM=parallelism)
    result = run_build(work / "raw", tmp_path / "out", work / "tok", num_workers=workers, env=env, **OPTIONS)
    assert result.returncode == 0, result.stderr
    assert same_corpus(tmp_path / "out", work / "expected")
    assert "7,200 read" in result.stdout


def test_a_tokenizer_used_before_in_the_same_process_hangs_nothing(work: Path, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from tokenizers import Tokenizer
from flame.preprocess.build import build
from flame.preprocess.config import BuildOptions
work = Path({str(work)!r})
Tokenizer.from_file(str(work / "tok/tokenizer.json")).encode_batch(["some text"] * 1000)
options = dict(num_workers=2, **{OPTIONS})
build(BuildOptions(dataset=(str(work / "raw"),), tokenizer=work / "tok", output=Path("out"), **options))
"""
    env = environment(TOKENIZERS_PARALLELISM="true")
    subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, check=True, timeout=120, capture_output=True)
    assert same_corpus(tmp_path / "out", work / "expected")


def test_killed_five_times_it_ends_as_if_undisturbed(work: Path, tmp_path: Path) -> None:
    moments = random.Random(20240607)
    output = tmp_path / "out"
    total = receipts(work / "expected")
    for kill in range(5):
        with running(build_command(work, output)) as process:
            wanted = min(receipts(output) + moments.randint(0, total // 10), total - 1)
            assert until(
                lambda wanted=wanted, process=process: receipts(output) >= wanted or process.poll() is not None
            )
            for _ in range(moments.randint(0, 200_000)):
                pass  # a little later, but not the same little each time
            process.kill()
            process.communicate()
            assert process.returncode == -signal.SIGKILL
        assert until(lambda process=process: not processes_of(process.pid)), "no worker outlives its builder"
        assert not (output / "manifest.json").exists(), f"kill {kill} came too late to show anything"
    result = run_build(work / "raw", output, work / "tok", **OPTIONS)
    assert result.returncode == 0, result.stderr
    assert "of them done before" in result.stderr
    assert same_corpus(output, work / "expected")
    assert not list(output.rglob("*.tmp"))


def test_another_worker_takes_up_what_a_killed_one_left(work: Path, tmp_path: Path) -> None:
    with running(build_command(work, tmp_path / "out")) as process:
        assert until(lambda: receipts(tmp_path / "out") > 0)
        loader, *workers = processes_of(process.pid)
        assert len(workers) == 2
        assert len(list(Path(f"/proc/{loader}/task").iterdir())) == 1, "a fork must find no other thread"
        os.kill(workers[-1], signal.SIGKILL)
        _, errors = process.communicate(timeout=SECONDS_TO_WAIT)
        assert process.returncode == 0, errors
        assert "a worker died in task" in errors
        assert "killed by SIGKILL" in errors
        assert not processes_of(process.pid)
    assert same_corpus(tmp_path / "out", work / "expected")


def test_the_death_of_the_loader_is_told_and_a_second_run_ends_well(work: Path, tmp_path: Path) -> None:
    with running(build_command(work, tmp_path / "out")) as process:
        assert until(lambda: receipts(tmp_path / "out") > 0)
        os.kill(processes_of(process.pid)[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=SECONDS_TO_WAIT)
        assert process.returncode == 1, errors
        assert "the process that starts the workers died (got killed by SIGKILL" in errors
        assert "Traceback" not in errors
        assert not processes_of(process.pid)
    assert not (tmp_path / "out/manifest.json").exists()
    assert run_build(work / "raw", tmp_path / "out", work / "tok", **OPTIONS).returncode == 0
    assert same_corpus(tmp_path / "out", work / "expected")


def test_ctrl_c_ends_all_processes_with_130(work: Path, tmp_path: Path) -> None:
    with running(build_command(work, tmp_path / "out")) as process:
        assert until(lambda: receipts(tmp_path / "out") > 0)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers as well
        _, errors = process.communicate(timeout=SECONDS_TO_WAIT)
        assert process.returncode == 130, errors
        assert "Traceback" not in errors
        assert not processes_of(process.pid)
    assert not (tmp_path / "out/manifest.json").exists()


def test_a_second_build_at_a_time_is_refused_and_disturbs_nothing(work: Path, tmp_path: Path) -> None:
    with running(build_command(work, tmp_path / "out")) as process:
        assert until(lambda: receipts(tmp_path / "out") > 0)
        process.send_signal(signal.SIGSTOP)  # it may not end before the second has begun
        second = run_build(work / "raw", tmp_path / "out", work / "tok", **OPTIONS)
        process.send_signal(signal.SIGCONT)
        assert second.returncode == 1
        assert f"process {process.pid}" in second.stderr
        process.communicate(timeout=SECONDS_TO_WAIT)
        assert process.returncode == 0
    assert same_corpus(tmp_path / "out", work / "expected")


def test_a_build_waits_for_the_workers_of_a_killed_one(work: Path, tmp_path: Path) -> None:
    lock = tmp_path / "out" / WORKERS_LOCK
    lock.parent.mkdir(parents=True)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with running(build_command(work, tmp_path / "out")) as process:
            assert until(lambda: processes_of(process.pid) != [])
            assert not (tmp_path / "out/build/plan.json").exists()
            fcntl.flock(held, fcntl.LOCK_UN)
            _, errors = process.communicate(timeout=SECONDS_TO_WAIT)
            assert process.returncode == 0, errors


def test_errors_of_workers_are_one_paragraph(work: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    result = run_build(tmp_path / "bad.jsonl", tmp_path / "out", work / "tok")
    assert result.returncode == 1
    assert "bad.jsonl, line 2" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out/manifest.json").exists()

    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["b", "c"]]}}')
    result = run_build(work / "raw", tmp_path / "none", tmp_path / "tokenizer.json", eos_token="a")
    assert result.returncode == 1
    assert "`tokenizers` cannot load" in result.stderr
    assert not (tmp_path / "none").exists()


def test_wrong_calls_are_2_and_help_is_quick_to_load(work: Path, tmp_path: Path) -> None:
    result = run_build(tmp_path / "absent", tmp_path / "out", work / "tok")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    code = "import sys; from flame.cli.preprocess import main; main(); print('pyarrow' in sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", code, "build", "-h"], env=environment(), capture_output=True, text=True, check=True
    )
    assert "--val_fraction" in shown.stdout
    assert shown.stdout.endswith("False\n"), "what -h does not need is not imported"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 2**21):
        yield tmp_path / "disk"


def test_a_disk_without_room_for_the_tokenizer_is_told(work: Path, disk: Path) -> None:
    (disk / "filler").write_bytes(bytes(2**21 - 24 * 2**10))
    result = run_build(work / "raw", disk / "out", work / "tok", **OPTIONS)
    assert result.returncode == 1
    told = result.stderr.splitlines()[-1]
    assert told.startswith(f"flame-preprocess: no space left on the device (in {disk}/out"), told
    assert "bytes for this write" in told


def test_a_full_disk_is_told_and_the_build_ends_well_once_there_is_room(work: Path, disk: Path) -> None:
    output = disk / "out"
    result = run_build(work / "raw", output, work / "tok", **OPTIONS)
    assert result.returncode == 1, result.stdout
    assert "no space left" in result.stderr
    told = result.stderr.splitlines()[-1]
    said = re.fullmatch(
        rf"flame-preprocess: no space left on the device \(in {output}\S*; got ([0-9,]+) bytes free; expected about "
        r"([0-9,]+) bytes for what is left, ([0-9]+) tasks\)\. Free space or choose another disk, then run the "
        r"same command again: what is complete is kept\.",
        told,
    )
    assert said is not None, told
    free, needed = (int(number.replace(",", "")) for number in said.groups()[:2])
    assert free < needed < 8 * 2**20
    assert "Traceback" not in result.stderr
    assert not (output / "manifest.json").exists()
    assert receipts(output) > 0, "what was finished before is kept"
    left = receipts(work / "expected") - receipts(output)
    assert left <= int(said[3]) <= left + 2, "a task may have ended while the error was told"
    subprocess.run(["mount", "-o", "remount,size=32m", str(disk)], check=True)
    result = run_build(work / "raw", output, work / "tok", **OPTIONS)
    assert result.returncode == 0, result.stderr
    assert same_corpus(output, work / "expected")
