"""A small sealed corpus to damage, and what `verify` finds in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from flame.preprocess.verify import find_damage
from flame.shards.format import HEADER_BYTES, ends_path, tokens_path
from flame.shards.manifest import SplitInfo, read_manifest, write_manifest
from tests.corpora import make_corpus
from tests.tokenizers import eos_of

DOCUMENTS = [[(number + place) % 250 + 5 for place in range(number % 9)] for number in range(120)]


def sealed_corpus(folder: Path, tokenizer: Path) -> Path:
    """Three shards of `DOCUMENTS`, and a held-out document."""
    eos_id = eos_of(tokenizer)
    return make_corpus(folder, DOCUMENTS, val=[[7, 8]], eos_id=eos_id, shard_tokens=200, tokenizer=tokenizer)


def findings(corpus: Path) -> list[str]:
    return [str(finding) for finding in find_damage(corpus, read_manifest(corpus))]


def poke(path: Path, place: int, value: int, dtype: str = "<u4") -> None:
    """Overwrite one value of a file, counted from the end of its header."""
    item = np.dtype(dtype)
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES + place * item.itemsize : HEADER_BYTES + (place + 1) * item.itemsize] = np.array(
        [value], item
    ).tobytes()
    path.write_bytes(content)


def reseal(corpus: Path) -> None:
    """Seal the corpus anew as it lies there, so that only its content can be wrong."""
    manifest = read_manifest(corpus)
    splits = {}
    for name, split in manifest.splits.items():
        shards = []
        for shard in split.shards:
            tokens, ends = (path(corpus, name, shard.name).read_bytes()[128:] for path in (tokens_path, ends_path))
            shards.append(
                dataclasses.replace(
                    shard,
                    max_token_id=int(np.frombuffer(tokens, "<u4").max()),
                    tokens_checksum="xxh3:" + xxhash.xxh3_128_hexdigest(tokens),
                    ends_checksum="xxh3:" + xxhash.xxh3_128_hexdigest(ends),
                )
            )
        splits[name] = SplitInfo.of(tuple(shards))
    write_manifest(corpus, dataclasses.replace(manifest, splits=splits))


def path_of(corpus: Path, kind: Callable[[Path, str, str], Path], shard: int = 1) -> Path:
    return kind(corpus, "train", f"shard-00000-{shard:03d}")
