"""What the benchmarks of training share: random documents to train on, and `flame-train` in fresh processes."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from flame.shards.fingerprint import tokenizer_fingerprint  # noqa: E402
from flame.shards.manifest import Manifest, SplitInfo, TokenizerInfo, write_manifest  # noqa: E402
from flame.shards.writer import SplitWriter  # noqa: E402

VOCABULARY = 32_000


def document_lengths(num_tokens: int) -> NDArray[np.int64]:
    """Return lengths of documents as on the web, log-normal with a mean of about 1,100, of so many tokens at least."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.5, 1.0, max(num_tokens // 500, 64)), 16, 50_000).astype(np.int64)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), num_tokens)) + 1]


def make_corpus(folder: Path, *, num_tokens: int, vocabulary: int = VOCABULARY) -> Path:
    """Write documents of random tokens and `document_lengths`."""
    lengths = document_lengths(num_tokens)
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, vocabulary, int(lengths.sum()), dtype=np.uint32)
    tokens[np.cumsum(lengths) - 1] = 0
    writer = SplitWriter(folder, "train", task=0, shard_tokens=1 << 28, docs_schema=None)
    writer.append(tokens, lengths, num_bytes=lengths * 4)
    # A run keeps its tokenizer for export: here one whose words are numbers.
    words = Tokenizer(models.WordLevel({str(number): number for number in range(vocabulary)}, unk_token="0"))
    content = words.to_str().encode()
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_bytes(content)
    policies = {"bos_id": None, "eos_id": 0, "bos": "never", "special_text": "plain"}
    tokenizer = TokenizerInfo(fingerprint=tokenizer_fingerprint(content, **policies), vocab_size=vocabulary, **policies)
    write_manifest(folder, Manifest(tokenizer=tokenizer, splits={"train": SplitInfo.of(tuple(writer.finish()))}))
    return folder


def packed_words(
    *, config: str, corpus: Path, run: Path, seq_len: int, context_len: int, steps: int, **others: object
) -> list[str]:
    """The words of a `flame-train` that packs documents, one row a rank, and saves nothing.

    `others` are further options, with `__` for the dot.
    """
    options = {
        "job.dump_folder": run,
        "model.config": config,
        "training.dataset": corpus,
        "training.varlen": "true",
        "training.batch_size": 1,
        "training.seq_len": seq_len,
        "training.context_len": context_len,
        "training.steps": steps,
        "checkpoint.enable_checkpoint": "false",
        **{name.replace("__", "."): value for name, value in others.items()},
    }
    return [f"--{name}={value}" for name, value in options.items()]


def train(words: Sequence[str], variables: Mapping[str, str] | None = None, *, command: str = "flame.train") -> str:
    """Run `flame-train` in a fresh process, with `variables` beside the environment's; return its log."""
    return train_watched(words, variables, command=command)[0]


def train_watched(
    words: Sequence[str], variables: Mapping[str, str] | None = None, *, command: str = "flame.train"
) -> tuple[str, float]:
    """The same; returns also the host memory, in GiB, that the largest of its processes had at its peak."""
    path = f"{PROJECT}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **(variables or {})}
    command_words = [sys.executable, "-m", command, *words]
    process = subprocess.Popen(command_words, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process.stderr:
        log = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)  # its own ranks, for which it has waited, are in it
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.stderr.write(log[-3000:])
        raise subprocess.CalledProcessError(process.returncode, command_words, stderr=log)
    return log, usage.ru_maxrss / 2**20


def logged_steps(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def median_of(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The median of what lines tell; None where none of them does."""
    values = [line[name] for line in lines if line[name] is not None]
    return statistics.median(values) if values else None


def first_step_seconds(log: str) -> float | None:
    """Return how long after its start a run had done its first step, as its log tells; None where it does not."""
    found = re.search(r"first step done ([\d.]+) s", log)
    return float(found.group(1)) if found else None
