"""Real web documents with real tokenizers: nothing lost, ids of the reference, texts back. Skips without the data."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from flame.shards.manifest import read_manifest
from tests.builds import documents_of, rows_of, run_build

DOCUMENTS = 1500
# Up to the tokenizer's own normalisation, a text comes back as it was.
NORMAL = {"gpt2": str, "qwen3": lambda text: unicodedata.normalize("NFC", text), "mistral_v1": str}


@pytest.mark.shared_data
@pytest.mark.parametrize("name", NORMAL)
def test_real_documents_keep_their_ids_and_texts(shared_data: Path, tmp_path: Path, name: str) -> None:
    tokenizer = shared_data / "tokenizers" / name
    output = tmp_path / "out"
    result = run_build(
        shared_data / "web_sample",
        output,
        tokenizer,
        limit_documents=DOCUMENTS,
        val_fraction=0.01,
        shard_tokens=400_000,
    )
    assert result.returncode == 0, result.stderr
    manifest = read_manifest(output)
    written = sum(split.num_documents for split in manifest.splits.values())
    assert written + sum(manifest.rejects.values()) == DOCUMENTS
    assert len(manifest.splits["train"].shards) > 1
    assert manifest.splits["val"].num_documents > 0

    source = pq.read_table(shared_data / "web_sample" / "000_00000.parquet", columns=["text"]).column("text")
    reference = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    reference.encode_special_tokens = True
    bos = [] if manifest.tokenizer.bos_id is None else [manifest.tokenizer.bos_id]
    assert (name == "mistral_v1") == bool(bos)
    sizes = set()
    for split in manifest.splits:
        rows = [row for path, rows in rows_of(output).items() if path.startswith(split) for row in rows]
        documents = list(zip(rows, documents_of(output, split), strict=True))
        sizes |= {(row["row"], row["num_bytes"]) for row in rows}
        for row, ids in random.Random(0).sample(documents, min(500, len(documents))):
            text = source[row["row"]].as_py()
            assert ids == [*bos, *reference.encode(text, add_special_tokens=False).ids, manifest.tokenizer.eos_id]
            assert reference.decode(ids[len(bos) : -1], skip_special_tokens=False) == NORMAL[name](text)
    assert sizes == {(i, len(source[i].as_py().encode())) for i in range(DOCUMENTS)}, "each document once"
