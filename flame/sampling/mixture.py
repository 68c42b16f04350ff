"""The mixture manifest: which corpora, in which proportions, from which token on, under which seed."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flame.errors import MixtureError, UsageError
from flame.files import sha256_of_json, write_json
from flame.sampling.interleave import TABLE_SLOTS, integer_weights
from flame.shards.reader import Corpus, Split

FORMAT_VERSION = 1
DEFAULT_DATA_SEED = 42


@dataclass(frozen=True, kw_only=True)
class Source:
    """A named component: one split of one corpus, as it was when the mixture was made."""

    name: str
    corpus: Path
    split: str
    fingerprint: str
    num_tokens: int
    max_epochs: float | None = None


@dataclass(frozen=True, kw_only=True)
class Stage:
    """From `start_tokens` of the run on, whole-number weights (one a source) that sum to `TABLE_SLOTS`."""

    start_tokens: int
    weights: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Weighted sources and a seed: all that decides the order of samples, but for window_len.

    `parents` are the fingerprints of the manifests that this one was edited from, the nearest first.
    """

    data_seed: int
    sources: tuple[Source, ...]
    stages: tuple[Stage, ...]
    parents: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_sources(self.sources)
        _check_stages(self.stages, [source.name for source in self.sources])
        if not 0 <= self.data_seed < 2**63:
            raise MixtureError("the data seed is out of range", got=self.data_seed, expected="from 0 to 2^63 − 1")

    @property
    def fingerprint(self) -> str:
        """What decides the order: corpora's content, splits, weights, stage starts and the seed; no name, no path."""
        return sha256_of_json(
            {
                "format_version": FORMAT_VERSION,
                "data_seed": self.data_seed,
                "sources": [[source.fingerprint, source.split] for source in self.sources],
                "stages": [[stage.start_tokens, list(stage.weights)] for stage in self.stages],
            }
        )

    def to_json(self, folder: Path | None = None) -> dict[str, Any]:
        """Return the manifest's object; corpus paths are told relative to `folder` where one is given."""
        parent: dict[str, Any] | None = None
        for fingerprint in reversed(self.parents):
            parent = {"fingerprint": fingerprint, "parent": parent}
        return {
            "format_version": FORMAT_VERSION,
            "fingerprint": self.fingerprint,
            "data_seed": self.data_seed,
            "parent": parent,
            "sources": [
                {
                    "name": source.name,
                    "corpus": str(source.corpus if folder is None else _relative(source.corpus, folder)),
                    "split": source.split,
                    "fingerprint": source.fingerprint,
                    "num_tokens": source.num_tokens,
                    "max_epochs": source.max_epochs,
                }
                for source in self.sources
            ],
            "stages": [{"start_tokens": s.start_tokens, "weights": list(s.weights)} for s in self.stages],
        }

    def is_continuation_of(self, earlier: Mixture, *, consumed_samples: int, window_len: int) -> bool:
        """Return whether a run that drew `consumed_samples` of `earlier` goes on with this mixture, nothing changed.

        True where they are the same, and where this one names `earlier` among its parents, keeps its sources in order
        (new ones behind), and differs only in stages that start at or after what is consumed.
        """
        if self.fingerprint == earlier.fingerprint:
            return True
        if earlier.fingerprint not in self.parents or self.data_seed != earlier.data_seed:
            return False
        kept = self.sources[: len(earlier.sources)]
        if [(s.fingerprint, s.split) for s in kept] != [(s.fingerprint, s.split) for s in earlier.sources]:
            return False
        padding = (0,) * (len(self.sources) - len(earlier.sources))
        begun = [
            replace(stage, weights=stage.weights + padding)
            for stage in earlier.stages
            if first_sample(stage, window_len) < consumed_samples
        ]
        mine = [stage for stage in self.stages if first_sample(stage, window_len) < consumed_samples]
        return mine == begun


