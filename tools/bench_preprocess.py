"""Whole builds, start-up included, against `datasets.map` and datatrove: MB of text per CPU second, memory, output.

    python tools/bench_preprocess.py [--data FOLDER] [--tokenizers tok/gpt2 tok/qwen3] [--engines auto hf] [--json]

`preprocess/<tokenizer>` is the first of --engines, others stand behind an @. The build of the first file that comes
before each pays the engine's once-only check and is `/first_file`; `/past_start` is what the whole build has more of
text, for what it has more of CPU seconds. `/alone` is an engine asked by name on the same texts in one process,
loading left out. Every build runs in fresh processes; CPU seconds are those of all its descendants, memory is the
largest sum of proportional set sizes (PSS) over them. The peers run beside it unless --no_peer: each has rows of its
own, and the best of them is the peer of ours.

    python tools/bench_preprocess.py --sizes 17 50 100 170 --workers 1 2 4 [--tokenizers tok/gpt2]

gives the cost against input size and against workers instead: `preprocess/<tokenizer>/<MB>MB/<workers>w`, each build of
the first so many MB of text of the same files, which are written anew for it.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

MB = 1e6
FASTEST = "gigatoken"  # what auto takes, but not before it is checked for so little input
SPEED = "MB of text per CPU second"
SECONDS_BETWEEN_SAMPLES = 0.1

_ALONE = """
import sys, time
import pyarrow as pa, pyarrow.parquet as pq
from flame.preprocess.engines import ENGINES, bounded_parts
engine, tokenizer, *files = sys.argv[1:]
encode = ENGINES[engine].load(open(f"{tokenizer}/tokenizer.json", "rb").read(), False)
size, seconds = 0, 0.0
for file in files:
    for column in pq.ParquetFile(file).iter_batches(1024, columns=["text"], use_threads=False):
        texts = column.column(0).cast(pa.large_string())
        started = time.process_time()
        for part in bounded_parts(texts, ENGINES[engine].batch_bytes):
            encode(part)
        seconds += time.process_time() - started
        size += sum(map(len, texts.cast(pa.large_binary()).to_pylist()))
print(size / 1e6 / seconds)
"""
_DATASETS_MAP = """
import sys
from datasets import load_dataset
from transformers import AutoTokenizer
tokenizer_path, output, workers, *files = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
data = load_dataset("parquet", data_files=files, split="train")
data = data.map(lambda batch: {"input_ids": tokenizer(batch["text"], return_attention_mask=False)["input_ids"]},
                batched=True, num_proc=int(workers), remove_columns=data.column_names)
data.save_to_disk(output, num_proc=int(workers))
"""
_DATATROVE = """
import os, sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens import DocumentTokenizer
if __name__ == "__main__":
    tokenizer_path, output, workers, *files = sys.argv[1:]
    with open(output + ".paths", "w") as paths:
        paths.write("\\n".join(files))
    LocalPipelineExecutor(
        [ParquetReader("/", paths_file=output + ".paths", text_key="text", id_key="id"),
         DocumentTokenizer(output, tokenizer_name_or_path=os.path.join(tokenizer_path, "tokenizer.json"),
                           eos_token=None, shuffle_documents=False)],
        tasks=int(workers), workers=int(workers), logging_dir=output + ".logs", start_method="fork",
    ).run()
"""
PEERS = {"datasets.map": ("datasets", _DATASETS_MAP), "datatrove": ("datatrove", _DATATROVE)}
"""What others do with the same files: the package that it needs, and the program."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one command cost."""

    cpu_seconds: float
    wall_seconds: float
    peak_pss_bytes: int
    output_bytes: int

    def speed(self, text_bytes: int) -> float:
        """MB of text per CPU second."""
        return text_bytes / MB / self.cpu_seconds


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
    if arguments.sizes:
        show(rows_of_scale(arguments, files), as_json=arguments.json)
        return
    text_bytes, first_bytes = count_text(files), count_text(files[:1])
    rows: list[Row] = []
    for tokenizer in arguments.tokenizers:
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
            folder = Path(scratch)
            peers = measure_peers(arguments, files, tokenizer, folder) if arguments.peer else {}
            for engine in arguments.engines:
                first, whole = folder / f"first-{engine}", folder / engine
                for asked in (FASTEST if engine == "auto" else engine, engine):  # the first pays what is paid once
                    shutil.rmtree(first, ignore_errors=True)
                    start = measure(our_command(arguments, asked, tokenizer, first, files[0]), first, {})
                command = our_command(arguments, engine, tokenizer, whole, f"{arguments.data}/*.parquet")
                ours = measure(command, whole, {})
                name = tokenizer.name if engine == arguments.engines[0] else f"{tokenizer.name}@{engine}"
                rows += rows_of(name, text_bytes, ours, peers)
                rows += rows_of_start(name, first_bytes, start, text_bytes, ours)
                if engine != "auto":
                    rows.append(row(f"{name}/alone", SPEED, alone(files, engine, tokenizer)))
            rows += [row(f"{tokenizer.name}/{name}", SPEED, peer.speed(text_bytes)) for name, peer in peers.items()]
    show(rows, as_json=arguments.json)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    real = Path(os.environ.get("FLAME_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data"))
    data = next((real / name for name in ("web_large", "web_sample") if (real / name).is_dir()), None)
    tokenizers = sorted(path.parent for path in real.glob("tokenizers/*/tokenizer.json"))
    parser.add_argument(
        "--data", type=Path, default=data, required=data is None, help="folder of parquet files with a column text"
    )
    parser.add_argument(
        "--tokenizers", type=Path, nargs="+", default=tokenizers, required=not tokenizers, help="tokenizer folders"
    )
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--engines", nargs="+", default=["auto"], help="auto, gigatoken, fastokens, hf")
    parser.add_argument("--sizes", type=float, nargs="+", default=(), help="MB of text: cost against input size")
    parser.add_argument("--workers", type=int, nargs="+", default=(2,), help="with --sizes: cost against workers")
    parser.add_argument("--no_peer", dest="peer", action="store_false", help="do not run others beside it")
    parser.add_argument("--scratch", type=Path, default=None, help="where output is written, and deleted again")
    parser.add_argument("--json", action="store_true", help="one object a row instead of a table")
    return parser.parse_args(argv)


