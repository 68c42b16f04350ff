"""A mixture: which corpora, in which proportions, from which token on, under which seed."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flame.errors import MixtureError
from flame.files import sha256_of_json
from flame.sampling.interleave import MAX_SOURCES, TABLE_SLOTS
from flame.shards.packs import BEST_FIT

FORMAT_VERSION = 1
PACKED_VERSION = 2  # of a manifest with a packed source: a reader of version 1 would take windows
DEFAULT_DATA_SEED = 42
WINDOWS = "windows"
PACKINGS = (WINDOWS, BEST_FIT)
NOT_IN_NAMES = "=@:/,"


@dataclass(frozen=True, kw_only=True)
class Packs:
    """Which pack index a source is sampled by: its length, and what its packs are."""

    context_len: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """A named component: one split of one corpus, as it was when the mixture was made.

    With `packs` it is sampled by packs, else by windows. `num_tokens` are those that a model is run on in an epoch of
    packs: context_len a pack, padding counted.
    """

    name: str
    corpus: Path
    split: str
    fingerprint: str
    num_tokens: int
    max_epochs: float | None = None
    packs: Packs | None = None

    @property
    def content(self) -> tuple[str, ...]:
        """What is drawn of it: the corpus, the split, and by which packs."""
        packs = () if self.packs is None else (self.packs.fingerprint,)
        return (self.fingerprint, self.split, *packs)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """From `start_tokens` of the run on, whole-number weights (one a source) that sum to `TABLE_SLOTS`."""

    start_tokens: int
    weights: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Weighted sources and a seed: all that decides the order of samples, but for window_len.

    `parents` are the fingerprints of the manifests that this one was made from, the nearest first. Raises
    `MixtureError` for what cannot be drawn.
    """

    data_seed: int
    sources: tuple[Source, ...]
    stages: tuple[Stage, ...]
    parents: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_sources(self.sources)
        _check_stages(self.stages, len(self.sources))
        if not 0 <= self.data_seed < 2**63:
            raise MixtureError("the data seed is out of range", got=self.data_seed, expected="from 0 to 2^63 − 1")

    @property
    def packed_len(self) -> int | None:
        """The length of the packs that sources are sampled by, which must be window_len; None where none is."""
        return next((source.packs.context_len for source in self.sources if source.packs is not None), None)

    @property
    def format_version(self) -> int:
        """The version of the manifest that holds it."""
        return FORMAT_VERSION if self.packed_len is None else PACKED_VERSION

    @property
    def fingerprint(self) -> str:
        """What decides the order: content, splits, packs, weights, stage starts and the seed; no name, no path."""
        return sha256_of_json(
            {
                "format_version": self.format_version,
                "data_seed": self.data_seed,
                "sources": [list(source.content) for source in self.sources],
                "stages": [[stage.start_tokens, list(stage.weights)] for stage in self.stages],
            }
        )

    def is_continuation_of(self, earlier: Mixture, *, consumed_samples: int, window_len: int) -> bool:
        """Return whether a run that drew `consumed_samples` of `earlier` goes on with this mixture, nothing changed.

        True where they are the same, and where this one names `earlier` among its parents, keeps its sources in order
        (new ones behind), and differs only in stages that start at or after what is consumed.
        """
        if self.fingerprint == earlier.fingerprint:
            return True
        changed = self.changes_from(earlier)
        return changed is not None and changed > (consumed_samples - 1) * window_len  # the next sample may be the first

    def changes_from(self, earlier: Mixture) -> float | None:
        """Return the token of the run from which this edit of `earlier` differs; None where it is no edit of it.

        It is where the first stage starts that only one of them has; inf where all are the same.
        """
        if earlier.fingerprint not in self.parents or self.data_seed != earlier.data_seed:
            return None
        kept = self.sources[: len(earlier.sources)]
        if [source.content for source in kept] != [source.content for source in earlier.sources]:
            return None
        padding = (0,) * (len(self.sources) - len(earlier.sources))
        theirs = [replace(stage, weights=stage.weights + padding) for stage in earlier.stages]
        return min((stage.start_tokens for stage in {*self.stages} ^ {*theirs}), default=math.inf)


def first_sample(stage: Stage, window_len: int) -> int:
    """Return the first sample of a stage: the first that begins at or after its start, in tokens."""
    return -(-stage.start_tokens // window_len)


def _check_sources(sources: Sequence[Source]) -> None:
    if not 0 < len(sources) <= MAX_SOURCES:
        raise MixtureError(f"a mixture has 1 to {MAX_SOURCES} sources", got=len(sources))
    names: set[str] = set()
    contents: dict[tuple[str, str], str] = {}
    for source in sources:
        if source.name in names:
            raise MixtureError(
                "two sources of the mixture have one name", got=source.name, fix="Give one of them another name"
            )
        check_source_name(source.name)
        content = (source.fingerprint, source.split)
        if content in contents:
            raise MixtureError(
                f"sources {contents[content]!r} and {source.name!r} are the same corpus and split",
                where=source.corpus,
                fix="Name it once, with the sum of the weights",
            )
        names.add(source.name)
        contents[content] = source.name
    lengths = {source.packs.context_len: source.name for source in sources if source.packs is not None}
    if len(lengths) > 1:
        raise MixtureError(
            "sources of the mixture are packed for different lengths",
            got="; ".join(f"{name!r}: {length} tokens" for length, name in lengths.items()),
            expected="one length, which is training.window_len",
            fix="Pack them all for it: flame-preprocess pack CORPUS --context_len N",
        )


def check_source_name(name: str) -> None:
    """Raise `MixtureError` for a name that the command line or the names of metrics could not hold."""
    if not name or re.search(rf"[\s{NOT_IN_NAMES}]", name):
        raise MixtureError(
            "a source's name cannot be used",
            got=repr(name),
            expected=f"a name without white space and without any of {' '.join(NOT_IN_NAMES)}",
        )


def _check_stages(stages: Sequence[Stage], num_sources: int) -> None:
    if not stages or stages[0].start_tokens != 0:
        raise MixtureError("a mixture's first stage starts at token 0", got=[s.start_tokens for s in stages])
    for before, after in itertools.pairwise(stages):
        if after.start_tokens <= before.start_tokens:
            raise MixtureError("a mixture's stages start one after the other", got=[s.start_tokens for s in stages])
    for number, stage in enumerate(stages):
        if len(stage.weights) != num_sources or sum(stage.weights) != TABLE_SLOTS or min(stage.weights) < 0:
            raise MixtureError(
                f"the weights of stages[{number}] do not fit the mixture",
                got=f"{len(stage.weights)} weights that sum to {sum(stage.weights)}",
                expected=f"{num_sources} whole numbers of at least 0 that sum to {TABLE_SLOTS}",
            )
