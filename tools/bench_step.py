"""How fast a whole training step is on this GPU: `flame-train` itself, on packed documents of web-like lengths.

    python tools/bench_step.py                      # 340M transformer, 65,536 packed tokens a step, eager and compiled
    python tools/bench_step.py --config configs/gla_374M.json --steps 30 --json

Each row is a run in a fresh process. Reported: the median of the later half of the logged steps, the device's peak
memory, and the seconds from the process's start to the end of its first step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from flame.shards.fingerprint import tokenizer_fingerprint  # noqa: E402
from flame.shards.manifest import Manifest, SplitInfo, TokenizerInfo, write_manifest  # noqa: E402
from flame.shards.writer import SplitWriter  # noqa: E402

VOCABULARY = 32_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(PROJECT / "configs" / "transformer_374M.json"))
    parser.add_argument("--seq_len", type=int, default=65_536)
    parser.add_argument("--context_len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--modes", default="eager,compiled")
    parser.add_argument("--options", default="", help="more options of flame-train, as one text")
    parser.add_argument("--json", action="store_true", help="one object a row")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        corpus = make_corpus(Path(scratch, "corpus"), num_tokens=options.seq_len * (options.steps + 2))
        rows = [measure(options, corpus, Path(scratch, mode), mode) for mode in options.modes.split(",")]
    if options.json:
        for row in rows:
            print(json.dumps(row))
        return
    print(f"{'mode':<10}{'tokens/s':>12}{'mfu %':>8}{'peak GiB':>10}{'step s':>9}{'first step s':>14}{'loss':>9}")
    for row in rows:
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1f}"
        print(
            f"{row['mode']:<10}{row['value']:>12,.0f}{mfu:>8}{row['peak_gib']:>10.1f}"
            f"{row['step_seconds']:>9.3f}{row['start_seconds']:>14.1f}{row['loss']:>9.4f}"
        )


def make_corpus(folder: Path, *, num_tokens: int) -> Path:
    """Write random documents whose lengths are log-normal with a mean of about 1,100 tokens, as on the web."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.5, 1.0, num_tokens // 500), 16, 50_000).astype(np.int64)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), num_tokens)) + 1]
    tokens = rng.integers(1, VOCABULARY, int(lengths.sum()), dtype=np.uint32)
    tokens[np.cumsum(lengths) - 1] = 0
    writer = SplitWriter(folder, "train", task=0, shard_tokens=1 << 28, docs_schema=None)
    writer.append(tokens, lengths, num_bytes=lengths * 4)
    # A run keeps its tokenizer for export: here one whose words are numbers.
    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    content = words.to_str().encode()
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_bytes(content)
    policies = {"bos_id": None, "eos_id": 0, "bos": "never", "special_text": "plain"}
    tokenizer = TokenizerInfo(fingerprint=tokenizer_fingerprint(content, **policies), vocab_size=VOCABULARY, **policies)
    write_manifest(folder, Manifest(tokenizer=tokenizer, splits={"train": SplitInfo.of(tuple(writer.finish()))}))
    return folder


def train(words: Sequence[str], variables: Mapping[str, str] | None = None, *, command: str = "flame.train") -> str:
    """Run `flame-train` in a fresh process, with `variables` beside the environment's; return its log."""
    path = f"{PROJECT}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **(variables or {})}
    result = subprocess.run([sys.executable, "-m", command, *words], env=environment, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(result.stderr[-3000:] if result.returncode else "")
    result.check_returncode()
    return result.stderr


def measure(options: argparse.Namespace, corpus: Path, run: Path, mode: str) -> dict[str, object]:
    """Run `flame-train` once and return its row."""
    argv = {
        "job.dump_folder": run,
        "model.config": options.config,
        "training.dataset": corpus,
        "training.varlen": "true",
        "training.batch_size": 1,
        "training.seq_len": options.seq_len,
        "training.context_len": options.context_len,
        "training.steps": options.steps,
        "training.compile": str(mode == "compiled").lower(),
        "lr_scheduler.warmup_steps": 10,
        "metrics.log_freq": 1,
        "checkpoint.enable_checkpoint": "false",
    }
    words = [*(f"--{name}={value}" for name, value in argv.items()), *options.options.split()]
    began = time.monotonic()
    log = train(words)
    seconds = time.monotonic() - began
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    later = lines[len(lines) // 2 :]

    def median(name: str) -> float | None:
        values = [line[name] for line in later if line[name] is not None]
        return statistics.median(values) if values else None

    started = re.search(r"first step done ([\d.]+) s", log)
    return {
        "name": f"step/{Path(options.config).stem}/{mode}",
        "mode": mode,
        "value": median("throughput(tps)"),
        "unit": "tokens/s",
        "mfu": median("mfu(%)"),
        "peak_gib": max(line["memory/max_active(GiB)"] or 0.0 for line in lines),
        "step_seconds": median("time_metrics/end_to_end(s)"),
        "data_loading_percent": median("time_metrics/data_loading(%)"),
        "start_seconds": float(started.group(1)) if started else None,
        "loss": lines[-1]["loss_metrics/global_avg_loss"],
        "process_seconds": seconds,
    }


if __name__ == "__main__":
    main()
