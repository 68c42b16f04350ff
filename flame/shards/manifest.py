"""The sealed truth of a corpus: manifest.json. A corpus exists if and only if this file does."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from flame.errors import CorpusError
from flame.files import write_json
from flame.shards.fingerprint import corpus_fingerprint
from flame.shards.format import (
    BUILD_FOLDER,
    FORMAT_VERSION,
    MANIFEST,
    REJECTS_FOLDER,
    RESTORE,
    TOKENIZER_FOLDER,
    unreadable_file,
)

_SHARD_NAME = re.compile(r"shard-[0-9]{5,}-[0-9]{3,}")
_SPLIT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_CHECKSUM = re.compile(r"xxh3:[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """The tokenizer of a corpus, and the policies it was used under.

    `vocab_size` counts added tokens; `bos` is "never" or "always", `special_text` "plain" or "parsed".
    """

    fingerprint: str
    vocab_size: int
    bos_id: int | None
    eos_id: int
    bos: str
    special_text: str


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """What a finished shard holds. `num_bytes` are UTF-8 bytes of text; checksums are `xxh3:` and 32 hex digits."""

    name: str
    num_tokens: int
    num_documents: int
    num_bytes: int
    max_token_id: int
    tokens_checksum: str
    ends_checksum: str


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """One split: its totals, and its shards in order."""

    num_tokens: int
    num_documents: int
    num_bytes: int
    max_token_id: int
    shards: tuple[ShardInfo, ...]

    @classmethod
    def of(cls, shards: tuple[ShardInfo, ...]) -> SplitInfo:
        """Return the split that these shards make up."""
        return cls(
            num_tokens=sum(shard.num_tokens for shard in shards),
            num_documents=sum(shard.num_documents for shard in shards),
            num_bytes=sum(shard.num_bytes for shard in shards),
            max_token_id=max((shard.max_token_id for shard in shards), default=0),
            shards=shards,
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json. What is not in the fingerprint says how the corpus was made.

    `tokenizer_files` has the checksum of each file beside tokenizer.json, by name; empty where none was noted.
    """

    tokenizer: TokenizerInfo
    splits: Mapping[str, SplitInfo]
    tokenizer_files: Mapping[str, str] = field(default_factory=dict)
    rejects: Mapping[str, int] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    built: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """The corpus's fingerprint, computed from what this manifest says."""
        return corpus_fingerprint(
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            bos_id=self.tokenizer.bos_id,
            eos_id=self.tokenizer.eos_id,
            splits={name: split.shards for name, split in self.splits.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the object that manifest.json holds."""
        return {
            "format_version": FORMAT_VERSION,
            "fingerprint": self.fingerprint,
            "tokenizer": dataclasses.asdict(self.tokenizer),
            "splits": {
                name: {**dataclasses.asdict(split), "shards": [dataclasses.asdict(shard) for shard in split.shards]}
                for name, split in self.splits.items()
            },
            "tokenizer_files": dict(self.tokenizer_files),
            "rejects": dict(self.rejects),
            "engine": dict(self.engine),
            "options": dict(self.options),
            "inputs": dict(self.inputs),
            "built": dict(self.built),
        }


class DamagedManifestError(CorpusError):
    """manifest.json is there, but it is not what was sealed."""


def write_manifest(corpus: Path, manifest: Manifest) -> None:
    """Seal a corpus: everything else must be on disk, durably, before."""
    value = manifest.to_json()
    manifest_from_json(value, corpus / MANIFEST)  # what could not be read back is never sealed
    write_json(corpus / MANIFEST, value)


def read_manifest(corpus: Path) -> Manifest:
    """Read and check manifest.json: its version, its structure, its sums, its fingerprint.

    Raises `CorpusError` where there is none or its version is another, `DamagedManifestError` where it was changed.
    """
    path = corpus / MANIFEST
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _no_corpus(corpus) from error
    except OSError as error:
        raise unreadable_file(path, error) from error
    except ValueError as error:
        raise DamagedManifestError(f"the corpus manifest is no JSON: {error}", where=path, fix=RESTORE) from error
    version = value.get("format_version") if isinstance(value, dict) else None
    if version is None:
        raise DamagedManifestError("the corpus manifest has no format_version", where=path, fix=RESTORE)
    if version != FORMAT_VERSION:
        raise CorpusError(
            "the corpus has a format that this version of Flame does not read",
            where=path,
            got=f"format_version {version!r}",
            expected=f"format_version {FORMAT_VERSION}",
            fix="Read it with the version of Flame that its manifest names under built, or build it again",
        )
    return manifest_from_json(value, path)


def manifest_from_json(value: Mapping[str, Any], path: Path) -> Manifest:
    """Return the manifest that a JSON object holds; `DamagedManifestError`, naming `path`, unless all of it is right.

    Names that this version does not know are passed over.
    """
    try:
        manifest = Manifest(
            tokenizer=_record(TokenizerInfo, value.get("tokenizer"), "tokenizer"),
            splits={
                name: _split(name, split)
                for name, split in _of_type(dict, value.get("splits"), "splits", "an object").items()
            },
            **{
                name: _of_type(dict, value.get(name, {}), name, "an object")
                for name in ("tokenizer_files", "rejects", "engine", "options", "inputs", "built")
            },
        )
        for name, checksum in manifest.tokenizer_files.items():
            _of_type(str, checksum, f"tokenizer_files.{name}", "a text")
        for reason, number in manifest.rejects.items():
            _count(number, f"rejects.{reason}")
        _count(manifest.engine.get("redone_tasks", 0), "engine.redone_tasks")
    except _WrongPartError as wrong:
        raise DamagedManifestError(
            f"the corpus manifest is damaged at {wrong.where}",
            where=path,
            got=wrong.got,
            expected=wrong.expected,
            fix=RESTORE,
        ) from None
    if manifest.fingerprint != value.get("fingerprint"):
        raise DamagedManifestError(
            "the corpus manifest was changed after the corpus was sealed",
            where=path,
            got=f"content whose fingerprint is {manifest.fingerprint}",
            expected=value.get("fingerprint", "a fingerprint"),
            fix=RESTORE,
        )
    return manifest


class _WrongPartError(Exception):
    """A part of a manifest that is not what it must be; `where` is its dotted place."""

    def __init__(self, where: str, got: object, expected: str) -> None:
        super().__init__(where)
        self.where, self.got, self.expected = where, repr(got)[:100], expected


_Value = TypeVar("_Value")


def _of_type(kind: type[_Value], value: object, where: str, expected: str) -> _Value:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _WrongPartError(where, value, expected)
    return value


def _count(value: object, where: str) -> None:
    if _of_type(int, value, where, "a count") < 0:
        raise _WrongPartError(where, value, "a count")


def _record(kind: type[_Value], value: object, where: str) -> _Value:
    """Return a dataclass whose fields are texts, counts, or counts that may be null."""
    given = _of_type(dict, value, where, "an object")
    arguments = {}
    for field_ in dataclasses.fields(kind):  # type: ignore[arg-type]
        value, place = given.get(field_.name), f"{where}.{field_.name}"
        if field_.type == "str":
            _of_type(str, value, place, "a text")
        elif not (field_.type == "int | None" and value is None):
            _count(value, place)
        arguments[field_.name] = value
    return kind(**arguments)


def _split(name: str, value: object) -> SplitInfo:
    where = f"splits.{name}"
    if not _SPLIT_NAME.fullmatch(name) or name in (TOKENIZER_FOLDER, BUILD_FOLDER, REJECTS_FOLDER):
        raise _WrongPartError(where, name, "a name that can be a folder of a split")
    given = _of_type(dict, value, where, "an object")
    listed = _of_type(list, given.get("shards"), f"{where}.shards", "a list")
    shards = tuple(_shard(shard, f"{where}.shards[{number}]") for number, shard in enumerate(listed))
    if len({shard.name for shard in shards}) != len(shards):
        raise _WrongPartError(f"{where}.shards", "a name twice", "each shard once")
    split = SplitInfo.of(shards)
    for total in ("num_tokens", "num_documents", "num_bytes", "max_token_id"):
        if given.get(total) != getattr(split, total):
            raise _WrongPartError(
                f"{where}.{total}", given.get(total), f"{getattr(split, total)}, as its shards make it"
            )
    return split


def _shard(value: object, where: str) -> ShardInfo:
    shard = _record(ShardInfo, value, where)
    if not _SHARD_NAME.fullmatch(shard.name):
        raise _WrongPartError(f"{where}.name", shard.name, "shard-TTTTT-PPP")
    for name in ("tokens_checksum", "ends_checksum"):
        if not _CHECKSUM.fullmatch(getattr(shard, name)):
            raise _WrongPartError(f"{where}.{name}", getattr(shard, name), "xxh3: and 32 hex digits")
    if not 0 < shard.num_documents <= shard.num_tokens:
        raise _WrongPartError(
            f"{where}.num_documents", shard.num_documents, f"from 1 to {shard.num_tokens}, its tokens"
        )
    return shard


def _no_corpus(corpus: Path) -> CorpusError:
    if not corpus.exists():
        return CorpusError("there is no such corpus folder", where=corpus, fix="Check the path")
    if (corpus / BUILD_FOLDER).is_dir():
        return CorpusError(
            "the corpus is not finished: its build stopped before it was sealed",
            where=corpus,
            fix="Run the same flame-preprocess build command again: it continues where it stopped",
        )
    return CorpusError(
        "the folder is no corpus",
        where=corpus,
        got=f"no {MANIFEST}",
        fix="Make one with flame-preprocess build",
    )
