"""The mixture manifest: which corpora, in which proportions, from which token on, under which seed."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from flame.errors import MixtureError, UsageError
from flame.files import sha256_of_json, write_json
from flame.sampling.interleave import MAX_SOURCES, TABLE_SLOTS, integer_weights
from flame.shards.packed import PackedSplit, open_packed
from flame.shards.packs import BEST_FIT, packs_folder
from flame.shards.reader import Corpus, Split

FORMAT_VERSION = 1
PACKED_VERSION = 2  # of a manifest with a packed source: a reader of version 1 would take windows
DEFAULT_DATA_SEED = 42
WINDOWS = "windows"
PACKINGS = (WINDOWS, BEST_FIT)
_NOT_IN_NAMES = "=@:/,"


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

    def to_json(self, folder: Path | None = None) -> dict[str, Any]:
        """Return the manifest's object; corpus paths are told relative to `folder` where one is given."""
        parent: dict[str, Any] | None = None
        for fingerprint in reversed(self.parents):
            parent = {"fingerprint": fingerprint, "parent": parent}
        return {
            "format_version": self.format_version,
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
                    **_packs_to_json(source.packs),
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
        if [source.content for source in kept] != [source.content for source in earlier.sources]:
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


def _check_sources(sources: Sequence[Source]) -> None:
    if not 0 < len(sources) <= MAX_SOURCES:
        raise MixtureError(f"a mixture has 1 to {MAX_SOURCES} sources", got=len(sources))
    names: set[str] = set()
    contents: dict[tuple[str, str], str] = {}
    for source in sources:
        if source.name in names:
            raise MixtureError("two sources of the mixture have one name", got=source.name)
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
    if not name or re.search(rf"[\s{_NOT_IN_NAMES}]", name):
        raise MixtureError(
            "a source's name cannot be used",
            got=repr(name),
            expected=f"a name without white space and without any of {' '.join(_NOT_IN_NAMES)}",
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


# ---- the file


def write_mixture(path: Path, mixture: Mixture) -> None:
    """Write a manifest, with corpus paths relative to its folder."""
    write_json(path, mixture.to_json(path.parent))


def read_mixture(path: Path, *, overrides: Mapping[str, Path] | None = None) -> Mixture:
    """Read a manifest; corpus paths in it are relative to its folder, `overrides` replaces some by source name.

    Raises `UsageError` for an absent file or a name that no source has, `MixtureError` for what the file says.
    """
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise UsageError("there is no such mixture manifest", got=path, fix="Make one: flame-mix create") from error
    except ValueError as error:
        raise MixtureError(f"the mixture manifest is no JSON: {error}", where=path) from error
    version = value.get("format_version") if isinstance(value, dict) else None
    if version not in (FORMAT_VERSION, PACKED_VERSION):
        raise MixtureError(
            "the file is no mixture manifest that this version of Flame reads",
            where=path,
            got=f"format_version {version}",
            expected=f"format_version {FORMAT_VERSION} or {PACKED_VERSION}",
        )
    try:
        mixture = _mixture_from_json(value, _base(path.parent))
    except MixtureError as error:
        if error.where is not None:
            raise
        raise MixtureError(error.what, where=path, got=error.got, expected=error.expected, fix=error.fix) from None
    return _overridden(mixture, overrides or {})


def _mixture_from_json(value: Mapping[str, Any], folder: Path) -> Mixture:
    sources = _list(value, "sources")
    stages = _list(value, "stages")
    return Mixture(
        data_seed=_count(value, "data_seed", ""),
        parents=_parents(value.get("parent")),
        sources=tuple(_source_from_json(source, f"sources[{i}]", folder) for i, source in enumerate(sources)),
        stages=tuple(_stage_from_json(stage, f"stages[{i}]") for i, stage in enumerate(stages)),
    )


def _source_from_json(value: Any, where: str, folder: Path) -> Source:
    texts = {name: _text(value, name, where) for name in ("name", "corpus", "split", "fingerprint")}
    max_epochs = value.get("max_epochs")
    if max_epochs is not None and not (_is_number(max_epochs) and 0 < max_epochs < math.inf):
        _wrong(f"{where}.max_epochs", max_epochs, "a number above 0, or null")
    return Source(
        name=texts["name"],
        corpus=Path(os.path.normpath(folder / texts["corpus"])),
        split=texts["split"],
        fingerprint=texts["fingerprint"],
        num_tokens=_count(value, "num_tokens", f"{where}."),
        max_epochs=max_epochs,
        packs=_packs_from_json(value, where),
    )


def _packs_to_json(packs: Packs | None) -> dict[str, Any]:
    if packs is None:
        return {}
    return {"packing": BEST_FIT, "context_len": packs.context_len, "packs": packs.fingerprint}


def _packs_from_json(value: Mapping[str, Any], where: str) -> Packs | None:
    packing = value.get("packing", WINDOWS)
    if packing == WINDOWS:
        return None
    if packing != BEST_FIT:
        _wrong(f"{where}.packing", packing, f"{WINDOWS!r} or {BEST_FIT!r}")
    return Packs(context_len=_count(value, "context_len", f"{where}."), fingerprint=_text(value, "packs", where))


def _stage_from_json(value: Any, where: str) -> Stage:
    weights = value.get("weights") if isinstance(value, dict) else None
    if not isinstance(weights, list) or not all(type(weight) is int for weight in weights):
        _wrong(f"{where}.weights", weights, "a list of whole numbers, one a source")
    return Stage(start_tokens=_count(value, "start_tokens", f"{where}."), weights=tuple(weights))


def _parents(value: Any) -> tuple[str, ...]:
    """Return the chain of `{"fingerprint": …, "parent": …}`; a fingerprint alone is a chain of one."""
    parents: list[str] = []
    while value is not None:
        fingerprint, value = (value, None) if isinstance(value, str) else _parent(value)
        if not isinstance(fingerprint, str) or not fingerprint.startswith("sha256:"):
            _wrong("parent", fingerprint, "null, or the fingerprint of the mixture that this one was made from")
        parents.append(fingerprint)
    return tuple(parents)


def _parent(value: Any) -> tuple[Any, Any]:
    return (value.get("fingerprint"), value.get("parent")) if isinstance(value, dict) else (value, None)


def _list(value: Mapping[str, Any], name: str) -> list[Any]:
    found = value.get(name)
    return found if isinstance(found, list) else _wrong(name, found, "a list")


def _text(value: Any, name: str, where: str) -> str:
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, str) and found else _wrong(f"{where}.{name}", found, "a text")


def _count(value: Any, name: str, where: str) -> int:
    found = value.get(name) if isinstance(value, dict) else None
    return found if type(found) is int and found >= 0 else _wrong(f"{where}{name}", found, "a whole number, 0 or more")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wrong(where: str, got: Any, expected: str) -> NoReturn:
    raise MixtureError(f"the mixture manifest is wrong at {where}", got=repr(got)[:100], expected=expected)


def _overridden(mixture: Mixture, overrides: Mapping[str, Path]) -> Mixture:
    names = [source.name for source in mixture.sources]
    for name in overrides:
        if name not in names:
            raise UsageError("the mixture has no such source", got=name, expected="one of " + ", ".join(names))
    sources = tuple(replace(source, corpus=overrides.get(source.name, source.corpus)) for source in mixture.sources)
    return replace(mixture, sources=sources)


def _relative(corpus: Path, folder: Path) -> Path:
    return Path(os.path.relpath(corpus.absolute(), folder.resolve()))


def _base(folder: Path) -> Path:
    """Return where relative paths start: `..` leads out of where a link to the folder points, not of where it lies."""
    resolved = folder.resolve()
    return folder if str(resolved) == os.path.normpath(folder.absolute()) else resolved


# ---- corpora


def source_of(
    name: str, corpus: Path, split: str, *, max_epochs: float | None = None, packed_len: int | None = None
) -> Source:
    """Return a source as its corpus is now, sampled by its packs of `packed_len` tokens, or by windows.

    Opens the manifests of the corpus and its pack index only.
    """
    opened = Corpus.open(corpus)
    packed = None if packed_len is None else open_packed(opened, split, packed_len)
    return Source(
        name=name,
        corpus=corpus,
        split=split,
        fingerprint=opened.fingerprint,
        num_tokens=_tokens_of_epoch(opened.split(split) if packed is None else packed),
        max_epochs=max_epochs,
        packs=None if packed is None else Packs(context_len=packed.context_len, fingerprint=packed.packs.fingerprint),
    )


def _tokens_of_epoch(split: Split) -> int:
    return split.packs.num_packs * split.context_len if isinstance(split, PackedSplit) else split.num_tokens


def split_corpus_text(text: str) -> tuple[str, str]:
    """Return path and split of `path@split`; the split is `train` where it is not said."""
    path, at, split = text.rpartition("@")
    return (path, split) if at and split and "/" not in split else (text, "train")


def mixture_of_corpora(
    corpora: Sequence[str | Path],
    weights: Sequence[float] | None,
    data_seed: int,
    *,
    packed_len: int | None = None,
) -> Mixture:
    """Return the mixture that `training.dataset a,b` and `training.data_probs .7,.3` stand for.

    Each of `corpora` is a path, or `path@split`; sources are named after folders. Without `weights` sources count by
    their tokens, as if they were one corpus. With `packed_len` all are sampled by their packs of so many tokens.
    """
    if weights is not None and len(weights) != len(corpora):
        raise UsageError(
            "training.data_probs does not fit training.dataset",
            got=f"{len(weights)} probabilities for {len(corpora)} corpora",
            expected="one a corpus",
        )
    sources: list[Source] = []
    for text in corpora:
        folder, split = split_corpus_text(str(text))
        name = source_name(Path(folder), [source.name for source in sources])
        sources.append(source_of(name, Path(folder), split, packed_len=packed_len))
    if weights is None:
        weights = [source.num_tokens for source in sources]
    slots = integer_weights([source.name for source in sources], weights)
    return Mixture(data_seed=data_seed, sources=tuple(sources), stages=(Stage(start_tokens=0, weights=slots),))


def source_name(corpus: Path, taken: Sequence[str]) -> str:
    """Return a name for a source after its folder's, unlike those that are taken."""
    plain = re.sub(rf"[\s{_NOT_IN_NAMES}]", "_", corpus.absolute().name) or "corpus"
    names = itertools.chain([plain], (f"{plain}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def open_mixture(mixture: Mixture) -> list[Split]:
    """Open every source's split. Reads the corpora's manifests only.

    Raises `MixtureError` if a corpus is not the one that was mixed, or its tokenizer is not that of the others.
    """
    splits: list[Split] = []
    for source in mixture.sources:
        splits.append(open_source(source))
        first, own = (split.corpus.manifest.tokenizer.fingerprint for split in (splits[0], splits[-1]))
        if own != first:
            raise MixtureError(
                f"source {source.name!r} was made with another tokenizer than {mixture.sources[0].name!r}",
                where=source.corpus,
                got=own,
                expected=first,
                fix="Build all corpora of a mixture with one tokenizer, --eos_token, --bos and --parse_special",
            )
    return splits


def open_source(source: Source) -> Split:
    """Open one source's split; `MixtureError` unless it is what was mixed."""
    if not source.corpus.exists():
        raise UsageError(
            f"there is no such corpus folder, of source {source.name!r}",
            got=source.corpus,
            fix=f"Check the path; a corpus that was moved is shown by --source {source.name}=PATH",
        )
    corpus = Corpus.open(source.corpus)
    if corpus.fingerprint != source.fingerprint:
        raise MixtureError(
            f"source {source.name!r} is not the corpus that the mixture was made of",
            where=source.corpus,
            got=corpus.fingerprint,
            expected=source.fingerprint,
            fix="Restore that corpus, or make a new mixture with flame-mix create",
        )
    split = corpus.split(source.split) if source.packs is None else _open_packs(source, source.packs, corpus)
    if _tokens_of_epoch(split) != source.num_tokens:
        raise MixtureError(
            f"the mixture says another number of tokens of source {source.name!r} than its corpus has",
            where=source.corpus,
            got=f"{_tokens_of_epoch(split)} tokens in split {source.split}",
            expected=f"{source.num_tokens} tokens",
            fix="Make the mixture again with flame-mix create",
        )
    return split


def _open_packs(source: Source, packs: Packs, corpus: Corpus) -> PackedSplit:
    packed = open_packed(corpus, source.split, packs.context_len)
    if packed.packs.fingerprint != packs.fingerprint:
        raise MixtureError(
            f"source {source.name!r} is packed otherwise than when the mixture was made",
            where=packs_folder(corpus.path, source.split, packs.context_len),
            got=packed.packs.fingerprint,
            expected=packs.fingerprint,
            fix="Restore that pack index, or make a new mixture with flame-mix create",
        )
    return packed
