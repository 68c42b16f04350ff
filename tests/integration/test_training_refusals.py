"""What cannot be trained is told in one paragraph, with its exit code, before anything is lost."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flame.files import exclusive_lock
from flame.train.__main__ import main
from flame.train.run import read_status
from tests.corpora import make_corpus
from tests.runs import (
    LLAMA,
    VOCABULARY,
    arguments,
    losses_and_norms,
    make_training_folder,
    random_documents,
    rank_environment,
    refused,
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    return make_training_folder(tmp_path_factory.mktemp("training"), tiny_tokenizer)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "data"))


def test_wrong_calls(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    refused(capsys, [*arguments(folder, run), "--training.batchsize=3"], 2, "training.batchsize", "training.batch_size")
    refused(capsys, arguments(folder, run, training__dataset=folder / "wbe", training__data_probs=1), 2, "wbe")
    refused(capsys, arguments(folder, run, training__dataset=folder / "mix.json", training__data_probs=1), 2, "mix")
    refused(capsys, arguments(folder, run, model__config=folder / "lama.json"), 2, "lama.json", "llama.json")
    refused(capsys, arguments(folder, run, training__data_probs="0.7"), 2, "data_probs")
    refused(capsys, arguments(folder, run, training__window_len=48), 2, "window_len", "seq_len")
    refused(capsys, arguments(folder, run, job__config_file=folder / "no.toml"), 2, "no.toml")
    assert not run.exists() or not list(run.glob("checkpoint/*"))


def test_a_folder_that_is_no_corpus(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "web" / "manifest.json").unlink()
    refused(capsys, arguments(folder, tmp_path / "run"), 1, "no corpus", str(folder / "web"))


@pytest.mark.parametrize("cut_bytes", [2, 4096])
@pytest.mark.parametrize("kind", ["tokens", "ends"])
def test_a_truncated_shard(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], cut_bytes: int, kind: str
) -> None:
    shard = sorted((folder / "code" / "train").glob(f"*.{kind}.npy"))[1]
    os.truncate(shard, max(0, shard.stat().st_size - cut_bytes))
    refused(capsys, arguments(folder, tmp_path / "run"), 1, str(shard))


def test_swapped_document_ends(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = sorted((folder / "code" / "train").glob("*.ends.npy"))[:2]
    spare = one.with_suffix(".spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)
    refused(capsys, arguments(folder, tmp_path / "run"), 1, ".ends.npy")


def test_ids_beyond_the_vocabulary(
    folder: Path, tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_corpus(folder / "bad", [[5, 50_000, 7]] * 200, vocab_size=VOCABULARY, tokenizer=tiny_tokenizer)
    argv = arguments(folder, tmp_path / "run", training__dataset=folder / "bad", training__data_probs=1)
    refused(capsys, argv, 1, "50000", "512")


def test_other_data_on_a_resume(
    folder: Path, tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(arguments(folder, run, training__steps=4, checkpoint__interval=2)) == 0
    before = losses_and_norms(run)
    capsys.readouterr()
    steps = {"training__steps": 6}
    refused(capsys, arguments(folder, run, **steps, training__data_probs="0.5,0.5"), 1, "the mixture")
    refused(capsys, arguments(folder, run, **steps, training__seed=7), 1, "data_seed", "7", "42")
    longer = {"training__seq_len": 256, "training__window_len": 256}
    refused(capsys, arguments(folder, run, **steps, **longer), 1, "window_len", "256", "128")
    other = {"training__dataset": f"{folder / 'web'}@val,{folder / 'code'}"}
    refused(capsys, arguments(folder, run, **steps, **other), 1, "the mixture")
    refused(capsys, arguments(folder, run, **steps, checkpoint__load_step=3), 1, "step 3", "step-2, step-4")
    shutil.rmtree(folder / "web")
    make_corpus(folder / "web", random_documents(400, seed=9), vocab_size=VOCABULARY, tokenizer=tiny_tokenizer)
    refused(capsys, arguments(folder, run, **steps), 1, "the corpus of source 'web'")
    assert losses_and_norms(run) == before
    assert sorted(path.name for path in (run / "checkpoint").iterdir()) == ["step-2", "step-4"]


def test_another_model_on_a_resume(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(arguments(folder, run, training__steps=2)) == 0
    capsys.readouterr()
    (folder / "narrow.json").write_text(json.dumps(LLAMA | {"intermediate_size": 48}))
    argv = arguments(folder, run, training__steps=4, model__config=folder / "narrow.json")
    refused(capsys, argv, 1, "intermediate_size", "48", "64")


def test_validation_sets(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    refused(capsys, arguments(folder, run, validation__dataset=folder / "code"), 1, "also trained on")
    refused(capsys, arguments(folder, run, validation__dataset=f"{folder / 'code'}@val"), 1, "no split 'val'")
    rows = {"training__seq_len": 8192, "training__window_len": 8192, "training__steps": 1}
    refused(capsys, arguments(folder, run, **rows, validation__dataset=folder / "web"), 1, "too small", "8193")


def test_a_finished_run_ends_at_once(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    argv = arguments(folder, run, training__steps=2)
    assert main(argv) == 0
    before = losses_and_norms(run)
    capsys.readouterr()
    assert main(argv) == 0
    assert "nothing is left to train: the run is at step 2, and ends at 2" in capsys.readouterr().err
    assert losses_and_norms(run) == before
    assert read_status(run)["state"] == "finished"


def test_a_second_run_in_the_folder_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with exclusive_lock(run / ".lock", what="this run"):
        refused(capsys, arguments(folder, run), 1, "another process", str(os.getpid()))


def test_a_corpus_without_a_usable_tokenizer(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = folder / "web" / "tokenizer"
    for name in ("tokenizer_config.json", "tokenizer.json"):
        whole = (tokenizer / name).read_bytes()
        for content in ("{", "[]"):
            (tokenizer / name).write_text(content)
            refused(capsys, arguments(folder, tmp_path / "run"), 1, "tokenizer's files", str(tokenizer))
        (tokenizer / name).write_bytes(whole)
    shutil.rmtree(tokenizer)
    refused(capsys, arguments(folder, tmp_path / "run"), 1, "has lost its tokenizer", str(tokenizer))


def test_a_run_folder_that_cannot_be_one(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    for run in (tmp_path / "file", tmp_path / "file" / "run"):
        refused(capsys, arguments(folder, run), 1, "cannot be written into", str(run), "job.dump_folder")


def test_a_disk_that_refuses_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = arguments(folder, run, training__steps=4, checkpoint__interval=2)
    largest = 40_000  # bytes a file: metrics fit, weights do not

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

    words = [sys.executable, "-m", "flame.train", *argv]
    result = subprocess.run(words, env=rank_environment(1, None), capture_output=True, text=True, preexec_fn=limit)
    assert result.returncode == 1
    assert "no space left" in result.stderr and "Traceback" not in result.stderr
    assert not list((run / "checkpoint").glob("step-*"))
    told = read_status(run)
    assert told["state"] == "failed" and "no space left" in told["reason"]
    assert main(argv) == 0, "it goes on once there is room"
