"""A saved data set of ids, converted by real processes: any number of workers, kills, locks; verified and mixed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer

from flame.preprocess.folder import WORKERS_LOCK
from tests.builds import (
    build_here,
    documents_of,
    rows_of,
    run_command,
    same_corpus,
    some_texts,
    texts_of,
    write_parquet,
)
from tests.processes import SECONDS_TO_WAIT, processes_of, receipts, running, until
from tests.tokenizers import write_tiny_tokenizer

FILES = 24
OPTIONS = {"val_fraction": 0.05, "shard_tokens": 20_000, "shuffle_block_tokens": 30_000}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, a tokenizer, the data set of their ids, and the corpus that one process makes of it."""
    folder = tmp_path_factory.mktemp("convert")
    tokenizer = Tokenizer.from_file(str(write_tiny_tokenizer(folder / "tok") / "tokenizer.json"))
    texts = some_texts(4800, longest=150)
    write_parquet(folder / "raw/a.parquet", texts)
    ids = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    masks = [[1] * len(row) for row in ids]
    numbers = list(range(len(ids)))
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": masks, "number": numbers})
    DatasetDict({"train": data}).save_to_disk(str(folder / "v0"), num_shards={"train": FILES})
    result = run_command(command(folder, folder / "expected", num_workers=1))
    assert result.returncode == 0, result.stderr
    assert receipts(folder / "expected") == FILES
    return folder


def command(work: Path, output: Path, **options: Any) -> list[str]:
    chosen = {
        "from": "flame-v0",
        "input": work / "v0",
        "tokenizer": work / "tok",
        "output": output,
        "num_workers": 2,
        **OPTIONS,
        **options,
    }
    words = [f"--{name}={value}" for name, value in chosen.items()]
    return [sys.executable, "-m", "flame.cli.preprocess", "convert", *words]


def test_kept_in_order_it_is_the_stream_of_tokens_that_a_build_makes_of_the_text(work: Path, tmp_path: Path) -> None:
    build_here(work / "raw", tmp_path / "built", work / "tok", no_shuffle=True, val_fraction=0.05)
    output = tmp_path / "out"
    words = command(work, output, no_shuffle="true", keep_columns="number", shard_tokens=20_000)
    result = run_command(words)
    assert result.returncode == 0, result.stderr
    for split in ("train", "val"):
        assert documents_of(output, split) == documents_of(tmp_path / "built", split)
        assert texts_of(output, split) == texts_of(tmp_path / "built", split)
    numbers = {row["number"]: row for rows in rows_of(output).values() for row in rows}
    assert sorted(numbers) == list(range(4800))
    assert numbers[4799]["source_file"] == str(work / f"v0/train/data-{FILES - 1:05d}-of-{FILES:05d}.arrow")
    assert numbers[4799]["row"] == 199


def test_what_reads_a_corpus_takes_it(work: Path, tmp_path: Path) -> None:
    verified = run_command([sys.executable, "-m", "flame.cli.preprocess", "verify", work / "expected"])
    assert verified.returncode == 0, verified.stdout + verified.stderr
    shown = [sys.executable, "-m", "flame.cli.preprocess", "decode", work / "expected", "--document", "7", "--json"]
    found = json.loads(run_command(shown).stdout)
    assert found["text"] in set(some_texts(4800, longest=150))
    assert found["num_bytes"] == len(found["text"].encode())
    mixed = [sys.executable, "-m", "flame.cli.mix", "create", "--source", f"web={work / 'expected'}:1"]
    result = run_command([*mixed, "--output", tmp_path / "mix.json"])
    assert result.returncode == 0, result.stderr


def test_two_workers_and_one_give_the_same_bytes(work: Path, tmp_path: Path) -> None:
    result = run_command(command(work, tmp_path / "out"))
    assert result.returncode == 0, result.stderr
    assert same_corpus(tmp_path / "out", work / "expected")


def test_killed_and_run_again_it_ends_as_if_undisturbed(work: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    for wanted in (1, 6):
        with running(command(work, output)) as process:
            assert until(lambda wanted=wanted: receipts(output) >= wanted)
            os.kill(process.pid, signal.SIGKILL)
            process.communicate(timeout=SECONDS_TO_WAIT)  # their stderr is the workers' too
            assert process.returncode == -signal.SIGKILL
        assert until(lambda process=process: not processes_of(process.pid)), "no worker outlives the command"
        assert not (output / "manifest.json").exists(), "the kill came too late to show anything"
    result = run_command(command(work, output))
    assert result.returncode == 0, result.stderr
    assert "of them done before" in result.stderr
    assert same_corpus(output, work / "expected")
    assert not list(output.rglob("*.tmp"))


def test_another_worker_takes_up_what_a_killed_one_left(work: Path, tmp_path: Path) -> None:
    with running(command(work, tmp_path / "out")) as process:
        assert until(lambda: receipts(tmp_path / "out") > 0)
        os.kill(processes_of(process.pid)[-1], signal.SIGKILL)
        _, errors = process.communicate(timeout=SECONDS_TO_WAIT)
        assert process.returncode == 0, errors
        assert "a worker died in task" in errors and "Traceback" not in errors
        assert not processes_of(process.pid)
    assert same_corpus(tmp_path / "out", work / "expected")


def test_ctrl_c_ends_all_processes_with_130(work: Path, tmp_path: Path) -> None:
    with running(command(work, tmp_path / "out")) as process:
        assert until(lambda: receipts(tmp_path / "out") > 0)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers as well
        _, errors = process.communicate(timeout=SECONDS_TO_WAIT)
        assert process.returncode == 130, errors
        assert "Traceback" not in errors
        assert not processes_of(process.pid)
    assert not (tmp_path / "out/manifest.json").exists()


def test_a_second_one_at_a_time_is_refused_and_one_waits_for_the_workers_of_a_killed_one(
    work: Path, tmp_path: Path
) -> None:
    lock = tmp_path / "out" / WORKERS_LOCK
    lock.parent.mkdir(parents=True)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_SH)  # as a worker holds it
        with running(command(work, tmp_path / "out")) as process:
            assert until(lambda: (tmp_path / "out/build/lock").exists())
            assert until(lambda: (tmp_path / "out/build/lock").read_text().startswith(f"{process.pid} on "))
            second = run_command(command(work, tmp_path / "out"))
            assert second.returncode == 1
            assert f"process {process.pid}" in second.stderr
            assert not (tmp_path / "out/build/plan.json").exists()
            fcntl.flock(held, fcntl.LOCK_UN)
            _, errors = process.communicate(timeout=SECONDS_TO_WAIT)
            assert process.returncode == 0, errors
    assert same_corpus(tmp_path / "out", work / "expected")


def test_errors_of_workers_are_one_paragraph_with_exit_code_1(work: Path, tmp_path: Path) -> None:
    small = write_tiny_tokenizer(tmp_path / "small", vocab_size=300)
    words = command(work, tmp_path / "out", tokenizer=small)
    result = run_command(words)
    assert result.returncode == 1
    assert "a token id is not one of the tokenizer's" in result.stderr and ".arrow, row " in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out/manifest.json").exists()
