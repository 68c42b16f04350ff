"""The demo's picture: training and validation loss over steps, with the kill and what was trained twice.

python tools/demo_plot.py demo/run --killed_at 163 --resumed_from 150 --output demo/loss.png
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

TRAIN_LOSS = "loss_metrics/global_avg_loss"
_VALIDATION = re.compile(r"^validation/(.+)/loss$")
_COLOURS = ("#d1495b", "#00798c", "#8d5a97", "#66a182")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the logged steps of a `metrics.jsonl` in order; none where the file is absent."""
    if not path.exists():
        return []
    # A line that is being written has no end yet.
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def train_losses(metrics: list[dict[str, Any]]) -> dict[int, float]:
    """Return the training loss by step."""
    return {line["step"]: line[TRAIN_LOSS] for line in metrics if line.get(TRAIN_LOSS) is not None}


def validation_losses(metrics: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Return, by validation set, its loss by step."""
    losses: dict[str, dict[int, float]] = {}
    for line in metrics:
        for name, value in line.items():
            found = _VALIDATION.match(name)
            if found and value is not None:
                losses.setdefault(found[1], {})[line["step"]] = value
    return losses


def plot(run: Path, output: Path, *, killed_at: int, resumed_from: int) -> None:
    """Draw `output` from the run folder's metrics."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    metrics = read_metrics(run / "metrics.jsonl")
    train = train_losses(metrics)
    lost = train_losses(read_metrics(run / "metrics.abandoned.jsonl"))
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    axes.axvspan(resumed_from, killed_at, color="#dddddd", linewidth=0, label="trained twice")
    axes.axvline(killed_at, color="#555555", linestyle="--", linewidth=1)
    axes.annotate(
        f"SIGKILL at step {killed_at},\nresumed from step {resumed_from}",
        xy=(killed_at, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        va="top",
        fontsize=9,
    )
    axes.plot(list(train), list(train.values()), color="#3a3a3a", linewidth=1.2, label="training")
    axes.plot(list(lost), list(lost.values()), "x", color="#3a3a3a", markersize=6, label="training, before the kill")
    for colour, (name, losses) in zip(_COLOURS, validation_losses(metrics).items(), strict=False):
        axes.plot(list(losses), list(losses.values()), "o-", color=colour, markersize=4, label=f"validation: {name}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    figure.savefig(output, dpi=150)
    plt.close(figure)


def main() -> None:
    """Draw the picture of a run from the command line."""
    parser = argparse.ArgumentParser(description="Draw a run's losses, with the step at which it was killed.")
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--killed_at", type=int, required=True, help="last logged step before the kill")
    parser.add_argument("--resumed_from", type=int, required=True, help="step of the checkpoint that was resumed")
    parser.add_argument("--output", type=Path, required=True, help="the picture to write")
    options = parser.parse_args()
    plot(options.run, options.output, killed_at=options.killed_at, resumed_from=options.resumed_from)


if __name__ == "__main__":
    main()
