"""`python -m flame.train`: one rank; what torchrun and our launcher start."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from flame.program import guarded, help_text, take_debug
from flame.train.config import TrainConfig, parse_train_config
from flame.train.moved import refuse_dataset_name
from flame.train.refusals import NOT_AVAILABLE_YET
from flame.train.signals import stop_signals_held


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank with these options; returns the exit code of the contract (docs/design.md, 1)."""
    debug, words = take_debug(list(sys.argv[1:] if argv is None else argv))
    if any(word in ("-h", "--help") for word in words):
        usage = "flame-train [--section.option value …]"
        print(help_text(TrainConfig, usage=usage, description=__doc__ or "", refused=NOT_AVAILABLE_YET))
        return 0
    rank = os.environ.get("RANK", "0")
    with stop_signals_held():
        return guarded(
            lambda: _train(words),
            debug=debug,
            program="flame-train" if rank == "0" else f"flame-train, rank {rank}",
        )


def _train(words: Sequence[str]) -> int:
    config = parse_train_config(words)
    refuse_dataset_name(config.training, config.model.tokenizer_path)
    if config.only_plans:
        from flame.train.plan import dry_run, planned_ranks

        return dry_run(config, planned_ranks(config, 1)) if os.environ.get("RANK", "0") == "0" else 0
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # its old name, which torch warns of, but takes
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(config.comm.trace_buf_size))
    from flame.train.loop import train  # torch and transformers load in seconds: not for a wrong call

    return train(config, words)


if __name__ == "__main__":
    sys.exit(main())
