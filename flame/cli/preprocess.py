"""The command `flame-preprocess`: text corpora to sealed token shards, and looks into them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# numpy would start threads for matrix products, of which there are none here.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from flame.preprocess.config import BuildOptions
from flame.preprocess.convert_config import ConvertOptions
from flame.preprocess.decode import DecodeOptions, decode
from flame.preprocess.inspect import InspectOptions, inspect
from flame.preprocess.pack import PackOptions, pack
from flame.preprocess.stats import StatsOptions, stats
from flame.preprocess.verify import VerifyOptions, verify
from flame.program import Command, run_program


def run_build(options: BuildOptions) -> int:
    """Build a corpus; imported here, so that -h needs no Arrow."""
    from flame.preprocess.build import build

    return build(options)


def run_convert(options: ConvertOptions) -> int:
    """Convert token files; imported here for the same reason."""
    from flame.preprocess.convert import convert

    return convert(options)


COMMANDS = (
    Command(
        name="build",
        options=BuildOptions,
        help="Turn text into a sealed corpus of token shards. A killed build is continued by the same command.",
        run=run_build,
    ),
    Command(
        name="verify",
        options=VerifyOptions,
        help="Check every byte and boundary of a corpus; names what is wrong, a line each, and exits with 3.",
        run=verify,
    ),
    Command(name="inspect", options=InspectOptions, help="Show what a corpus holds and how it was made.", run=inspect),
    Command(
        name="stats",
        options=StatsOptions,
        help="Count lengths of documents, sources, copies and tokens of a corpus; histograms on the terminal.",
        run=stats,
    ),
    Command(name="decode", options=DecodeOptions, help="Print documents of a corpus as text.", run=decode),
    Command(
        name="pack",
        options=PackOptions,
        help="Pack documents for one length, so that none that fits is ever cut: an index beside the corpus, and what "
        "it spares.",
        run=pack,
    ),
    Command(
        name="convert",
        options=ConvertOptions,
        help="Turn the token files of another system into a sealed corpus, or a corpus into such files; no text is "
        "tokenized again.",
        run=run_convert,
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on `argv`, the command line's arguments if absent; returns its exit code."""
    return run_program(
        "flame-preprocess", "Turn text corpora into sealed token shards, and look into them.", COMMANDS, argv
    )


if __name__ == "__main__":
    sys.exit(main())
