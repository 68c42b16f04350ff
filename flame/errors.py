"""The errors that Flame raises for its users, and the one paragraph in which each is told.

    FlameError                what happened while running                         exit 1
    ├── UsageError            a wrong call: options, TOML, paths that are absent   exit 2
    ├── InputError            a source text cannot be read as asked                exit 1
    ├── TokenizerError        a tokenizer cannot be used as asked                  exit 1
    ├── CorpusError           a corpus is absent, damaged or another one           exit 1
    ├── MixtureError          a mixture cannot be drawn as asked                   exit 1
    ├── CheckpointError       a checkpoint is absent, damaged or of another run    exit 1
    ├── DiskFullError         there is no room for what is to be written           exit 1
    └── TrainingError         the run cannot go on                                 exit 1

`raise` one of these for what a user can mend; `assert` is for our own mistakes.
"""

from __future__ import annotations


class FlameError(Exception):
    """A failure told in one paragraph: what, where, got, expected, what to do.

    `what` is a sentence without its full stop. The other parts are optional and appear in a fixed order, so that
    messages read alike everywhere. `str(error)` is the whole paragraph.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: object | None = None,
        got: object | None = None,
        expected: object | None = None,
        fix: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.got = got
        self.expected = expected
        self.fix = fix
        super().__init__(self._paragraph())

    def _paragraph(self) -> str:
        facts = [
            f"{name} {value}"
            for name, value in (("in", self.where), ("got", self.got), ("expected", self.expected))
            if value is not None
        ]
        sentence = self.what.rstrip(".") + (f" ({'; '.join(facts)})" if facts else "") + "."
        if self.fix is not None:
            sentence += f" {self.fix}" if self.fix.endswith("?") else f" {self.fix.rstrip('.')}."
        return sentence


class UsageError(FlameError):
    """All that the command line, the TOML file and the existence of named paths can tell."""

    exit_code = 2


class InputError(FlameError):
    """A source text cannot be read: names the file and the line or row."""


class TokenizerError(FlameError):
    """A tokenizer folder or file lacks what was asked of it."""


class CorpusError(FlameError):
    """A corpus, a shard or its index is absent, damaged, or not the one that was expected."""


class MixtureError(FlameError):
    """A mixture's weights, sources or stages cannot be drawn as asked."""


class CheckpointError(FlameError):
    """A checkpoint is absent, damaged, or belongs to another run."""


class DiskFullError(FlameError):
    """No space is left: names the path, and the bytes that are needed as far as they are known."""


class TrainingError(FlameError):
    """The run cannot start or cannot go on."""
