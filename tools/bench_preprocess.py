"""Whole builds, start-up included, against `datasets.map`: MB of text per CPU second, peak memory, output size.

    python tools/bench_preprocess.py --data FOLDER --tokenizers tok/gpt2 tok/qwen3 [--engines auto hf] [--json]

A small build before each pays the engine's once-only check. `preprocess/<tokenizer>` is the first of --engines, others
stand behind an @; `/alone` is an engine asked by name on the same texts in one process, loading left out. Every build
runs in fresh processes; CPU seconds are those of all its descendants, memory is the largest sum of proportional set
sizes (PSS) over them. The peer, the way of the predecessor, runs beside it unless --no_peer.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

MB = 1e6
SECONDS_BETWEEN_SAMPLES = 0.1
DOCUMENTS_TO_WARM_UP = 4000

_ALONE = """
import sys, time
import pyarrow as pa, pyarrow.parquet as pq
from flame.preprocess.engines import ENGINES, bounded_parts
engine, tokenizer, limit, *files = sys.argv[1:]
encode = ENGINES[engine].load(open(f"{tokenizer}/tokenizer.json", "rb").read(), False)
left, size, seconds = int(limit) or sys.maxsize, 0, 0.0
for file in files:
    for column in pq.ParquetFile(file).iter_batches(1024, columns=["text"], use_threads=False):
        texts = column.column(0).cast(pa.large_string()).slice(0, left)
        left -= len(texts)
        started = time.process_time()
        for part in bounded_parts(texts, ENGINES[engine].batch_bytes):
            encode(part)
        seconds += time.process_time() - started
        size += sum(map(len, texts.cast(pa.large_binary()).to_pylist()))
print(size / 1e6 / seconds)
"""
_PEER = """
import sys
from datasets import load_dataset
from transformers import AutoTokenizer
files, tokenizer_path, output, workers, limit = sys.argv[1].split(","), *sys.argv[2:]
tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
data = load_dataset("parquet", data_files=files, split="train" if limit == "0" else f"train[:{limit}]")
data = data.map(lambda batch: {"input_ids": tokenizer(batch["text"], return_attention_mask=False)["input_ids"]},
                batched=True, num_proc=int(workers), remove_columns=data.column_names)
data.save_to_disk(output, num_proc=int(workers))
"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one command cost."""

    cpu_seconds: float
    wall_seconds: float
    peak_pss_bytes: int
    output_bytes: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure, and the peer's where there is one."""

    name: str
    value: float
    unit: str
    peer: str | None
    peer_value: float | None

    @property
    def ratio(self) -> float | None:
        return None if self.peer_value is None else self.value / self.peer_value


def main() -> None:
    arguments = parse(sys.argv[1:])
    files = sorted(arguments.data.glob("*.parquet"))
    text_bytes = count_text(files, arguments.limit_documents)
    with_peer = arguments.peer and importlib.util.find_spec("datasets") is not None
    rows: list[Row] = []
    for tokenizer in arguments.tokenizers:
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
            peer = None
            if with_peer:
                command = peer_command(arguments, files, tokenizer, Path(folder) / "peer")
                peer = measure(command, Path(folder) / "peer", {"HF_DATASETS_CACHE": f"{folder}/cache"})
            for engine in arguments.engines:
                small, whole = Path(folder) / f"small-{engine}", Path(folder) / engine
                measure(our_command(arguments, engine, tokenizer, small, DOCUMENTS_TO_WARM_UP), small, {})
                command = our_command(arguments, engine, tokenizer, whole, arguments.limit_documents)
                ours = measure(command, whole, {})
                name = tokenizer.name if engine == arguments.engines[0] else f"{tokenizer.name}@{engine}"
                rows += rows_of(name, text_bytes, ours, peer)
                if engine != "auto":
                    speed = alone(arguments, files, engine, tokenizer)
                    unit = "MB of text per CPU second"
                    rows.append(
                        Row(name=f"preprocess/{name}/alone", value=speed, unit=unit, peer=None, peer_value=None)
                    )
    show(rows, as_json=arguments.json)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of parquet files with the column text")
    parser.add_argument("--tokenizers", type=Path, nargs="+", required=True, help="tokenizer folders")
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--limit_documents", type=int, default=0, help="first documents only (0: all)")
    parser.add_argument("--engines", nargs="+", default=["auto"], help="auto, gigatoken, fastokens, hf")
    parser.add_argument("--no_peer", dest="peer", action="store_false", help="do not run datasets.map beside it")
    parser.add_argument("--scratch", type=Path, default=None, help="where output is written, and deleted again")
    parser.add_argument("--json", action="store_true", help="one object a row instead of a table")
    return parser.parse_args(argv)


