"""Fingerprints: what a tokenizer is, and what a corpus holds, whoever built it, where and when."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from flame.errors import TokenizerError
from flame.files import sha256_of_json
from flame.shards.format import FORMAT_VERSION


class HashedShard(Protocol):
    """What a corpus fingerprint reads of a shard."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_documents(self) -> int: ...
    @property
    def tokens_checksum(self) -> str: ...
    @property
    def ends_checksum(self) -> str: ...


def tokenizer_fingerprint(
    tokenizer_json: bytes | dict[str, Any], *, bos_id: int | None, eos_id: int, bos: str, special_text: str
) -> str:
    """Return the fingerprint of a tokenizer and the policies it is used under.

    `tokenizer_json` is the content of tokenizer.json, as it lies there or parsed already (11 MB take 0.2 s), made
    canonical here. Raises `TokenizerError` if it is no JSON.
    """
    try:
        tokenizer: Any = json.loads(tokenizer_json) if isinstance(tokenizer_json, bytes) else tokenizer_json
        return sha256_of_json(
            {"tokenizer": tokenizer, "bos_id": bos_id, "eos_id": eos_id, "bos": bos, "special_text": special_text}
        )
    except ValueError as error:  # no JSON, NaN, or half a surrogate pair
        raise TokenizerError(f"tokenizer.json is no JSON: {error}") from error


def corpus_fingerprint(
    *,
    tokenizer_fingerprint: str,
    bos_id: int | None,
    eos_id: int,
    splits: Mapping[str, Sequence[HashedShard]],
) -> str:
    """Return the fingerprint of a corpus: its content, shard by shard, and nothing of how it was made."""
    return sha256_of_json(
        {
            "format_version": FORMAT_VERSION,
            "tokenizer": tokenizer_fingerprint,
            "bos_id": bos_id,
            "eos_id": eos_id,
            "splits": [
                [
                    name,
                    [[s.num_tokens, s.num_documents, s.tokens_checksum, s.ends_checksum] for s in shards],
                ]
                for name, shards in sorted(splits.items())
            ],
        }
    )
