"""What planning, finishing and sealing a huge build costs: files, tasks and receipts are made up, no text is read.

    python tools/bench_plan.py                          100,000 parquet files, 60 TB of text: some 15·10^12 tokens
    python tools/bench_plan.py --files 1000 --terabytes 0.6 --json

Each line is measured in this process, in seconds of its CPU; memory is the highest that was resident until then. Shards
are files without content that are as long as real ones (they take no room), one a task.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from flame.files import TEMPORARY_SUFFIX
from flame.preprocess.folder import PIECES, PLAN, TASKS, read_receipts, receipt_path, remove_strays
from flame.preprocess.plan import InputFile, plan_tasks
from flame.preprocess.plan_file import Plan, input_entry, read_plan, read_tasks, write_pieces, write_plan
from flame.preprocess.ranges import TaskRange
from flame.preprocess.readers.columns import Columns
from flame.preprocess.records import with_checksum
from flame.preprocess.seal import seal
from flame.shards.format import HEADER_BYTES, MANIFEST, ends_path, shard_name, tokens_path
from flame.shards.manifest import TokenizerInfo, read_manifest

T = TypeVar("T")

BYTES_A_TOKEN = 4
BYTES_A_GROUP = 2**26
SHARD_TOKENS = 2**28
RANGES = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--terabytes", type=float, default=60.0, help="text in all, in 10^12 bytes")
    parser.add_argument("--json", action="store_true", help="one object a row")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as folder:
        for name, value, unit in rows(Path(folder), options.files, int(options.terabytes * 1e12)):
            row = {
                "name": name,
                "value": round(value, 3),
                "unit": unit,
                "peer": None,
                "peer_value": None,
                "ratio": None,
            }
            print(json.dumps(row) if options.json else f"{name:<44} {value:>14,.2f} {unit}", flush=True)
    return 0


def rows(corpus: Path, num_files: int, text_bytes: int) -> Iterator[tuple[str, float, str]]:
    """Yield (what, how much, unit), as they are measured."""
    yield "files", num_files, ""
    yield "tokens", text_bytes / BYTES_A_TOKEN / 1e12, "T"
    seconds, plan = make_plan(num_files, text_bytes)
    yield "cut into pieces and tasks", seconds, "CPU s"
    yield "pieces", sum(len(task.pieces) for task in plan.tasks), ""
    yield "tasks", plan.num_tasks, ""
    yield "memory of the planner", memory_mb(), "MB"
    seconds, pieces = timed(lambda: write_pieces(corpus, plan))
    yield "write the pieces for array jobs", seconds, "CPU s"
    yield "pieces.parquet", size_mb(corpus / PIECES), "MB"
    planned = dataclasses.replace(plan, pieces=pieces)
    yield "write plan.json", timed(lambda: write_plan(corpus, planned))[0], "CPU s"
    yield "plan.json", size_mb(corpus / PLAN), "MB"

    def read_share() -> Plan:
        found = read_plan(corpus)
        assert found is not None
        share = TaskRange(index=RANGES // 2, count=RANGES).tasks(found.num_tasks)
        assert len(read_tasks(corpus, found, share)) == len(share)
        return found

    seconds, plan = timed(read_share)
    yield f"read the plan, and one of {RANGES} shares", seconds, "CPU s"
    seconds, _ = timed(lambda: make_receipts(corpus, plan))
    yield "(make up receipts and shards)", seconds, "CPU s"
    seconds, receipts = timed(lambda: read_receipts(corpus, plan.digest))
    assert len(receipts) == plan.num_tasks
    yield "read all receipts, as a continued build does", seconds, "CPU s"
    yield "receipts", sum(path.stat().st_size for path in (corpus / TASKS).iterdir()) / 1e6, "MB"
    yield "sweep what no receipt names", timed(lambda: remove_strays(corpus, receipts.values()))[0], "CPU s"
    yield "seal", timed(lambda: seal_all(corpus, receipts))[0], "CPU s"
    yield "manifest.json", size_mb(corpus / MANIFEST), "MB"
    yield "open the manifest, as a training run does", timed(lambda: read_manifest(corpus))[0], "CPU s"
    yield "memory, highest", memory_mb(), "MB"
    assert not list(corpus.rglob(f"*{TEMPORARY_SUFFIX}"))


def make_plan(num_files: int, text_bytes: int) -> tuple[float, Plan]:
    """Return how long cutting took, and the plan."""
    files = make_files(num_files, text_bytes)
    seconds, tasks = timed(lambda: plan_tasks(files, shard_tokens=SHARD_TOKENS, shuffle_seed=42))
    return seconds, Plan(
        options={"shard_tokens": SHARD_TOKENS},
        inputs=[input_entry(file) for file in files],
        on_error="fail",
        columns=Columns(text="text", kept=pa.schema([])),
        tasks=tasks,
        num_tasks=len(tasks),
    )


def make_files(num_files: int, text_bytes: int) -> list[InputFile]:
    """Parquet files of sizes around the mean, in row groups of 64 MiB."""
    mean = text_bytes // num_files
    files = []
    for index in range(num_files):
        size = mean // 2 + (index * 2654435761 % 2**32) * mean // 2**32  # from half the mean to one and a half
        groups = max(size // BYTES_A_GROUP, 1)
        files.append(
            InputFile(
                path=f"s3://bucket/crawl/CC-{index // 1000:04d}/part-{index:06d}.parquet",
                format="parquet",
                compression=None,
                size_bytes=size * 2 // 5,
                mtime_ns=1_700_000_000_000_000_000 + index,
                groups=((20_000, size // groups),) * groups,
                etag=f'"{index:032x}"',
            )
        )
    return files


def make_receipts(corpus: Path, plan: Plan) -> None:
    """Write a receipt and a shard of each task, without the care for power cuts that a build takes."""
    (corpus / TASKS).mkdir()
    (corpus / "train").mkdir()
    for task in range(plan.num_tasks):
        shard = {
            "name": shard_name(task, 0),
            "num_tokens": 268_435_456,
            "num_documents": 350_000,
            "num_bytes": 1_073_741_824,
            "max_token_id": 50_256,
            "tokens_checksum": f"xxh3:{task:032x}",
            "ends_checksum": f"xxh3:{task:032x}",
        }
        receipt = {
            "task": task,
            "plan": plan.digest,
            "engine": "gigatoken",
            "redone": None,
            "rejects": {"empty": 3},
            "errors": 0,
            "repaired": {},
            "splits": {"train": [shard]},
            "val_docs": [],
        }
        receipt_path(corpus, task).write_text(json.dumps(with_checksum(receipt), indent=2))
        for path, num_bytes in ((tokens_path, 4 * 268_435_456), (ends_path, 8 * 350_000)):
            with open(path(corpus, "train", shard_name(task, 0)), "wb") as file:
                file.truncate(HEADER_BYTES + num_bytes)


def seal_all(corpus: Path, receipts: dict[int, dict[str, Any]]) -> None:
    tokenizer = TokenizerInfo(
        fingerprint="sha256:" + 64 * "0",
        vocab_size=50_257,
        bos_id=None,
        eos_id=50_256,
        bos="never",
        special_text="plain",
    )
    seal(
        corpus,
        receipts,
        tokenizer=tokenizer,
        held_out=False,
        shard_tokens=SHARD_TOKENS,
        docs_schema=None,
        engine={"name": "gigatoken", "version": "0", "redone_tasks": 0},
        options={},
        inputs={"num_files": 0, "num_bytes": 0, "digest": ""},
    )


def timed(function: Callable[[], T]) -> tuple[float, T]:
    """Return how long this process computed, whatever else the machine did, and the result."""
    started = time.process_time()
    value = function()
    return time.process_time() - started, value


def memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def size_mb(path: Path) -> float:
    return path.stat().st_size / 1e6


if __name__ == "__main__":
    sys.exit(main())
