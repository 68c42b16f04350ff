"""How fast a whole training step is on this GPU: `flame-train` itself, on packed documents of web-like lengths.

    python tools/bench_step.py                      # 340M transformer, 65,536 packed tokens a step, eager and compiled
    python tools/bench_step.py --config configs/gla_374M.json --steps 30 --json

Each row is a run in a fresh process. Reported: the median of the later half of the logged steps, the device's peak
memory, the seconds from the process's start to the end of its first step, and the share of a step that waited for data.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from bench_runs import PROJECT, first_step_seconds, logged_steps, make_corpus, median_of, packed_words, train


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
    titles = {"mode": "<10", "tokens/s": ">12", "mfu %": ">8", "peak GiB": ">10", "step s": ">9"}
    titles |= {"first step s": ">14", "data %": ">8", "loss": ">9"}
    print("".join(format(title, width) for title, width in titles.items()))
    for row in rows:
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1f}"
        print(
            f"{row['mode']:<10}{row['value']:>12,.0f}{mfu:>8}{row['peak_gib']:>10.1f}"
            f"{row['step_seconds']:>9.3f}{row['start_seconds']:>14.1f}"
            f"{row['data_loading_percent']:>8.2f}{row['loss']:>9.4f}"
        )


def measure(options: argparse.Namespace, corpus: Path, run: Path, mode: str) -> dict[str, object]:
    """Run `flame-train` once and return its row."""
    words = packed_words(
        config=options.config,
        corpus=corpus,
        run=run,
        seq_len=options.seq_len,
        context_len=options.context_len,
        steps=options.steps,
        training__compile=str(mode == "compiled").lower(),
        lr_scheduler__warmup_steps=10,
        metrics__log_freq=1,
    )
    began = time.monotonic()
    log = train([*words, *options.options.split()])
    seconds = time.monotonic() - began
    lines = logged_steps(run)
    later = lines[len(lines) // 2 :]
    return {
        "name": f"step/{Path(options.config).stem}/{mode}",
        "mode": mode,
        "value": median_of(later, "throughput(tps)"),
        "unit": "tokens/s",
        "mfu": median_of(later, "mfu(%)"),
        "peak_gib": max(line["memory/max_active(GiB)"] or 0.0 for line in lines),
        "step_seconds": median_of(later, "time_metrics/end_to_end(s)"),
        "data_loading_percent": median_of(later, "time_metrics/data_loading(%)"),
        "start_seconds": first_step_seconds(log),
        "loss": lines[-1]["loss_metrics/global_avg_loss"],
        "process_seconds": seconds,
    }


if __name__ == "__main__":
    main()
