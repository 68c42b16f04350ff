"""Real training runs on tiny data, for tests: a corpus, a mixture, a model of some thousand parameters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flame.train.__main__ import main
from flame.train.checkpoint_files import find_damage
from flame.train.checkpoint_tensors import StoredModel
from tests.corpora import make_corpus

PROJECT = Path(__file__).resolve().parent.parent
FLAME_TRAIN = ("flame.cli.train",)
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "flame.train")  # two ranks
VOCABULARY = 423  # as many as the tests' tokenizer has
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}


def random_documents(count: int, *, seed: int, longest: int = 60, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Documents of 0 to `longest` tokens (before their EOS, id 0), with a slope that a model can learn."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest + 1, count)
    starts = rng.integers(1, vocabulary, count)
    return [
        [1 + int(start + i) % (vocabulary - 1) for i in range(length)]
        for start, length in zip(starts, lengths, strict=True)
    ]


def make_training_folder(folder: Path, tokenizer: Path) -> Path:
    """Write two corpora (`web` with a val split, `code`), and `llama.json`; returns the folder."""
    make_corpus(
        folder / "web",
        random_documents(400, seed=1),
        val=random_documents(40, seed=2),
        vocab_size=VOCABULARY,
        tokenizer=tokenizer,
    )
    make_corpus(folder / "code", random_documents(200, seed=3, longest=200), vocab_size=VOCABULARY, tokenizer=tokenizer)
    (folder / "llama.json").write_text(json.dumps(LLAMA))
    return folder


def arguments(folder: Path, run: Path, **options: Any) -> list[str]:
    """The command line of a run over `folder`; `options` are dotted names with `__` for the dot."""
    chosen: dict[str, Any] = {
        "job.dump_folder": run,
        "model.config": folder / "llama.json",
        "training.dataset": f"{folder / 'web'},{folder / 'code'}",
        "training.data_probs": "0.7,0.3",
        "training.varlen": "true",
        "training.batch_size": 2,
        "training.seq_len": 128,
        "training.context_len": 64,
        "training.window_len": 128,
        "training.steps": 20,
        "lr_scheduler.warmup_steps": 4,
        "metrics.log_freq": 1,
        "checkpoint.interval": 1000,
        "checkpoint.export_hf": "false",
    }
    chosen.update({name.replace("__", "."): value for name, value in options.items()})
    return [f"--{name}={value}" for name, value in chosen.items()]


def rank_environment(ranks: int, variables: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of a training of its own, whatever rank or logged run this process may belong to."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "WANDB"))}
    environment |= {"NGPU": str(ranks), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(PROJECT)}
    return environment | dict(variables or {})


def start_training(
    argv: Sequence[str],
    *,
    ranks: int = 1,
    command: Sequence[str] = FLAME_TRAIN,
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start training in fresh processes: one, or as many as `ranks`; `variables` may be those of faults.py.

    They end with the test, whether it fails or not (`end_trainings`).
    """
    words = [sys.executable, "-m", *command, *argv]
    process = subprocess.Popen(words, env=rank_environment(ranks, variables), stderr=subprocess.PIPE, text=True)
    _STARTED.append(process)
    return process


_STARTED: list[subprocess.Popen[str]] = []


def end_trainings() -> None:
    """Kill what `start_training` has started and still runs (its ranks die with it), and close its pipes."""
    while _STARTED:
        process = _STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stderr is not None:
            process.stderr.close()


def run_training(
    argv: Sequence[str],
    *,
    ranks: int = 1,
    command: Sequence[str] = FLAME_TRAIN,
    check: bool = True,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """The same, to the end of the run."""
    words = [sys.executable, "-m", *command, *argv]
    environment = rank_environment(ranks, variables)
    result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    if check and result.returncode != 0:
        raise AssertionError(f"flame-train exited {result.returncode}:\n{result.stderr[-4000:]}")
    return result


def signal_at(process: subprocess.Popen[str], text: str, number: signal.Signals) -> str:
    """Read a run's log to its end, and send a signal when a line holds `text`; returns the log."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            process.send_signal(number)
    return "".join(lines)


def refused(capsys: pytest.CaptureFixture[str], argv: Sequence[str], code: int, *told: str) -> None:
    """Check that a run is refused with `code`, in one paragraph that tells all of `told`, before any step."""
    capsys.readouterr()
    assert main(argv) == code
    error = capsys.readouterr().err
    paragraph = error.strip().splitlines()[-1]
    assert paragraph.startswith("flame-train: ")
    for words in told:
        assert words in paragraph
    assert "Traceback" not in error and "loss" not in error.replace("loss: ", "")


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The logged steps of a run, in order."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def read_segments(run: Path) -> list[dict[str, Any]]:
    """What a run noted at each of its starts."""
    return [json.loads(line) for line in (run / "segments.jsonl").read_text().splitlines()]


def losses_and_norms(run: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every logged step: what a resume must repeat to the last bit."""
    return [
        (line["step"], line["loss_metrics/global_avg_loss"], line["optimizer/grad_norm"]) for line in read_metrics(run)
    ]


def tensors_of(checkpoint: Path, *prefixes: str) -> dict[str, torch.Tensor]:
    """What an undamaged checkpoint holds, by name: weights and moments, or what has these prefixes."""
    assert find_damage(checkpoint, check_bytes=True) is None
    found = {}
    for prefix in prefixes or ("model.", "optimizer.state."):
        stored = StoredModel(checkpoint, prefix=prefix)
        found |= {prefix + name: stored.read(name) for name in stored.tensors}
    assert len(found) > 20
    return found