def first_sample(stage: Stage, window_len: int) -> int:
    """Return the first sample of a stage: the first that begins at or after its start, in tokens."""
    return -(-stage.start_tokens // window_len)


def read_mixture(path: Path, *, overrides: Mapping[str, Path] | None = None) -> Mixture:
    """Read a manifest; corpus paths in it are relative to its folder, `overrides` replaces some by source name.

    Raises `UsageError` for an absent file or a name that no source has, `MixtureError` for what the file says.
    """
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UsageError("there is no such mixture manifest", got=path, fix="Make one: flame-mix create") from error
    except ValueError as error:
        raise MixtureError(f"the mixture manifest is no JSON: {error}", where=path) from error
    version = value.get("format_version") if isinstance(value, dict) else None
    if version != FORMAT_VERSION:
        raise MixtureError(
            "the file is no mixture manifest that this version of Flame reads",
            where=path,
            got=f"format_version {version}",
            expected=f"format_version {FORMAT_VERSION}",
        )
    try:
        mixture = _from_json(value, path.parent)
    except (KeyError, TypeError, AttributeError) as error:
        raise MixtureError(f"the mixture manifest lacks a part: {error!r}", where=path) from error
    stated = value.get("fingerprint")
    if stated is not None and stated != mixture.fingerprint:
        raise MixtureError(
            "the mixture manifest was changed by hand",
            where=path,
            got=f"content of the fingerprint {mixture.fingerprint}",
            expected=stated,
            fix="Make another manifest with flame-mix create",
        )
    return _overridden(mixture, overrides or {})


def _from_json(value: Mapping[str, Any], folder: Path) -> Mixture:
    parents: list[str] = []
    parent = value.get("parent")
    while parent is not None:
        parents.append(parent["fingerprint"])
        parent = parent.get("parent")
    return Mixture(
        data_seed=int(value["data_seed"]),
        parents=tuple(parents),
        sources=tuple(
            Source(**{**source, "corpus": Path(os.path.normpath(folder / source["corpus"]))})
            for source in value["sources"]
        ),
        stages=tuple(
            Stage(start_tokens=int(stage["start_tokens"]), weights=tuple(stage["weights"])) for stage in value["stages"]
        ),
    )


def _overridden(mixture: Mixture, overrides: Mapping[str, Path]) -> Mixture:
    names = [source.name for source in mixture.sources]
    for name in overrides:
        if name not in names:
            raise UsageError("the mixture has no such source", got=name, expected="one of " + ", ".join(names))
    sources = tuple(replace(source, corpus=overrides.get(source.name, source.corpus)) for source in mixture.sources)
    return replace(mixture, sources=sources)


def write_mixture(path: Path, mixture: Mixture) -> None:
    """Write a manifest, with corpus paths relative to its folder."""
    write_json(path, mixture.to_json(path.parent))


def _relative(corpus: Path, folder: Path) -> Path:
    return Path(os.path.relpath(corpus.absolute(), folder.absolute()))


def mixture_of_corpora(corpora: Sequence[str], weights: Sequence[float] | None, data_seed: int) -> Mixture:
    """Return the mixture that `training.dataset a,b` and `training.data_probs .7,.3` stand for.

    Each of `corpora` is a path, or `path@split`; sources are named after folders. Without `weights` sources count by
    their tokens, as if they were one corpus.
    """
    if weights is not None and len(weights) != len(corpora):
        raise UsageError(
            "training.data_probs does not fit training.dataset",
            got=f"{len(weights)} probabilities for {len(corpora)} corpora",
            expected="one a corpus",
        )
    sources: list[Source] = []
    for text in corpora:
        folder, split = split_corpus_text(text)
        name = Path(folder).absolute().name
        taken = sum(source.name == name or source.name.startswith(f"{name}-") for source in sources)
        sources.append(source_of(f"{name}-{taken + 1}" if taken else name, Path(folder), split))
    slots = integer_weights([s.name for s in sources], weights or [float(s.num_tokens) for s in sources])
    return Mixture(data_seed=data_seed, sources=tuple(sources), stages=(Stage(start_tokens=0, weights=slots),))


def split_corpus_text(text: str) -> tuple[str, str]:
    """Return (path, split) of `path@split`; the split is `train` where it is not said."""
    path, at, split = text.rpartition("@")
    return (path, split) if at and "/" not in split else (text, "train")


def source_of(name: str, corpus: Path, split: str, *, max_epochs: float | None = None) -> Source:
    """Return a source as its corpus is now. Opens the manifest only."""
    opened = Corpus.open(corpus)
    info = opened.split(split)
    return Source(
        name=name,
        corpus=corpus,
        split=split,
        fingerprint=opened.fingerprint,
        num_tokens=info.num_tokens,
        max_epochs=max_epochs,
    )


def open_mixture(mixture: Mixture) -> list[Split]:
    """Open every source's split; `MixtureError` if one is another corpus than was meant, or tokenizers differ."""
    splits: list[Split] = []
    for source in mixture.sources:
        corpus = Corpus.open(source.corpus)
        if corpus.fingerprint != source.fingerprint:
            raise MixtureError(
                f"source {source.name!r} is not the corpus that the mixture was made of",
                where=source.corpus,
                got=corpus.fingerprint,
                expected=source.fingerprint,
                fix="Restore that corpus, or make a new mixture with flame-mix create",
            )
        splits.append(corpus.split(source.split))
        first = splits[0].corpus.manifest.tokenizer
        if corpus.manifest.tokenizer.fingerprint != first.fingerprint:
            raise MixtureError(
                f"source {source.name!r} was made with another tokenizer than {mixture.sources[0].name!r}",
                where=source.corpus,
                got=corpus.manifest.tokenizer.fingerprint,
                expected=first.fingerprint,
                fix="Build all corpora of a mixture with one tokenizer, --eos_token, --bos and --parse_special",
            )
    return splits


def _check_sources(sources: Sequence[Source]) -> None:
    if not sources:
        raise MixtureError("a mixture needs a source")
    names: set[str] = set()
    contents: dict[tuple[str, str], str] = {}
    for source in sources:
        if source.name in names:
            raise MixtureError("two sources of the mixture have one name", got=source.name)
        if not source.name or any(character in source.name for character in "=@:/, "):
            raise MixtureError(
                "a source's name cannot be used", got=repr(source.name), expected="no = @ : / , or space"
            )
        content = (source.fingerprint, source.split)
        if content in contents:
            raise MixtureError(
                f"sources {contents[content]!r} and {source.name!r} are the same corpus and split",
                where=source.corpus,
                fix="Name it once, with the sum of the weights",
            )
        names.add(source.name)
        contents[content] = source.name


def _check_stages(stages: Sequence[Stage], names: Sequence[str]) -> None:
    if not stages or stages[0].start_tokens != 0:
        raise MixtureError("a mixture's first stage starts at token 0", got=[s.start_tokens for s in stages])
    for before, after in itertools.pairwise(stages):
        if after.start_tokens <= before.start_tokens:
            raise MixtureError("a mixture's stages start one after the other", got=[s.start_tokens for s in stages])
    for stage in stages:
        if len(stage.weights) != len(names) or sum(stage.weights) != TABLE_SLOTS or min(stage.weights) < 0:
            raise MixtureError(
                "a stage's weights do not fit its mixture",
                got=f"{len(stage.weights)} weights that sum to {sum(stage.weights)}",
                expected=f"{len(names)}, none negative, that sum to {TABLE_SLOTS}",
            )
