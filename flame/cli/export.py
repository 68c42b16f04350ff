"""`flame-export`: checkpoints to Hugging Face folders, and back."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flame.config import option
from flame.program import Command, run_program


@dataclass(frozen=True, kw_only=True)
class HfOptions:
    """flame-export hf."""

    checkpoint: Path = option(help="the checkpoint to export: <run>/checkpoint/step-N")
    output: Path = option(help="the Hugging Face folder to write; must not be there yet")
    dtype: str | None = option(
        None,
        choices=("float32", "bfloat16", "float16"),
        help="number format of the exported weights; by default the checkpoint's own, float32 once it is trained",
    )
    max_shard_size: str = option("5GB", unit="bytes", help="largest weight file, such as 5GB or 500MB")
    fast_open: bool = option(False, help="trust the checkpoint's file sizes instead of checking every byte")
    check: bool = option(False, help="reload the result with transformers and compare every tensor, bit by bit")
    config: Path | None = option(None, help="for a DCP folder of the predecessor: the model's configuration")
    tokenizer: Path | None = option(None, help="for a DCP folder of the predecessor: the tokenizer's folder")


@dataclass(frozen=True, kw_only=True)
class DcpOptions:
    """flame-export dcp."""

    model: Path = option(help="a Hugging Face folder: config.json, safetensors, a tokenizer")
    output: Path = option(help="the checkpoint to write: <run>/checkpoint/step-0; must not be there yet")
    tokenizer: Path | None = option(None, help="take the tokenizer from this folder instead")
    trust_remote_code: bool = option(False, help="run the model's own code; read it first")


def export_hf(options: HfOptions) -> int:
    """Write the folder and print its path."""
    from flame.export.predecessor import export_any  # torch loads in seconds: not for -h

    print(export_any(**vars(options)))
    return 0


def export_dcp(options: DcpOptions) -> int:
    """Write the checkpoint and print its path."""
    from flame.export.dcp import convert_folder  # torch loads in seconds: not for -h

    print(convert_folder(**vars(options)))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run `flame-export`."""
    commands = (
        Command(name="hf", options=HfOptions, help="checkpoint → Hugging Face folder", run=export_hf),
        Command(name="dcp", options=DcpOptions, help="Hugging Face folder → step-0 checkpoint", run=export_dcp),
    )
    return run_program("flame-export", "Turn checkpoints into Hugging Face folders, and back.", commands, argv)


if __name__ == "__main__":
    sys.exit(main())