def count_text(files: Sequence[Path], limit: int) -> int:
    """Return the bytes of the first `limit` texts (0: all)."""
    total = left = 0
    left = limit or sys.maxsize
    for path in files:
        texts = pq.read_table(path, columns=["text"]).column("text").slice(0, left)
        total += pc.sum(pc.binary_length(texts)).as_py() or 0
        left -= len(texts)
    return total


def our_command(
    arguments: argparse.Namespace, engine: str, tokenizer: Path, output: Path, limit_documents: int
) -> list[str]:
    limit = [f"--limit_documents={limit_documents}"] if limit_documents else []
    return [
        *(sys.executable, "-m", "flame.cli.preprocess", "build", f"--dataset={arguments.data}/*.parquet"),
        *(f"--tokenizer={tokenizer}", f"--output={output}", f"--num_workers={arguments.num_workers}"),
        *(f"--engine={engine}", *limit),
    ]


def peer_command(arguments: argparse.Namespace, files: Sequence[Path], tokenizer: Path, output: Path) -> list[str]:
    numbers = [str(arguments.num_workers), str(arguments.limit_documents)]
    return [sys.executable, "-c", _PEER, ",".join(map(str, files)), str(tokenizer), str(output), *numbers]


def alone(arguments: argparse.Namespace, files: Sequence[Path], engine: str, tokenizer: Path) -> float:
    """Return the MB of text per CPU second of an engine by itself."""
    command = [sys.executable, "-c", _ALONE, engine, str(tokenizer), str(arguments.limit_documents), *map(str, files)]
    threads = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    return float(subprocess.run(command, env=os.environ | threads, check=True, capture_output=True, text=True).stdout)


def measure(command: Sequence[str], output: Path, environment: dict[str, str]) -> Measured:
    """Run a command to its end and return what it and its descendants cost."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=os.environ | environment, stdout=said, stderr=said)
        with watching_memory(process.pid) as peak:
            code = process.wait()
        if code != 0:
            said.seek(0)
            raise SystemExit(f"{' '.join(command[:6])} … exited with {code}:\n{said.read()[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Measured(
        cpu_seconds=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        wall_seconds=time.monotonic() - started,
        peak_pss_bytes=peak[0],
        output_bytes=sum(path.stat().st_size for path in output.rglob("*") if path.is_file()),
    )


@contextlib.contextmanager
def watching_memory(root: int) -> Iterator[list[int]]:
    """Sample the PSS of `root` and its descendants from a thread; yields a list that holds the largest sum."""
    peak = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(SECONDS_BETWEEN_SAMPLES):
            peak[0] = max(peak[0], sum(map(pss_bytes, [root, *descendants(root)])))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def pss_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0


def rows_of(name: str, text_bytes: int, ours: Measured, peer: Measured | None) -> list[Row]:
    def row(suffix: str, unit: str, value: float, peer_value: float | None) -> Row:
        label = None if peer is None else "datasets.map"
        return Row(name=f"preprocess/{name}{suffix}", value=value, unit=unit, peer=label, peer_value=peer_value)

    return [
        row(
            "",
            "MB of text per CPU second",
            text_bytes / MB / ours.cpu_seconds,
            None if peer is None else text_bytes / MB / peer.cpu_seconds,
        ),
        row("/cpu", "CPU seconds", ours.cpu_seconds, None if peer is None else peer.cpu_seconds),
        row("/wall", "seconds", ours.wall_seconds, None if peer is None else peer.wall_seconds),
        row("/memory", "MB of peak PSS", ours.peak_pss_bytes / MB, None if peer is None else peer.peak_pss_bytes / MB),
        row("/output", "MB", ours.output_bytes / MB, None if peer is None else peer.output_bytes / MB),
    ]


def show(rows: Sequence[Row], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps({**vars(row), "ratio": row.ratio}))
        return
    width = min(shutil.get_terminal_size().columns, 34)
    print(f"{'':{width}} {'ours':>10} {'peer':>10} {'ratio':>8}  unit")
    for row in rows:
        peer = f"{row.peer_value:10.2f} {row.ratio:8.2f}" if row.peer_value is not None else f"{'–':>10} {'–':>8}"
        print(f"{row.name:{width}} {row.value:10.2f} {peer}  {row.unit}")


if __name__ == "__main__":
    main()
