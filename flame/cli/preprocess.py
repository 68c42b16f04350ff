"""The command `flame-preprocess`: text corpora to sealed token shards, and looks into them."""

from __future__ import annotations

import sys

from flame.config import Command, run_program
from flame.preprocess.config import BuildOptions


def run_build(options: BuildOptions) -> int:
    """Build a corpus; imported here, so that -h needs no Arrow."""
    from flame.preprocess.build import build

    return build(options)


COMMANDS = (
    Command(
        name="build",
        options=BuildOptions,
        help="Turn text into a sealed corpus of token shards. A killed build is continued by the same command.",
        run=run_build,
    ),
)


def main() -> int:
    """Run the program on the command line's arguments; returns its exit code."""
    return run_program("flame-preprocess", __doc__ or "", COMMANDS)


if __name__ == "__main__":
    sys.exit(main())
