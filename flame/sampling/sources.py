"""A mixture's sources on disk: how they are made of corpora, and opened as what was mixed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from flame.errors import MixtureError, UsageError
from flame.sampling.interleave import integer_weights
from flame.sampling.mixture import NOT_IN_NAMES, Mixture, Packs, Source, Stage
from flame.shards.packed import PackedSplit, open_packed
from flame.shards.packs import packs_folder
from flame.shards.reader import Corpus, Split


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
    plain = re.sub(rf"[\s{NOT_IN_NAMES}]", "_", corpus.absolute().name) or "corpus"
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
