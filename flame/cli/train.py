"""`flame-train`: train a model; `NGPU=8 flame-train …` launches eight ranks itself. `flame-train plot` draws runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from flame.program import Command, guarded, help_text, run_program, take_debug
from flame.train.config import TrainConfig, parse_train_config
from flame.train.launch import launch, plan_from_environment
from flame.train.moved import refuse_dataset_name
from flame.train.plot import PlotOptions, plot
from flame.train.refusals import NOT_AVAILABLE_YET

_DESCRIPTION = (
    "Train a causal language model on corpora of token shards. One process, or with NGPU=<n> as many ranks on this "
    "host (NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT for several), or under torchrun -m flame.train. "
    "Options may stand in a TOML file (--job.config_file); the command line wins. "
    "flame-train plot RUN … draws the losses of runs; flame-train plot -h explains it."
)
COMMANDS = (
    Command(
        name="plot",
        options=PlotOptions,
        help="Draw the loss of one run or several, over tokens, steps or time.",
        run=plot,
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `flame-train` on the command line's arguments; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug, options = take_debug(words)
    if options and options[0] in [command.name for command in COMMANDS]:
        return run_program("flame-train", _DESCRIPTION, COMMANDS, words)
    if any(word in ("-h", "--help") for word in options):
        usage = "flame-train [--section.option value …]"
        print(help_text(TrainConfig, usage=usage, description=_DESCRIPTION, refused=NOT_AVAILABLE_YET))
        return 0

    def run() -> int:
        config = parse_train_config(options)  # a wrong call is told once, not by every rank
        refuse_dataset_name(config.training, config.model.tokenizer_path)
        plan = plan_from_environment(dict(os.environ))
        if config.only_plans:
            from flame.train.plan import dry_run, planned_ranks  # imports torch

            return dry_run(config, planned_ranks(config, 1 if plan is None else plan.world_size))
        if plan is not None:
            return launch(plan, words)
        from flame.train.__main__ import main as run_rank

        return run_rank(words)

    return guarded(run, debug=debug, program="flame-train")


if __name__ == "__main__":
    sys.exit(main())
