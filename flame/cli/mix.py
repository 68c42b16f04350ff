"""The command `flame-mix`: weighted mixtures of corpora, and what a run of one will see."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flame.errors import UsageError
from flame.program import Command, guarded, run_program, take_debug
from flame.sampling.check import CheckOptions, check
from flame.sampling.create import CreateOptions, create
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
    Command(name="show", options=ShowOptions, help="Print a mixture as a table.", run=show),
    Command(
        name="check",
        options=CheckOptions,
        help="Look whether a mixture's corpora are there and unchanged; exits with 3 where they are not.",
        run=check,
    ),
    Command(name="samples", options=SamplesOptions, help="List which window each sample of a stretch is.", run=samples),
    Command(name="trace", options=TraceOptions, help="Show the documents that a sample is made of.", run=trace),
)
NOT_YET = ("edit",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program on the command line's arguments; returns its exit code."""
    debug, words = take_debug(sys.argv[1:] if argv is None else argv)
    if words and words[0] in NOT_YET:
        return guarded(lambda: refuse(words[0]), debug=debug, program="flame-mix")
    return run_program("flame-mix", __doc__ or "", COMMANDS, argv)


def refuse(command: str) -> int:
    """Refuse a command that is part of the design but has no engine yet."""
    raise UsageError(
        f"flame-mix {command} is not available yet", fix="flame-mix samples lists the windows that a run sees"
    )


if __name__ == "__main__":
    sys.exit(main())