def count_text(files: Sequence[Path]) -> int:
    """Return the bytes of all texts."""
    columns = (pq.read_table(path, columns=["text"]).column("text") for path in files)
    return sum(pc.sum(pc.binary_length(texts)).as_py() or 0 for texts in columns)


def rows_of_scale(arguments: argparse.Namespace, files: Sequence[Path]) -> list[Row]:
    """Return what builds of growing inputs cost, with each number of workers."""
    rows = []
    for tokenizer in arguments.tokenizers:
        with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
            output = Path(scratch) / "out"
            paid = our_command(arguments, FASTEST, tokenizer, output, files[0])
            measure(paid, output, {})  # what is paid once
            for size in arguments.sizes:
                data = Path(scratch) / f"{size:g}.parquet"
                text_bytes = write_first(files, data, int(size * MB))
                for workers in arguments.workers:
                    shutil.rmtree(output)
                    command = our_command(arguments, FASTEST, tokenizer, output, data, workers)
                    cost = measure(command, output, {})
                    name = f"{tokenizer.name}/{text_bytes / MB:.0f}MB/{workers}w"
                    rows.append(row(name, SPEED, cost.speed(text_bytes)))
                    rows.append(row(f"{name}/cpu", "CPU seconds", cost.cpu_seconds))
                    rows.append(row(f"{name}/wall", "seconds", cost.wall_seconds))
                    rows.append(row(f"{name}/memory", "MB of peak PSS", cost.peak_pss_bytes / MB))
    return rows


def write_first(files: Sequence[Path], path: Path, size_bytes: int) -> int:
    """Write the first documents of `files` that hold `size_bytes` of text, or all of them; return their bytes."""
    texts = pa.concat_tables([pq.read_table(file, columns=["text"]) for file in files])
    ends = np.cumsum(pc.binary_length(texts.column("text")).to_numpy())
    count = min(int(np.searchsorted(ends, size_bytes)) + 1, len(ends))
    pq.write_table(texts.slice(0, count), path, row_group_size=1000, compression="zstd")
    return int(ends[count - 1])


def our_command(
    arguments: argparse.Namespace,
    engine: str,
    tokenizer: Path,
    output: Path,
    dataset: str | Path,
    num_workers: int | None = None,
) -> list[str]:
    return [
        *(sys.executable, "-m", "flame.cli.preprocess", "build", f"--dataset={dataset}"),
        *(f"--tokenizer={tokenizer}", f"--output={output}", f"--num_workers={num_workers or arguments.num_workers}"),
        f"--engine={engine}",
    ]


def measure_peers(
    arguments: argparse.Namespace, files: Sequence[Path], tokenizer: Path, folder: Path
) -> dict[str, Measured]:
    """Run every peer that is installed."""
    measured = {}
    for name, (package, program) in PEERS.items():
        if importlib.util.find_spec(package) is None:
            print(f"{name} is not installed: left out", file=sys.stderr)
            continue
        output = folder / name
        paths = [str(path.resolve()) for path in files]
        command = [sys.executable, "-c", program, str(tokenizer), str(output), str(arguments.num_workers), *paths]
        measured[name] = measure(command, output, {"HF_DATASETS_CACHE": f"{folder}/cache"})
    return measured


def alone(files: Sequence[Path], engine: str, tokenizer: Path) -> float:
    """Return the MB of text per CPU second of an engine by itself."""
    command = [sys.executable, "-c", _ALONE, engine, str(tokenizer), *map(str, files)]
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


def row(name: str, unit: str, value: float, peer: str | None = None, peer_value: float | None = None) -> Row:
    return Row(name=f"preprocess/{name}", value=value, unit=unit, peer=peer, peer_value=peer_value)


def rows_of(name: str, text_bytes: int, ours: Measured, peers: Mapping[str, Measured]) -> list[Row]:
    """Return what a whole build costs, beside the peer that takes the fewest CPU seconds."""
    best = min(peers, key=lambda peer: peers[peer].cpu_seconds, default=None)
    figures: list[tuple[str, str, Callable[[Measured], float]]] = [
        ("", SPEED, lambda cost: cost.speed(text_bytes)),
        ("/cpu", "CPU seconds", lambda cost: cost.cpu_seconds),
        ("/wall", "seconds", lambda cost: cost.wall_seconds),
        ("/memory", "MB of peak PSS", lambda cost: cost.peak_pss_bytes / MB),
        ("/output", "MB", lambda cost: cost.output_bytes / MB),
    ]
    return [
        row(name + suffix, unit, figure(ours), best, None if best is None else figure(peers[best]))
        for suffix, unit, figure in figures
    ]


def rows_of_start(name: str, first_bytes: int, first: Measured, text_bytes: int, whole: Measured) -> list[Row]:
    """Return what the build of the first file costs, and the speed of what the whole build did beyond it."""
    rows = [row(f"{name}/first_file", "CPU seconds", first.cpu_seconds)]
    if text_bytes > first_bytes and whole.cpu_seconds > first.cpu_seconds:
        speed = (text_bytes - first_bytes) / MB / (whole.cpu_seconds - first.cpu_seconds)
        rows.append(row(f"{name}/past_start", SPEED, speed))
    return rows


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
