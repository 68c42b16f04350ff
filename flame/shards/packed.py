"""A split by packs: its windows are those of a pack index, in which no document that fits into one is ever cut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flame.errors import CorpusError
from flame.shards.packs import MappedPacks, PacksInfo, damaged_packs, map_packs, packs_folder, read_packs
from flame.shards.reader import Corpus, Split

_MAX_MAPPED = 12  # indices in a process, four descriptors each: beside 64 shards they fit under `ulimit -n 256`


@dataclass(frozen=True)
class Pieces:
    """Parts of documents in windows, arrays of one length; `which` is the place of the document among those asked for.

    `start` is the part's first token in its window, which is a pack or not.
    """

    which: NDArray[np.int64]
    window: NDArray[np.int64]
    start: NDArray[np.int64]
    num_tokens: NDArray[np.int64]


class PackedSplit(Split):
    """A split whose windows are packs of `context_len` tokens: pieces of documents, then padding.

    Pack p is the window that begins at `p · context_len`; all else (tokens, documents, provenance) is the split's own,
    in tokens of the split. Padding is EOS, a sequence of its own, and none of its tokens is a label.
    """

    def __init__(self, corpus: Corpus, name: str, folder: Path, packs: PacksInfo) -> None:
        super().__init__(corpus, name, corpus.manifest.splits[name])
        self.packs = packs
        self._folder = folder
        self._files_of_packs = _PackFiles(folder, packs)
        self._eos_id = corpus.manifest.tokenizer.eos_id
        self._last_group: tuple[int, _Group] | None = None

    @property
    def context_len(self) -> int:
        return self.packs.context_len

    # ---- windows

    def advise_window(self, start: int, length: int) -> None:
        """Have the system read a pack's pieces, as `Split.advise_window` does of a window."""
        for first, num_tokens in self._pieces_of(start, length):
            super().advise_window(first, num_tokens)

    def view_window(self, start: int, length: int) -> tuple[NDArray[np.uint32], NDArray[np.uint64], int]:
        """Return (tokens, ends, 0) of the pack that begins at `start`, as `Split.view_window` does of a window.

        `ends` are those of documents, and of the padding. The token that follows is the next of a document that was
        cut at the pack's end, else EOS. Cost: a copy of each piece, some 2 µs.
        """
        pieces = self._pieces_of(start, length)
        tokens = np.empty(length + 1, dtype=np.uint32)
        ends: list[int] = []
        end = 0
        for first, num_tokens in pieces:
            self.read_into(first, tokens[end : end + num_tokens])
            end += num_tokens
            ends.append(end)
        tokens[end:] = self._eos_id
        if end < length:
            ends.append(length)
        elif self._goes_on(pieces):
            ends = []
            self.read_into(pieces[0][0] + length, tokens[length:])
        return tokens, np.array(ends, dtype=np.uint64), 0

    def num_padding(self, start: int) -> int:
        """Return how many tokens of the pack that begins at `start` are padding: its last ones."""
        return self.context_len - sum(num_tokens for _, num_tokens in self._pieces_of(start, self.context_len))

    def stretches(self, start: int) -> list[tuple[int, int]]:
        """Return the stretches `[start, stop)` of the split that the pack beginning at `start` is made of, in order."""
        return [(first, first + num_tokens) for first, num_tokens in self._pieces_of(start, self.context_len)]

    def _pieces_of(self, start: int, length: int) -> list[tuple[int, int]]:
        """Return (first token of the split, tokens) of each piece of a pack."""
        pack, rest = divmod(int(start), self.context_len)
        assert rest == 0 and length == self.context_len, "a window is a pack"
        mapped = self._mapped
        first, stop = int(mapped.packs[pack - 1]) if pack else 0, int(mapped.packs[pack])
        pieces = list(zip(mapped.starts[first:stop].tolist(), mapped.lengths[first:stop].tolist(), strict=True))
        fits = 0 < sum(num_tokens for _, num_tokens in pieces) <= length
        if not fits or any(not 0 < num_tokens <= self.num_tokens - start for start, num_tokens in pieces):
            raise damaged_packs(self._folder, f"pack {pack}: {pieces[:4]}", f"pieces of 1 to {length} tokens in all")
        return pieces

    def _goes_on(self, pieces: list[tuple[int, int]]) -> bool:
        """Return whether a full pack is a part of a document that goes on behind it: only then it is one piece."""
        first, num_tokens = pieces[-1]
        stop = first + num_tokens
        return len(pieces) == 1 and not len(self.ends_between(stop - 1, stop))

    # ---- documents

    def find_pieces(self, documents: NDArray[np.int64]) -> Pieces:
        """Return the pieces of documents, by document and then in its order.

        A group of some 10^5 documents is looked through for each that they lie in, and the last one is kept: ask for
        neighbours together.
        """
        bounds = np.array([self.document_bounds(int(document)) for document in documents], dtype=np.int64)
        first, stop = bounds.reshape(-1, 2).T
        counts = -(-(stop - first) // self.context_len)
        which = np.repeat(np.arange(len(documents)), counts)
        number = np.arange(len(which)) - (np.cumsum(counts) - counts)[which]
        starts = first[which] + number * self.context_len
        num_tokens = np.minimum(stop[which] - starts, self.context_len)
        pack, within = np.empty_like(starts), np.empty_like(starts)
        groups = np.searchsorted(self._mapped.groups[0::2], starts, side="right")
        for group in np.unique(groups):
            mine = groups == group
            pack[mine], within[mine] = self._group(int(group)).find(starts[mine])
        return Pieces(which=which, window=pack, start=within, num_tokens=num_tokens)

    def _group(self, number: int) -> _Group:
        if self._last_group is None or self._last_group[0] != number:
            self._last_group = number, _Group.of(self._mapped, number, self._folder)
        return self._last_group[1]

    # ---- checks

    def check(self) -> None:
        """Raise `CorpusError` unless the split's files and the index's are all there, and agree with the manifests."""
        super().check()
        map_packs(self._folder, self.packs)

    @property
    def _mapped(self) -> MappedPacks:
        return _mapped(self._files_of_packs)


@dataclass(frozen=True)
class _Group:
    """The pieces of one group, by their first tokens: rising, each with its pack and its place in that."""

    starts: NDArray[np.int64]
    packs: NDArray[np.int64]
    within: NDArray[np.int64]
    folder: Path

    @classmethod
    def of(cls, mapped: MappedPacks, number: int, folder: Path) -> _Group:
        first = int(mapped.groups[2 * number - 1]) if number else 0
        stop = int(mapped.groups[2 * number + 1])
        starts, lengths = (array[first:stop].astype(np.int64) for array in (mapped.starts, mapped.lengths))
        packs = np.searchsorted(mapped.packs, np.arange(first, stop, dtype=np.uint64), side="right")
        before = np.cumsum(lengths) - lengths
        begins = np.flatnonzero(np.diff(packs, prepend=-1))
        within = before - np.repeat(before[begins], np.diff(begins, append=len(packs)))
        order = np.argsort(starts)
        return cls(starts=starts[order], packs=packs[order], within=within[order], folder=folder)

    def find(self, starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (pack, place in the pack) of the pieces that begin at these tokens."""
        places = np.searchsorted(self.starts, starts)
        found = self.starts[np.minimum(places, len(self.starts) - 1)]
        if len(found) and not np.array_equal(found, starts):
            lost = int(starts[np.flatnonzero(found != starts)[0]])
            raise damaged_packs(self.folder, f"no piece that begins at token {lost}", "a piece for every document")
        return self.packs[places], self.within[places]


@dataclass(frozen=True, eq=False)
class _PackFiles:
    """An index to map; each instance is its own key."""

    folder: Path
    packs: PacksInfo


@lru_cache(maxsize=_MAX_MAPPED)
def _mapped(files: _PackFiles) -> MappedPacks:
    return map_packs(files.folder, files.packs)


def open_packed(corpus: Corpus, name: str, context_len: int) -> PackedSplit:
    """Open a split by its packs of `context_len` tokens. Reads their manifest only.

    Raises `CorpusError` where there is no such index, or it was made of another corpus.
    """
    split = corpus.split(name)
    folder = packs_folder(corpus.path, name, context_len)
    if not folder.is_dir():
        raise CorpusError(
            f"the corpus is not packed for {context_len} tokens",
            where=corpus.path,
            got=f"no {folder}",
            fix=f"Pack it: flame-preprocess pack {corpus.path} --context_len {context_len}"
            + ("" if name == "train" else f" --split {name}"),
        )
    packs = read_packs(folder)
    for what, got, expected in (
        ("of another corpus", packs.corpus_fingerprint, corpus.fingerprint),
        ("of another split", packs.split, name),
        ("of another length", packs.context_len, context_len),
        ("of other tokens", packs.num_tokens, split.num_tokens),
    ):
        if got != expected:
            raise damaged_packs(folder, f"an index {what}: {got}", expected)
    return PackedSplit(corpus, name, folder, packs)
