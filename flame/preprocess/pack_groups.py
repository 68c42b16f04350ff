"""Groups of neighbouring documents, and what a process makes of one: packs, and what cutting into windows would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flame.preprocess.best_fit import best_fit_decreasing
from flame.preprocess.pack_report import CutCounts
from flame.shards.reader import Corpus, Split

GROUP_TOKENS = 2**26  # 256 MB of tokens: what a run reads of a pack lies no further apart
GROUP_PACKS = 2**10  # at least: the last packs of a group, which stay half empty, are few among so many
GROUP_DOCUMENTS = 2**20


@dataclass(frozen=True, kw_only=True)
class Group:
    """A stretch of documents that are packed together; `[first_token, stop_token)` of the split are theirs."""

    first_document: int
    stop_document: int
    first_token: int
    stop_token: int


@dataclass(frozen=True, kw_only=True)
class PackedGroup:
    """A group's packs: how many pieces each has, and of each piece its first token in the split and its length."""

    group: Group
    sizes: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    windows: CutCounts
    packs: CutCounts


def groups_of(split: Split, context_len: int) -> Iterator[Group]:
    """Yield the groups of a split, in order: whole documents, a function of the corpus and `context_len` alone.

    A group ends with the document that brings it to 2^26 tokens, or 2^10 packs where those are more, or with its
    2^20th document. Cost: a few bisections a group.
    """
    tokens = max(GROUP_TOKENS, GROUP_PACKS * context_len)
    document = token = 0
    while document < split.num_documents:
        last = document + GROUP_DOCUMENTS - 1
        if token + tokens <= split.num_tokens:
            last = min(last, split.document_containing(token + tokens - 1))
        stop_document = min(last + 1, split.num_documents)
        stop_token = split.document_bounds(stop_document - 1)[1]
        yield Group(first_document=document, stop_document=stop_document, first_token=token, stop_token=stop_token)
        document, token = stop_document, stop_token


@dataclass(frozen=True, kw_only=True)
class GroupJob:
    """A group to pack, for a process of its own."""

    corpus: Path
    split: str
    context_len: int
    group: Group


def pack_group(job: GroupJob) -> PackedGroup:
    """Pack a group: every document is one piece, those beyond `context_len` one for each so many tokens and the rest.

    Packs are numbered as they were opened, and the pieces of each rise. Cost: some 0.5 µs and 100 bytes a piece.
    """
    group, context_len = job.group, job.context_len
    stops = _open(job.corpus, job.split).ends_between(group.first_token, group.stop_token)
    firsts = np.concatenate([[group.first_token], stops[:-1]])
    starts, lengths = cut_into_pieces(firsts, stops, context_len)
    packs, num_packs = best_fit_decreasing(lengths, context_len)
    order = np.argsort(packs, kind="stable")
    return PackedGroup(
        group=group,
        sizes=np.bincount(packs, minlength=num_packs),
        starts=starts[order],
        lengths=lengths[order],
        windows=CutCounts.of(firsts, stops, context_len, first_cut=(firsts // context_len + 1) * context_len),
        packs=CutCounts.of(firsts, stops, context_len, first_cut=firsts + context_len),
    )


def cut_into_pieces(
    firsts: NDArray[np.int64], stops: NDArray[np.int64], context_len: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first tokens and lengths of the pieces of documents `[first, stop)`, in order.

    A document of at most `context_len` tokens is one piece. A longer one is cut every `context_len` tokens from its
    start: its last piece may be shorter, and is packed as any other.
    """
    counts = -(-(stops - firsts) // context_len)
    which = np.repeat(np.arange(len(firsts)), counts)
    number = np.arange(len(which)) - (np.cumsum(counts) - counts)[which]
    starts = firsts[which] + number * context_len
    return starts, np.minimum(stops[which] - starts, context_len)


@lru_cache(maxsize=1)
def _open(corpus: Path, split: str) -> Split:
    return Corpus.open(corpus).split(split)
