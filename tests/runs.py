"""Real training runs on tiny data, for tests: a corpus, a mixture, a model of some thousand parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.corpora import make_corpus

PROJECT = Path(__file__).resolve().parent.parent
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


def run_training(
    argv: Sequence[str], *, ranks: int = 1, check: bool = True, faults: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `flame-train` in fresh processes: one, or as many as `ranks` under our launcher; `faults`: see faults.py."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"NGPU": str(ranks), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(PROJECT)}
    environment |= faults or {}
    result = subprocess.run(
        [sys.executable, "-m", "flame.cli.train", *argv], env=environment, capture_output=True, text=True, timeout=300
    )
    if check and result.returncode != 0:
        raise AssertionError(f"flame-train exited {result.returncode}:\n{result.stderr[-4000:]}")
    return result


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The logged steps of a run, in order."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses_and_norms(run: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of every logged step: what a resume must repeat to the last bit."""
    return [
        (line["step"], line["loss_metrics/global_avg_loss"], line["optimizer/grad_norm"]) for line in read_metrics(run)
    ]
