"""Fingerprints: pinned values, what changes them, and what does not."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest

from flame.errors import TokenizerError
from flame.shards.fingerprint import corpus_fingerprint, tokenizer_fingerprint
from flame.shards.manifest import ShardInfo

SHARD = ShardInfo(
    name="shard-00000-000",
    num_tokens=5,
    num_documents=2,
    num_bytes=3,
    max_token_id=7,
    tokens_checksum="xxh3:e4201f8fac4e83554215ec679c0c7de3",
    ends_checksum="xxh3:8a6f12bd7e2e1d9b53ac00f45034b4be",
)
POLICIES = {"bos_id": None, "eos_id": 0, "bos": "never", "special_text": "plain"}


def fingerprint(*shards: ShardInfo, bos_id: int | None = None, eos_id: int = 0, split: str = "train") -> str:
    return corpus_fingerprint(
        tokenizer_fingerprint="sha256:0", bos_id=bos_id, eos_id=eos_id, splits={split: list(shards)}
    )


def test_a_tokenizer_fingerprint_is_the_sha256_of_this_json() -> None:
    text = '{"bos":"never","bos_id":null,"eos_id":0,"special_text":"plain","tokenizer":{"a":"é","b":1}}'
    expected = "sha256:" + hashlib.sha256(text.encode("utf-8")).hexdigest()
    assert tokenizer_fingerprint(b'{"b": 1,\n "a": "\\u00e9"}', **POLICIES) == expected


@pytest.mark.parametrize("changed", [{"bos_id": 1}, {"eos_id": 1}, {"bos": "always"}, {"special_text": "parsed"}])
def test_ids_and_policies_are_part_of_a_tokenizer(changed: dict[str, object]) -> None:
    assert tokenizer_fingerprint(b"{}", **POLICIES) != tokenizer_fingerprint(b"{}", **{**POLICIES, **changed})


@pytest.mark.parametrize("content", [b"{", b'{"a": NaN}', b'{"a": "\\ud800"}', b"\xff"])
def test_what_is_no_json_is_refused(content: bytes) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is no JSON"):
        tokenizer_fingerprint(content, **POLICIES)


def test_a_corpus_fingerprint_is_the_sha256_of_this_json() -> None:
    text = (
        '{"bos_id":null,"eos_id":0,"format_version":1,"splits":[["train",[[5,2,'
        '"xxh3:e4201f8fac4e83554215ec679c0c7de3","xxh3:8a6f12bd7e2e1d9b53ac00f45034b4be"]]],["val",[]]],'
        '"tokenizer":"sha256:0"}'
    )
    assert json.loads(text)
    made = corpus_fingerprint(
        tokenizer_fingerprint="sha256:0", bos_id=None, eos_id=0, splits={"val": [], "train": [SHARD]}
    )
    assert made == "sha256:" + hashlib.sha256(text.encode("utf-8")).hexdigest()


@pytest.mark.parametrize("field", ["num_tokens", "num_documents", "tokens_checksum", "ends_checksum"])
def test_content_changes_a_corpus_fingerprint(field: str) -> None:
    value = getattr(SHARD, field)
    changed = dataclasses.replace(SHARD, **{field: value + 1 if isinstance(value, int) else value[::-1]})
    assert fingerprint(changed) != fingerprint(SHARD)


def test_policies_order_and_split_change_a_corpus_fingerprint() -> None:
    other = dataclasses.replace(SHARD, num_tokens=9)
    made = [
        fingerprint(SHARD, other),
        fingerprint(other, SHARD),
        fingerprint(SHARD, other, bos_id=1),
        fingerprint(SHARD, other, eos_id=1),
        fingerprint(SHARD, other, split="val"),
    ]
    assert len(set(made)) == len(made)


def test_names_of_shards_do_not_change_a_corpus_fingerprint() -> None:
    assert fingerprint(dataclasses.replace(SHARD, name="shard-00009-000", num_bytes=9)) == fingerprint(SHARD)
