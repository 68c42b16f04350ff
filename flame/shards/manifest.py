"""The sealed truth of a corpus: manifest.json. A corpus exists if and only if this file does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flame.errors import CorpusError
from flame.files import write_json
from flame.shards.fingerprint import corpus_fingerprint
from flame.shards.format import BUILD_FOLDER, FORMAT_VERSION, MANIFEST


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
    """The content of manifest.json. What is not in the fingerprint says how the corpus was made."""

    tokenizer: TokenizerInfo
    splits: Mapping[str, SplitInfo]
    rejects: Mapping[str, int] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    built: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
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
            "splits": {name: dataclasses.asdict(split) for name, split in self.splits.items()},
            "rejects": dict(self.rejects),
            "engine": dict(self.engine),
            "options": dict(self.options),
            "inputs": dict(self.inputs),
            "built": dict(self.built),
        }


def write_manifest(corpus: Path, manifest: Manifest) -> None:
    """Seal a corpus: everything else must be on disk, durably, before."""
    write_json(corpus / MANIFEST, manifest.to_json())


def read_manifest(corpus: Path) -> Manifest:
    """Read and check manifest.json; `CorpusError` where there is none, or it is not one of ours, or was changed."""
    path = corpus / MANIFEST
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _no_corpus(corpus) from error
    except ValueError as error:
        raise CorpusError(f"the corpus manifest is no JSON: {error}", where=path) from error
    version = value.get("format_version") if isinstance(value, dict) else None
    if version != FORMAT_VERSION:
        raise CorpusError(
            "the folder's manifest is not one that this version of Flame reads",
            where=path,
            got=f"format_version {version}",
            expected=f"format_version {FORMAT_VERSION}",
        )
    try:
        manifest = _from_json(value)
    except (KeyError, TypeError, AttributeError) as error:
        raise CorpusError(f"the corpus manifest lacks a part: {error!r}", where=path) from error
    if manifest.fingerprint != value["fingerprint"]:
        raise CorpusError(
            "the corpus manifest was changed after the corpus was sealed",
            where=path,
            got=f"content of the fingerprint {manifest.fingerprint}",
            expected=value["fingerprint"],
            fix="Restore manifest.json from a copy, or build the corpus again",
        )
    return manifest


def _from_json(value: Mapping[str, Any]) -> Manifest:
    return Manifest(
        tokenizer=TokenizerInfo(**value["tokenizer"]),
        splits={
            name: SplitInfo(**{**split, "shards": tuple(ShardInfo(**shard) for shard in split["shards"])})
            for name, split in value["splits"].items()
        },
        **{name: value.get(name, {}) for name in ("rejects", "engine", "options", "inputs", "built")},
    )


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
