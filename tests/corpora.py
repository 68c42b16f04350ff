"""Sealed corpora of given token lists, for tests."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from flame.preprocess.tokenizer_check import tokenizer_files
from flame.shards.fingerprint import tokenizer_fingerprint
from flame.shards.format import TOKENIZER_FOLDER, ends_path, tokens_path
from flame.shards.manifest import Manifest, ShardInfo, SplitInfo, TokenizerInfo, read_manifest, write_manifest
from flame.shards.writer import PROVENANCE_FIELDS, SplitWriter


def make_corpus(
    folder: Path,
    documents: Sequence[Sequence[int]],
    *,
    val: Sequence[Sequence[int]] = (),
    vocab_size: int = 512,
    eos_id: int = 0,
    shard_tokens: int = 1000,
    tokenizer: Path | None = None,
    provenance: bool = True,
) -> Path:
    """Write and seal a corpus of these token lists, each closed by EOS here; `tokenizer` is a folder to copy."""
    splits = {
        name: SplitInfo.of(write_split(folder, name, lists, eos_id, shard_tokens, provenance))
        for name, lists in {"train": documents, "val": val}.items()
        if lists
    }
    tokenizer_json = b"{}"
    if tokenizer is not None:
        shutil.copytree(tokenizer, folder / TOKENIZER_FOLDER)
        tokenizer_json = (tokenizer / "tokenizer.json").read_bytes()
    info = tokenizer_info(tokenizer_json, eos_id, vocab_size)
    write_manifest(folder, Manifest(tokenizer=info, splits=splits, tokenizer_files=tokenizer_files(folder)))
    return folder


def tokenizer_info(tokenizer_json: bytes, eos_id: int, vocab_size: int) -> TokenizerInfo:
    """Return what a manifest says of a tokenizer that adds no BOS."""
    policies = {"bos_id": None, "eos_id": eos_id, "bos": "never", "special_text": "plain"}
    fingerprint = tokenizer_fingerprint(tokenizer_json, **policies)
    return TokenizerInfo(fingerprint=fingerprint, vocab_size=vocab_size, **policies)


def write_split(
    folder: Path, name: str, lists: Sequence[Sequence[int]], eos_id: int, shard_tokens: int, provenance: bool
) -> tuple[ShardInfo, ...]:
    """Write a split's shards; document i has row i of `<split>.jsonl`, and one byte of text a token."""
    schema = pa.schema(PROVENANCE_FIELDS) if provenance else None
    writer = SplitWriter(folder, name, task=0, shard_tokens=shard_tokens, docs_schema=schema)
    tokens = np.array([token for tokens in lists for token in [*tokens, eos_id]], dtype=np.uint32)
    num_bytes = np.array([len(tokens) for tokens in lists])
    docs = pa.table({"source_file": [f"{name}.jsonl"] * len(lists), "row": range(len(lists)), "num_bytes": num_bytes})
    writer.append(tokens, num_bytes + 1, docs if provenance else None, num_bytes=num_bytes)
    return tuple(writer.finish())


def link_shards(folder: Path, number: int, **options: Any) -> list[int]:
    """Make a corpus of `number` shards that are links to one; returns that shard's tokens."""
    make_corpus(folder, [[5, 6, 7], [8]], shard_tokens=100, **options)
    manifest = read_manifest(folder)
    (first,) = manifest.splits["train"].shards
    shards = [dataclasses.replace(first, name=f"shard-{task:05d}-000") for task in range(number)]
    for shard in shards[1:]:
        for path in (tokens_path, ends_path):
            os.link(path(folder, "train", first.name), path(folder, "train", shard.name))
    splits = {"train": SplitInfo.of(tuple(shards))}
    write_manifest(folder, Manifest(tokenizer=manifest.tokenizer, splits=splits))
    return [5, 6, 7, 0, 8, 0]
