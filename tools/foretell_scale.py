"""What `bench_scale.py` should find, before it is run: bytes sent a step, and the time that they and the data cost.

    python tools/foretell_scale.py
    python tools/foretell_scale.py --config configs/transformer_7.2B.json --step_seconds 4 --gb_per_second 50

Each row: what a rank sends in a step (GB), how long that takes at the link's speed, how much of it no computation can
hide (what is in no block, at a step's start and end), and the efficiency that is left if only that is lost. The rows
of random documents are not alike either: the ranks wait for the one whose documents are longest. How much longer its
attention takes than the mean one's, over 2,000 draws, is told below, with the efficiency if that alone is lost and
attention takes Σn² of its documents' lengths, which is the most that it can depend on them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from bench_runs import PROJECT, VOCABULARY, document_lengths
from bench_scale import LAYOUTS, RANKS, layouts_at
from traffic import Shapes, exposed_bytes, step_traffic

from flame.train.families import family_of
from flame.train.model import CausalLMLoss
from flame.train.model_config import load_model_config

MODELS = {"transformer_374M.json": 0.320, "transformer_1.4B.json": 1.010}  # seconds of a step on one H200, compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="+", default=[str(PROJECT / "configs" / name) for name in MODELS])
    parser.add_argument("--step_seconds", nargs="+", type=float, default=[*MODELS.values()], help="on one GPU")
    parser.add_argument("--gb_per_second", type=float, default=450.0, help="of a link, in each direction")
    parser.add_argument("--seq_len", type=int, default=65_536)
    parser.add_argument("--context_len", type=int, default=4096)
    parser.add_argument("--attention_share", type=float, default=0.22, help="of a step; 71 ms of 324 with the 374M")
    options = parser.parse_args()
    for config, seconds in zip(options.config, options.step_seconds, strict=True):
        blocks, rest = shapes_of(config)
        print(f"{Path(config).stem}, {1000 * seconds:.0f} ms a step on one GPU")
        print(f"{'layout':>8}{'ranks':>7}{'sent GB':>9}{'all ms':>8}{'exposed ms':>12}{'efficiency':>12}")
        for layout, replicas, shards in (row for ranks in RANKS for row in layouts_at(ranks, ",".join(LAYOUTS))):
            sent = sum(
                kind.sent_bytes for kind in step_traffic(blocks, rest, replicas=replicas, shards=shards).values()
            )
            alone = exposed_bytes(rest, replicas=replicas, shards=shards)
            all_ms, alone_ms = (1e-6 * size / options.gb_per_second for size in (sent, alone))
            print(
                f"{layout:>8}{replicas * shards:>7}{sent / 1e9:>9.2f}{all_ms:>8.2f}{alone_ms:>12.2f}"
                f"{1 / (1 + alone_ms / 1000 / seconds):>12.4f}"
            )
    print("attention of the slowest rank, of the mean:")
    for ranks, slowest in slowest_attention(options.seq_len, options.context_len).items():
        lost = options.attention_share * (slowest - 1)
        print(f"{ranks:>8} ranks {slowest:.3f}, efficiency {1 / (1 + lost):.4f}")


def shapes_of(config: str) -> tuple[list[Shapes], Shapes]:
    """Return the shapes of each block's weights, and of what is in no block."""
    model_config = load_model_config(config, vocab_size=VOCABULARY, eos_id=0, bos_id=None)
    family = family_of(model_config)
    with torch.device("meta"):
        module = CausalLMLoss(family.construct(model_config, "sdpa"), family)
    blocks = [[*block.parameters()] for block in module.blocks()]
    inside = {id(weight) for block in blocks for weight in block}
    rest = [tuple(weight.shape) for weight in module.parameters() if id(weight) not in inside]
    return [[tuple(weight.shape) for weight in block] for block in blocks], rest


def slowest_attention(seq_len: int, context_len: int, draws: int = 2000) -> dict[int, float]:
    """Return for each number of ranks the mean over draws of the largest Σn² of its rows, over the mean row's."""
    lengths = document_lengths(seq_len * max(RANKS) * draws)
    stops = np.cumsum(lengths)
    # Sequences end where documents do, where rows do, and every context_len tokens of a document.
    cuts = [stops, np.arange(seq_len, stops[-1], seq_len)]
    cuts += [
        stop - length + np.arange(context_len, length, context_len)
        for stop, length in zip(stops, lengths, strict=True)
        if length > context_len
    ]
    ends = np.unique(np.concatenate(cuts))
    squares = np.diff(ends, prepend=0).astype(np.float64) ** 2
    rows = np.bincount((ends - 1) // seq_len, weights=squares)[: max(RANKS) * draws]
    return {ranks: float(rows.reshape(-1, ranks).max(axis=1).mean() / rows.mean()) for ranks in RANKS}


if __name__ == "__main__":
    main()
