"""Real web documents with real tokenizers: nothing lost, ids of the reference, texts back. Skips without the data."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from flame.shards.manifest import Manifest, read_manifest
from tests.builds import documents_of, rows_of, run_build

# Up to the tokenizer's own normalisation, a text comes back as it was.
NORMAL = {"gpt2": str, "qwen3": lambda text: unicodedata.normalize("NFC", text), "mistral_v1": str}
CHECKED = 500


@pytest.mark.slow
@pytest.mark.shared_data
@pytest.mark.parametrize("name", NORMAL)
def test_real_documents_keep_their_ids_and_texts(shared_data: Path, tmp_path: Path, name: str) -> None:
    manifest = build(shared_data, tmp_path / "out", name, val_fraction=0.005)
    assert len(manifest.splits["train"].shards) > 1
    assert manifest.splits["val"].num_documents > 0
    assert (name == "mistral_v1") == (manifest.tokenizer.bos_id is not None)
    rows = sum(pq.read_metadata(path).num_rows for path in (shared_data / "web_sample").glob("*.parquet"))
    assert check_documents(shared_data, tmp_path / "out", name, manifest) == rows


def build(shared_data: Path, output: Path, name: str, **options: Any) -> Manifest:
    result = run_build(shared_data / "web_sample", output, shared_data / "tokenizers" / name, **options)
    assert result.returncode == 0, result.stderr
    return read_manifest(output)


def check_documents(shared_data: Path, output: Path, name: str, manifest: Manifest) -> int:
    """Check every document's place and size, and the ids and texts of some; returns documents and rejects together."""
    sources: dict[str, pa.ChunkedArray] = {}
    reference = Tokenizer.from_file(str(shared_data / "tokenizers" / name / "tokenizer.json"))
    reference.encode_special_tokens = True
    bos = [] if manifest.tokenizer.bos_id is None else [manifest.tokenizer.bos_id]
    seen: set[tuple[str, int]] = set()
    for split, info in manifest.splits.items():
        rows = [row for path, rows in rows_of(output).items() if path.startswith(split) for row in rows]
        documents = documents_of(output, split)
        assert len(rows) == len(documents) == info.num_documents
        for row in rows:
            path = row["source_file"]
            if path not in sources:
                sources[path] = pq.read_table(path, columns=["text"]).column("text")
            assert row["num_bytes"] == len(sources[path][row["row"]].as_py().encode())
            assert (path, row["row"]) not in seen, "each document once"
            seen.add((path, row["row"]))
        for i in random.Random(0).sample(range(len(rows)), min(CHECKED, len(rows))):
            text = sources[rows[i]["source_file"]][rows[i]["row"]].as_py()
            ids = documents[i]
            assert ids == [*bos, *reference.encode(text, add_special_tokens=False).ids, manifest.tokenizer.eos_id]
            assert reference.decode(ids[len(bos) : -1], skip_special_tokens=False) == NORMAL[name](text)
    return len(seen) + sum(manifest.rejects.values())
