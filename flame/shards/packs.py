"""A pack index on disk: which pieces of which documents make each pack of one length (docs/format.md).

It lies beside its corpus, in `<corpus>.packs/<split>-<context_len>/`, because nothing is ever written into a corpus.
It exists if and only if its manifest does, which is written last.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flame.errors import CorpusError
from flame.files import read_json_object, sha256_of_json, write_json
from flame.shards.format import MANIFEST, unreadable_file
from flame.shards.maps import map_values

PACKS_VERSION = 1
BEST_FIT = "best_fit"
MAX_CONTEXT_LEN = 2**31 - 1
PACKS_SUFFIX = ".packs"
ARRAYS: Mapping[str, np.dtype[np.unsignedinteger]] = {
    "packs": np.dtype("<u8"),  # of each pack: the place just after its last piece
    "starts": np.dtype("<u8"),  # of each piece: its first token, in tokens of the split
    "lengths": np.dtype("<u4"),  # of each piece: its tokens
    "groups": np.dtype("<u8"),  # of each group two: the places just after its last token, and its last piece
}
_CHECKSUM = re.compile(r"xxh3:[0-9a-f]{32}")
_COUNTS = ("context_len", "num_packs", "num_pieces", "num_groups", "num_tokens")
_TEXTS = ("corpus_fingerprint", "split")


@dataclass(frozen=True, kw_only=True)
class PacksInfo:
    """What a pack index holds. `num_tokens` are those of the documents, padding not counted; `built` says how.

    `checksums` are of the arrays by name, as a shard's. `report` is what packing and cutting into windows make of the
    split: for people, no reader needs it.
    """

    corpus_fingerprint: str
    split: str
    context_len: int
    num_packs: int
    num_pieces: int
    num_groups: int
    num_tokens: int
    checksums: Mapping[str, str]
    report: Mapping[str, Any] = field(default_factory=dict)
    built: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """What decides the packs and their numbers, and nothing of how they were made."""
        content = {name: getattr(self, name) for name in (*_TEXTS, *_COUNTS)}
        return sha256_of_json(
            {"format_version": PACKS_VERSION, "packing": BEST_FIT, **content, "checksums": dict(self.checksums)}
        )

    def length_of(self, array: str) -> int:
        """Return how many values an array has."""
        return {"packs": self.num_packs, "groups": 2 * self.num_groups}.get(array, self.num_pieces)


@dataclass(frozen=True, slots=True)
class MappedPacks:
    """The arrays of an index, mapped read-only."""

    packs: NDArray[np.uint64]
    starts: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    groups: NDArray[np.uint64]


def packs_folder(corpus: Path, split: str, context_len: int) -> Path:
    """Return where the pack index of a corpus's split lies: beside the corpus."""
    return packs_root(corpus) / f"{split}-{context_len}"


def packs_root(corpus: Path) -> Path:
    """Return the folder of all pack indices of a corpus."""
    whole = Path(os.path.normpath(corpus.absolute()))
    return whole.with_name(whole.name + PACKS_SUFFIX)


def array_path(folder: Path, name: str) -> Path:
    """Return where one of `ARRAYS` lies."""
    return folder / f"{name}.npy"


def write_packs(folder: Path, info: PacksInfo) -> None:
    """Write an index's manifest: its arrays must be on disk, durably, before."""
    value = {
        "format_version": PACKS_VERSION,
        "packing": BEST_FIT,
        "fingerprint": info.fingerprint,
        **{name: getattr(info, name) for name in (*_TEXTS, *_COUNTS, "checksums", "report", "built")},
    }
    write_json(folder / MANIFEST, value)


def read_packs(folder: Path) -> PacksInfo:
    """Read and check an index's manifest; `CorpusError` where it is absent, of another version, or was changed."""
    path = folder / MANIFEST
    try:
        value = read_json_object(path, "the manifest of the pack index", CorpusError)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorpusError("there is no such pack index", where=folder, got=f"no {MANIFEST}", fix=_PACK) from error
    except OSError as error:
        raise unreadable_file(path, error) from error
    version, packing = value.get("format_version"), value.get("packing")
    if version != PACKS_VERSION or packing != BEST_FIT:
        raise CorpusError(
            "the pack index has a format that this version of Flame does not read",
            where=path,
            got=f"packing {packing!r}, format_version {version!r}",
            expected=f"packing {BEST_FIT!r}, format_version {PACKS_VERSION}",
            fix=_PACK_AGAIN,
        )
    info = _info(value, path)
    if info.fingerprint != value.get("fingerprint"):
        raise CorpusError(
            "the manifest of the pack index was changed after it was written",
            where=path,
            got=f"content whose fingerprint is {info.fingerprint}",
            expected=value.get("fingerprint", "a fingerprint"),
            fix=_PACK_AGAIN,
        )
    return info


def map_packs(folder: Path, info: PacksInfo) -> MappedPacks:
    """Map an index's arrays; `CorpusError` unless their sizes and headers are as the manifest says.

    Cost: four opens. They keep a descriptor each while they are used.
    """
    return MappedPacks(**{name: _mapped(folder, name, info.length_of(name)) for name in ARRAYS})


def _mapped(folder: Path, name: str, length: int) -> NDArray[Any]:
    try:
        return map_values(array_path(folder, name), ARRAYS[name], length, "values")
    except CorpusError as error:
        raise CorpusError(
            "a file of the pack index is not the one that its manifest names",
            where=array_path(folder, name),
            got=error.got or error.what,
            expected=f"{length} values of {ARRAYS[name].str}",
            fix=_PACK_AGAIN,
        ) from error


def damaged_packs(folder: Path, got: object, expected: object) -> CorpusError:
    """Return the error for an index whose values cannot be."""
    return CorpusError("a pack index is damaged", where=folder, got=got, expected=expected, fix=_PACK_AGAIN)


_PACK = "Make it with flame-preprocess pack CORPUS --context_len N"
_PACK_AGAIN = "Make it again with flame-preprocess pack CORPUS --context_len N --overwrite"


def _info(value: Mapping[str, Any], path: Path) -> PacksInfo:
    """Return what a manifest says; names that this version does not know are passed over."""
    fields: dict[str, Any] = {each.name: value.get(each.name) for each in dataclasses.fields(PacksInfo)}
    sums = fields["checksums"]
    for name in _TEXTS:
        if not isinstance(fields[name], str):
            raise damaged_packs(path, f"{name}: {fields[name]!r}", "a text")
    for name in _COUNTS:
        if type(fields[name]) is not int or not fields[name] >= 0:
            raise damaged_packs(path, f"{name}: {fields[name]!r}", "a count")
    if not isinstance(sums, dict) or not all(_CHECKSUM.fullmatch(str(sums.get(name))) for name in ARRAYS):
        raise damaged_packs(path, f"checksums: {sums!r}", "xxh3: and 32 hex digits for " + ", ".join(ARRAYS))
    if not 0 < fields["context_len"] <= MAX_CONTEXT_LEN:
        raise damaged_packs(path, f"context_len: {fields['context_len']}", f"from 1 to {MAX_CONTEXT_LEN}")
    for name in ("report", "built"):
        if not isinstance(fields[name], dict):
            fields[name] = {}
    return PacksInfo(**fields)
