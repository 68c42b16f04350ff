"""Token files as Megatron and datatrove write them, and their way into a corpus and back."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flame.preprocess.convert import convert
from flame.preprocess.convert_config import ConvertOptions
from flame.shards.manifest import Manifest, read_manifest

FORMATS = ("megatron", "datatrove")
Documents = Sequence[Sequence[int]]


def write_megatron(prefix: Path, documents: Sequence[Documents], dtype: str = "uint16") -> Path:
    """Write documents, each a list of sequences; returns the token file."""
    code = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}[dtype]
    sequences = [sequence for document in documents for sequence in document]
    ids = np.array([token for sequence in sequences for token in sequence], dtype=dtype)
    lengths = np.array([len(sequence) for sequence in sequences], dtype="<i4")
    pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * ids.itemsize
    indices = np.cumsum([0, *map(len, documents)], dtype="<i8")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(prefix.name + ".bin").write_bytes(ids.tobytes())
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(indices))
    prefix.with_name(prefix.name + ".idx").write_bytes(
        head + lengths.tobytes() + pointers.astype("<i8").tobytes() + indices.tobytes()
    )
    return prefix.with_name(prefix.name + ".bin")


def write_datatrove(prefix: Path, documents: Documents, dtype: str = "uint16", metadata: str | None = None) -> Path:
    """Write documents; returns the token file."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    tokens = prefix.with_name(prefix.name + ".ds")
    tokens.write_bytes(np.array([token for document in documents for token in document], dtype=dtype).tobytes())
    tokens.with_name(tokens.name + ".index").write_bytes(np.cumsum([*map(len, documents)], dtype="<u8").tobytes())
    if metadata is not None:
        tokens.with_name(tokens.name + ".metadata").write_text(metadata)
    return tokens


def write(form: str, prefix: Path, documents: Documents, dtype: str = "uint16") -> Path:
    if form == "megatron":
        return write_megatron(prefix, [[document] for document in documents], dtype)
    return write_datatrove(prefix, documents, dtype)


def run(form: str, place: Path, output: Path, tok: Path, **options: Any) -> Manifest:
    chosen = {"no_shuffle": True, "num_workers": 1, **options}
    assert convert(ConvertOptions(from_=form, input=place, tokenizer=tok, output=output, **chosen)) == 0
    return read_manifest(output)


def leave(form: str, corpus: Path, output: Path, **options: Any) -> None:
    assert convert(ConvertOptions(to=form, corpus=corpus, output=output, **options)) == 0


def put(path: Path, offset: int, kind: str, value: int) -> None:
    """Overwrite one number of a file."""
    data = bytearray(path.read_bytes())
    struct.pack_into(kind, data, offset, value)
    path.write_bytes(data)
