"""Pack indices of a corpus against their manifests and against the corpus: every token in one pack, once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flame.errors import FlameError
from flame.preprocess.pack_groups import cut_into_pieces
from flame.preprocess.problem import Problem, told
from flame.shards.checksum import payload_checksum
from flame.shards.format import MANIFEST
from flame.shards.packs import ARRAYS, MappedPacks, PacksInfo, array_path, map_packs, packs_root, read_packs
from flame.shards.reader import Corpus, Split


def check_pack_indices(corpus: Corpus) -> Iterator[Problem]:
    """Yield what is wrong with the pack indices beside a corpus. Memory: that of packing one group."""
    root = packs_root(corpus.path)
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        if not (folder / MANIFEST).is_file():
            yield Problem(path=folder, text="it is the unfinished pack index of something that was stopped")
            continue
        path = folder / MANIFEST
        try:
            info = read_packs(folder)
            problem = _of_another(info, corpus)
            if problem is None:
                yield from _check_arrays(folder, info, corpus.split(info.split))
            else:
                yield Problem(path=path, text=problem)
        except FlameError as error:
            yield Problem(path=Path(str(error.where or path)), text=told(error))


def _of_another(info: PacksInfo, corpus: Corpus) -> str | None:
    if info.corpus_fingerprint != corpus.fingerprint:
        return f"it packs another corpus ({info.corpus_fingerprint})"
    if info.split not in corpus.manifest.splits:
        return f"it packs split {info.split!r}, which the corpus does not have"
    return None


def _check_arrays(folder: Path, info: PacksInfo, split: Split) -> Iterator[Problem]:
    mapped = map_packs(folder, info)
    changed = [name for name in ARRAYS if payload_checksum(array_path(folder, name)) != info.checksums[name]]
    for name in changed:
        yield Problem(path=array_path(folder, name), text="its checksum is not the manifest's: its bytes changed")
    if not changed and (wrong := _wrong_packs(mapped, info, split)) is not None:
        yield Problem(path=folder, text=wrong)


def _wrong_packs(mapped: MappedPacks, info: PacksInfo, split: Split) -> str | None:
    """Return what is wrong with packs whose bytes are as they were written; None where all tokens are in them once."""
    first_token = first_piece = first_pack = 0
    for group in range(info.num_groups):
        stop_token, stop_piece = (int(value) for value in mapped.groups[2 * group : 2 * group + 2])
        if not first_token < stop_token <= split.num_tokens or not first_piece < stop_piece <= info.num_pieces:
            return f"the bounds of group {group} do not rise"
        stops = split.ends_between(first_token, stop_token)
        wanted = cut_into_pieces(np.concatenate([[first_token], stops[:-1]]), stops, info.context_len)
        starts = mapped.starts[first_piece:stop_piece].astype(np.int64)
        lengths = mapped.lengths[first_piece:stop_piece].astype(np.int64)
        order = np.argsort(starts)
        if not np.array_equal(starts[order], wanted[0]) or not np.array_equal(lengths[order], wanted[1]):
            return f"the pieces of group {group} are not its documents, each once"
        stop_pack = int(np.searchsorted(mapped.packs, np.uint64(stop_piece), side="right"))
        ends = mapped.packs[first_pack:stop_pack].astype(np.int64) - first_piece
        begins = np.concatenate([[0], ends[:-1]])
        if len(ends) == 0 or ends[-1] != len(starts) or np.any(ends <= begins):
            return f"the packs of group {group} do not hold its pieces"
        if np.any(np.add.reduceat(lengths, begins) > info.context_len):
            return f"a pack of group {group} holds more than {info.context_len} tokens"
        first_token, first_piece, first_pack = stop_token, stop_piece, stop_pack
    if (first_token, first_piece, first_pack) != (split.num_tokens, info.num_pieces, info.num_packs):
        return "its groups do not hold the whole split"
    return None
