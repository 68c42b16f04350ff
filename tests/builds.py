"""Builds of small corpora for tests, in this process or in fresh ones, and what came out of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from flame.preprocess.build import build
from flame.preprocess.config import BuildOptions
from flame.preprocess.executors import EXECUTORS
from flame.preprocess.plan import Task
from flame.preprocess.reports import Progress
from flame.preprocess.workers import Loaded, Request, Settings
from flame.shards.manifest import Manifest, read_manifest
from flame.shards.reader import Corpus

PROJECT = Path(__file__).resolve().parent.parent


@dataclass
class InlineExecutor:
    """Runs the tasks in this process, last one first: their order may not matter."""

    request: Request
    num_workers: int | None
    tool: Any = None

    def __enter__(self) -> InlineExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def wait_until_loaded(self) -> Loaded:
        self.tool, loaded = self.request.load()
        return loaded

    def run(
        self,
        tasks: Sequence[Task],
        settings: Settings,
        *,
        lock: Path,
        report: Callable[[Progress], None],
        shared: bool = False,
    ) -> None:
        for task in reversed(tasks):
            assert settings.run(task, self.tool, report)


def build_here(dataset: Path | str | Sequence[Path | str], output: Path, tokenizer: Path, **options: Any) -> Manifest:
    """Build in this process without workers, and return the manifest."""
    names = (dataset,) if isinstance(dataset, (str, Path)) else dataset
    processes = EXECUTORS["local"]
    EXECUTORS["local"] = InlineExecutor  # type: ignore[assignment]
    try:
        chosen = BuildOptions(dataset=tuple(map(str, names)), tokenizer=tokenizer, output=output, **options)
        assert build(chosen) == 0
    finally:
        EXECUTORS["local"] = processes
    return read_manifest(output)


def command(dataset: Path | str, output: Path, tokenizer: Path, **options: Any) -> list[str]:
    """The command line of a build."""
    chosen = {"dataset": dataset, "output": output, "tokenizer": tokenizer, "num_workers": 2, **options}
    words = [f"--{name}={value}" for name, value in chosen.items()]
    return [sys.executable, "-m", "flame.cli.preprocess", "build", *words]


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(PROJECT)} | changes


def run_build(
    dataset: Path | str, output: Path, tokenizer: Path, *, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a build as a user does, in processes of its own."""
    return run_command(command(dataset, output, tokenizer, **options), env=env)


def run_command(words: Sequence[str | Path], *, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and keep what it said."""
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=env or environment())


def files_of(corpus: Path) -> dict[str, bytes]:
    """The bytes of every tokens and ends file, by path within the corpus."""
    return {str(path.relative_to(corpus)): path.read_bytes() for path in sorted(corpus.glob("*/*.npy"))}


def rows_of(corpus: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of every docs.parquet, by path within the corpus."""
    return {
        str(path.relative_to(corpus)): pq.read_table(path).to_pylist()
        for path in sorted(corpus.glob("*/*.docs.parquet"))
    }


def same_corpus(one: Path, other: Path) -> bool:
    """Whether two corpora are alike to the last byte of tokens and ends, the last row, and in their fingerprint."""
    fingerprints = [json.loads((corpus / "manifest.json").read_bytes())["fingerprint"] for corpus in (one, other)]
    return files_of(one) == files_of(other) and rows_of(one) == rows_of(other) and len(set(fingerprints)) == 1


def documents_of(corpus: Path, split: str = "train") -> list[list[int]]:
    """The token lists of a split's documents, in order, EOS included."""
    found = Corpus.open(corpus).split(split)
    tokens = found.read(0, found.num_tokens)
    ends = found.ends_between(0, found.num_tokens)
    return [part.tolist() for part in np.split(tokens, ends[:-1])] if len(ends) else []


def texts_of(corpus: Path, split: str = "train") -> list[str]:
    """The texts of a split's documents, decoded without their EOS."""
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer" / "tokenizer.json"))
    return [tokenizer.decode(ids[:-1], skip_special_tokens=False) for ids in documents_of(corpus, split)]


def write_jsonl(path: Path, texts: Sequence[Any], *, end: str = "\n") -> Path:
    """Write one object `{"text": …}` a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(json.dumps({"text": text}) + end for text in texts).encode())
    return path


def write_parts(folder: Path, num_parts: int, num_texts: int) -> None:
    """Write `part-N` files of texts of their own, jsonl and parquet in turn."""
    for part in range(num_parts):
        write = write_parquet if part % 2 else write_jsonl
        ending = "parquet" if part % 2 else "jsonl"
        write(folder / f"part-{part}.{ending}", some_texts(num_texts, seed=part, longest=150))


def write_parquet(path: Path, texts: Sequence[Any], *, rows_a_group: int = 100, **columns: Any) -> Path:
    """Write a parquet file with the column `text` and others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": pa.array(texts, pa.string()), **columns}), path, row_group_size=rows_a_group)
    return path


def some_texts(count: int, *, seed: int = 0, longest: int = 60) -> list[str]:
    """Distinct texts of a few words."""
    rng = np.random.default_rng(seed)
    words = ["quick", "brown", "fox", "shard", "corpus", "naïve", "日本語", "fin.", "def", "42", "\n", "—"]
    lengths = rng.integers(1, longest, count)
    return [f"{seed}-{i} " + " ".join(rng.choice(words, length)) for i, length in enumerate(lengths)]
