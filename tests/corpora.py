"""Sealed corpora of given token lists, for tests."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from flame.shards.fingerprint import tokenizer_fingerprint
from flame.shards.format import TOKENIZER_FOLDER
from flame.shards.manifest import Manifest, SplitInfo, TokenizerInfo, write_manifest
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
    schema = pa.schema(PROVENANCE_FIELDS) if provenance else None
    splits = {}
    for name, lists in {"train": documents, "val": val}.items():
        if not lists:
            continue
        writer = SplitWriter(folder, name, task=0, shard_tokens=shard_tokens, docs_schema=schema)
        for row, tokens in enumerate(lists):
            ids = np.array([*tokens, eos_id], dtype=np.uint32)
            docs = pa.table({"source_file": [f"{name}.jsonl"], "row": [row], "num_bytes": [len(tokens)]})
            lengths = np.array([len(ids)])
            if provenance:
                writer.append(ids, lengths, docs)
            else:
                writer.append(ids, lengths, num_bytes=np.array([len(tokens)]))
        splits[name] = SplitInfo.of(tuple(writer.finish()))
    tokenizer_json = b"{}"
    if tokenizer is not None:
        shutil.copytree(tokenizer, folder / TOKENIZER_FOLDER)
        tokenizer_json = (tokenizer / "tokenizer.json").read_bytes()
    info = TokenizerInfo(
        fingerprint=tokenizer_fingerprint(
            tokenizer_json, bos_id=None, eos_id=eos_id, bos="never", special_text="plain"
        ),
        vocab_size=vocab_size,
        bos_id=None,
        eos_id=eos_id,
        bos="never",
        special_text="plain",
    )
    write_manifest(folder, Manifest(tokenizer=info, splits=splits))
    return folder
