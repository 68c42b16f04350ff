"""docs.parquet: the row of each document, as JSON can say it, and what is wrong with a damaged one."""

from __future__ import annotations

import datetime
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flame.errors import CorpusError
from flame.shards import provenance
from flame.shards.format import docs_path
from flame.shards.manifest import Manifest, SplitInfo, write_manifest
from flame.shards.provenance import as_json
from flame.shards.reader import Corpus, Split
from flame.shards.writer import PROVENANCE_FIELDS, SplitWriter
from tests.corpora import make_corpus, tokenizer_info


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return make_corpus(tmp_path / "corpus", [[1] * (number % 5) for number in range(100)], shard_tokens=50)


def open_train(corpus: Path) -> Split:
    return Corpus.open(corpus).split("train")


def first_docs(corpus: Path) -> Path:
    return docs_path(corpus, "train", "shard-00000-000")


def test_each_document_has_its_row(corpus: Path) -> None:
    split = open_train(corpus)
    assert len(split.shards) == 6
    for document in [*range(100), 99, 0, 50]:
        expected = {"source_file": "train.jsonl", "row": document, "num_bytes": document % 5}
        assert split.provenance(document) == expected


def test_rows_beyond_the_first_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "ROW_GROUP_ROWS", 7)
    corpus = make_corpus(tmp_path / "corpus", [[1]] * 50, shard_tokens=1000)
    assert pq.ParquetFile(first_docs(corpus)).metadata.num_row_groups == 8
    split = open_train(corpus)
    assert [split.provenance(document)["row"] for document in (0, 6, 7, 8, 49, 48, 13, 0)] == [
        0,
        6,
        7,
        8,
        49,
        48,
        13,
        0,
    ]


def test_large_rows_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "WAITING_BYTES", 10_000)
    schema = pa.schema([*PROVENANCE_FIELDS, pa.field("html", pa.string())])
    writer = SplitWriter(tmp_path, "train", task=0, shard_tokens=1000, docs_schema=schema)
    for row in range(0, 40, 2):
        columns = {"source_file": ["a"] * 2, "row": [row, row + 1], "num_bytes": [1] * 2, "html": [str(row) * 2000] * 2}
        writer.append(np.zeros(2, np.uint32), np.ones(2, np.int64), pa.table(columns))
    writer.finish()
    file = pq.ParquetFile(first_docs(tmp_path))
    assert 5 < file.metadata.num_row_groups < 20
    assert file.metadata.serialized_size < 20_000  # no such column's least and largest value in the footer
    assert file.read().column("row").to_pylist() == list(range(40))
    assert file.read().column("html").to_pylist() == [str(row - row % 2) * 2000 for row in range(40)]


def test_neighbours_come_from_one_read(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    row_group_of = provenance._row_group_of

    def spy(path: Path, row: int, num_documents: int) -> tuple[int, pa.Table]:
        reads.append(row)
        return row_group_of(path, row, num_documents)

    monkeypatch.setattr(provenance, "_row_group_of", spy)
    split = open_train(corpus)
    for document in range(split.shards[0].num_documents + 1):
        split.provenance(document)
    assert reads == [0, 0]


def test_a_corpus_without_provenance_has_none(tmp_path: Path) -> None:
    split = open_train(make_corpus(tmp_path / "corpus", [[1], [2]], provenance=False))
    assert not list((tmp_path / "corpus").rglob("*.parquet"))
    assert split.provenance(1) == {}
    assert split.num_bytes == 2


def test_kept_columns_of_any_type_can_be_said_in_json(tmp_path: Path) -> None:
    when = datetime.datetime(2024, 5, 17, 12, 30)
    kept = pa.table(
        {
            "source_file": ["a.parquet", "b.parquet"],
            "row": pa.array([2**64 - 1, 0], pa.uint64()),
            "num_bytes": [2**32 - 1, 0],
            "score": [math.nan, 0.5],
            "when": [when, None],
            "nanoseconds": pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns")),
            "raw": [b"\xff\x00a", b""],
            "tags": [["é", None], []],
            "meta": [{"a": 1.5, "b": math.inf}, None],
        }
    )
    schema = pa.schema([*PROVENANCE_FIELDS, *[kept.schema.field(name) for name in kept.column_names[3:]]])
    writer = SplitWriter(tmp_path, "train", task=0, shard_tokens=10, docs_schema=schema)
    writer.append(np.array([1, 0, 0], np.uint32), np.array([2, 1]), kept)
    splits = {"train": SplitInfo.of(tuple(writer.finish()))}
    write_manifest(tmp_path, Manifest(tokenizer=tokenizer_info(b"{}", 0, 9), splits=splits))
    split = open_train(tmp_path)
    assert split.num_bytes == 2**32 - 1
    assert json.loads(json.dumps(split.provenance(0), allow_nan=False)) == {
        "source_file": "a.parquet",
        "row": 2**64 - 1,
        "num_bytes": 2**32 - 1,
        "score": None,
        "when": "2024-05-17T12:30:00",
        "nanoseconds": "2023-11-14T22:13:20.123456789",
        "raw": "\\xff\x00a",
        "tags": ["é", None],
        "meta": {"a": 1.5, "b": None},
    }
    assert split.provenance(1)["score"] == 0.5
    assert as_json(True) is True


@pytest.mark.parametrize("column", ["row", "num_bytes"])
def test_a_number_that_does_not_fit_its_column_is_an_error(tmp_path: Path, column: str) -> None:
    values = {"source_file": ["a"], "row": [1], "num_bytes": [1], column: [-1]}
    writer = SplitWriter(tmp_path, "train", task=0, shard_tokens=10, docs_schema=pa.schema(PROVENANCE_FIELDS))
    with pytest.raises(pa.ArrowInvalid):
        writer.append(np.array([0], np.uint32), np.array([1]), pa.table(values))
    writer.abort()
    assert list((tmp_path / "train").iterdir()) == []


def test_a_flipped_bit_is_an_error_not_a_wrong_row(corpus: Path) -> None:
    path = first_docs(corpus)
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorpusError, match="provenance of a shard cannot be read") as caught:
        open_train(corpus).provenance(0)
    assert str(path) in str(caught.value)


def test_a_cut_file_and_another_shards_file_are_named(corpus: Path) -> None:
    split = open_train(corpus)
    path, other = first_docs(corpus), docs_path(corpus, "train", split.shards[1].name)
    assert split.shards[0].num_documents != split.shards[1].num_documents
    path.write_bytes(other.read_bytes())
    expected = f"got {split.shards[1].num_documents} rows; expected {split.shards[0].num_documents} rows"
    with pytest.raises(CorpusError, match=expected):
        split.provenance(0)
    os.truncate(path, 100)
    with pytest.raises(CorpusError, match="cannot be read"):
        split.provenance(0)
    path.unlink()
    path.mkdir()
    with pytest.raises(CorpusError, match="cannot be read"):
        split.provenance(0)


def test_reading_tokens_never_loads_pyarrow(corpus: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from flame.shards.reader import Corpus; "
        f"split = Corpus.open(Path({str(corpus)!r})).split('train'); split.check(); split.read(0, 5); "
        "sys.exit('pyarrow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
