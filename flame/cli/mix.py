"""The command `flame-mix`: weighted mixtures of corpora, and what a run of one will see."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flame.program import Command, run_program
from flame.sampling.check import CheckOptions, check
from flame.sampling.create import CreateOptions, create
from flame.sampling.edit import EditOptions, edit
from flame.sampling.find import FindOptions, find
from flame.sampling.samples import SamplesOptions, samples
from flame.sampling.show import ShowOptions, show
from flame.sampling.trace import TraceOptions, trace

COMMANDS = (
    Command(
        name="create",
        options=CreateOptions,
        help="Write a mixture manifest, and print what a run draws of each source.",
        run=create,
    ),
    Command(
        name="edit",
        options=EditOptions,
        help="Write the next stage of a mixture, for a run that draws from it: other weights, or new sources.",
        run=edit,
    ),
    Command(name="show", options=ShowOptions, help="Print a mixture as a table.", run=show),
    Command(
        name="check",
        options=CheckOptions,
        help="Look whether a mixture's corpora are there and unchanged; exits with 3 where they are not.",
        run=check,
    ),
    Command(name="samples", options=SamplesOptions, help="List which window each sample of a stretch is.", run=samples),
    Command(name="trace", options=TraceOptions, help="Show the documents that a sample is made of.", run=trace),
    Command(
        name="find",
        options=FindOptions,
        help="List the samples that documents come in, or came in so far in a run.",
        run=find,
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on the command line's arguments; returns its exit code."""
    return run_program("flame-mix", __doc__ or "", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
