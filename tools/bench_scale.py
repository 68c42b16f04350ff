"""How speed grows with the number of GPUs of one host: weak scaling of `flame-train`, a row of tokens a GPU.

    python tools/bench_scale.py                     # both models, at 1, 2, 4 and 8 GPUs (those that there are)
    python tools/bench_scale.py --ranks 1,8 --layouts fsdp --config configs/gla_374M.json --json
    python tools/bench_scale.py --device cpu --config tiny.json --seq_len 512 --context_len 128 --steps 8 --ranks 1,2

Layouts: `fsdp` shards over all ranks, `ddp` over none, `hsdp` over half of them (from 4 ranks on), and `4x2` over 4
with 2 replicas. Each row is a `flame-train` of its own, on packed documents of web-like lengths, 65,536 tokens a rank.
Speed and MFU: medians of the later half of the measured steps. Then four steps more run under the profiler, and the
last one's traces tell how long collectives took, as a share of the step: all of it, what no other kernel hid
("exposed"), as means over the ranks, and the exposed share of the rank that waits least for others. Efficiency is
against the one-rank run of the same model in this call. Memory is that of rank 0's device, on a CPU that of the largest
process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_runs import (
    PROJECT,
    VOCABULARY,
    logged_steps,
    make_corpus,
    median_of,
    packed_words,
    train_watched,
)
from trace_overlap import read_overlap

CONFIGS = [str(PROJECT / "configs" / name) for name in ("transformer_374M.json", "transformer_1.4B.json")]
LAYOUTS = ("fsdp", "hsdp", "ddp")
RANKS = (1, 2, 4, 8)
PROFILED_STEPS = 4  # three that warm the profiler up, and the one that is traced
COLUMNS = {  # of a row: title, width, format
    "layout": ("layout", 8, ""),
    "ranks": ("ranks", 7, ""),
    "value": ("tokens/s a device", 19, ",.0f"),
    "ratio": ("efficiency", 12, ".3f"),
    "mfu": ("mfu %", 8, ".1f"),
    "communication_percent": ("comm %", 8, ".1f"),
    "exposed_percent": ("exposed %", 11, ".1f"),
    "exposed_least_percent": ("least %", 9, ".1f"),
    "peak_gib": ("peak GiB", 10, ".2f"),
    "step_seconds": ("step s", 9, ".3f"),
}


def main() -> None:
    options = parse()
    ranks = ranks_here(options)
    for config in options.config:
        rows = measure_model(options, config, ranks)
        if options.json:
            for row in rows:
                print(json.dumps(row), flush=True)
        else:
            print_table(config, rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="+", default=CONFIGS)
    parser.add_argument("--ranks", help=f"as 1,2,4; those of {RANKS} that there are devices for, if absent")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="as fsdp,4x2,ddp (shards x replicas)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seq_len", type=int, default=65_536, help="tokens a rank and step")
    parser.add_argument("--context_len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=24, help="measured steps, before those under the profiler")
    parser.add_argument("--mode", choices=("compiled", "eager"), help="compiled on GPUs, eager on a CPU, if absent")
    parser.add_argument("--options", default="", help="more options of flame-train, as one text")
    parser.add_argument("--json", action="store_true", help="one object a row")
    return parser.parse_args()


def ranks_here(options: argparse.Namespace) -> list[int]:
    """Return how many ranks to run with, in order: one always, as all others are measured against it."""
    devices = os.cpu_count() or 1
    if options.device == "cuda":
        import torch

        devices = torch.cuda.device_count()
    if options.ranks is None:
        asked = [ranks for ranks in RANKS if ranks <= devices]
        print(f"{devices} devices: {asked} ranks", file=sys.stderr)
    else:
        asked = [int(text) for text in options.ranks.split(",")]
    if options.device == "cuda" and max(asked, default=1) > devices:
        sys.exit(f"there are {devices} GPUs for {max(asked)} ranks; --device cpu needs none")
    return sorted({1, *asked})


def layout_at(name: str, ranks: int) -> tuple[int, int] | None:
    """Return (replicas, shards) of a layout on so many ranks; None where it needs others, or is another's double."""
    if name == "fsdp":
        return 1, ranks
    if name == "ddp":
        return ranks, 1
    if name == "hsdp":
        return (2, ranks // 2) if ranks >= 4 and ranks % 2 == 0 else None
    shards, _, replicas = name.partition("x")
    if not (shards.isdecimal() and replicas.isdecimal()):
        sys.exit(f"there is no layout {name}: fsdp, hsdp, ddp, or shards and replicas as 4x2")
    return (int(replicas), int(shards)) if int(shards) * int(replicas) == ranks else None


def layouts_at(ranks: int, names: str) -> list[tuple[str, int, int]]:
    """Return (name, replicas, shards) of every layout that so many ranks can have; one rank has but one."""
    if ranks == 1:
        return [("one", 1, 1)]
    found = [(name, layout_at(name, ranks)) for name in names.split(",")]
    return [(name, *shape) for name, shape in found if shape is not None]


def measure_model(options: argparse.Namespace, config: str, ranks: list[int]) -> list[dict[str, Any]]:
    """Return the rows of a model, the one-rank run's first."""
    vocabulary = json.loads(Path(config).read_bytes()).get("vocab_size", VOCABULARY)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        num_tokens = options.seq_len * max(ranks) * (options.steps + PROFILED_STEPS + 2)
        corpus = make_corpus(Path(scratch, "corpus"), num_tokens=num_tokens, vocabulary=vocabulary)
        for count in ranks:
            for layout, replicas, shards in layouts_at(count, options.layouts):
                run = Path(scratch, f"{layout}-{count}")
                row = measure(options, config, corpus, run, replicas, shards)
                alone = rows[0]["value"] if rows else row["value"]
                name = f"scale/{Path(config).stem}/{layout}/{count}"
                against = {"peer": "one rank", "peer_value": alone, "ratio": row["value"] / alone}
                rows.append({"name": name, "layout": layout, "ranks": count, **row, **against})
                print(f"measured {name}", file=sys.stderr)
    return rows


def measure(
    options: argparse.Namespace, config: str, corpus: Path, run: Path, replicas: int, shards: int
) -> dict[str, Any]:
    """Run `flame-train` once on `replicas · shards` ranks and return what it tells of itself."""
    mode = options.mode or ("compiled" if options.device == "cuda" else "eager")
    all_steps = options.steps + PROFILED_STEPS
    words = packed_words(
        config=config,
        corpus=corpus,
        run=run,
        seq_len=options.seq_len,
        context_len=options.context_len,
        steps=all_steps,
        training__compile=str(mode == "compiled").lower(),
        training__data_parallel_replicate_degree=replicas,
        training__data_parallel_shard_degree=shards,
        lr_scheduler__warmup_steps=2,
        metrics__log_freq=1,
        profiling__enable_profiling="true",
        profiling__profile_freq=all_steps,
    )
    variables = {"NGPU": str(replicas * shards)}
    if options.device == "cpu":  # a core a rank, however many ranks there are
        variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    _, host_gib = train_watched([*words, *options.options.split()], variables, command="flame.cli.train")
    lines = logged_steps(run)
    later = [line for line in lines if options.steps // 2 < line["step"] <= options.steps]
    traces = sorted(run.glob(f"profile_traces/iteration_{all_steps}/rank*_trace.json"))
    assert len(traces) == replicas * shards, traces
    overlaps = [read_overlap(trace) for trace in traces]
    exposed = [overlap.exposed_share for overlap in overlaps]
    device_gib = max(line["memory/max_active(GiB)"] or 0.0 for line in lines)
    return {
        "value": median_of(later, "throughput(tps)"),
        "unit": "tokens/s a device",
        "mfu": median_of(later, "mfu(%)"),
        "communication_percent": 100 * statistics.mean(overlap.communication_share for overlap in overlaps),
        "exposed_percent": 100 * statistics.mean(exposed),
        "exposed_least_percent": 100 * min(exposed),
        "peak_gib": device_gib if options.device == "cuda" else host_gib,
        "step_seconds": median_of(later, "time_metrics/end_to_end(s)"),
        "loss": lines[-1]["loss_metrics/global_avg_loss"],
    }


def print_table(config: str, rows: list[dict[str, Any]]) -> None:
    print(Path(config).stem)
    print("".join(title.rjust(width) for title, width, _ in COLUMNS.values()))
    for row in rows:
        cells = ("-" if row[key] is None else format(row[key], spec) for key, (_, _, spec) in COLUMNS.items())
        print("".join(cell.rjust(width) for cell, (_, width, _) in zip(cells, COLUMNS.values(), strict=True)))


if __name__ == "__main__":
    main()
