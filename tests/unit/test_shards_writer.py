"""Writing shards: golden bytes, where a shard ends, and what a failed or aborted one leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from flame.shards.format import END_DTYPE, HEADER_BYTES, TOKEN_DTYPE, npy_header
from flame.shards.manifest import ShardInfo
from flame.shards.writer import PROVENANCE_FIELDS, ShardWriter, SplitWriter

SCHEMA = pa.schema([*PROVENANCE_FIELDS, pa.field("url", pa.string())])


def docs(num_documents: int, first: int = 0) -> pa.Table:
    rows = range(first, first + num_documents)
    return pa.table(
        {
            "row": list(rows),
            "source_file": ["a.parquet"] * num_documents,
            "num_bytes": [row + 1 for row in rows],
            "url": [f"https://x/{row}" for row in rows],
            "left_out": [0] * num_documents,
        }
    )


def write(folder: Path, lengths: list[int], shard_tokens: int, cuts: list[int] | None = None) -> list[ShardInfo]:
    """Write documents of these lengths, cut into calls of append before the documents in `cuts`."""
    writer = SplitWriter(folder, "train", task=3, shard_tokens=shard_tokens, docs_schema=SCHEMA)
    bounds = sorted({0, len(lengths), *(cuts or [])})
    tokens = np.arange(sum(lengths), dtype=np.uint32)
    for first, last in pairwise(bounds):
        start = sum(lengths[:first])
        part = lengths[first:last]
        writer.append(tokens[start : start + sum(part)], np.array(part), docs(len(part), first))
    return writer.finish()


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_shard_is_these_bytes(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "train", "shard-00000-000", None)
    writer.append(np.array([5, 6, 0], np.uint32), np.array([3]), num_bytes=7)
    writer.append(np.array([0, 70000, 0], np.uint32), np.array([1, 2]), num_bytes=4)
    info = writer.finish()
    assert all_files(tmp_path / "train") == {
        "shard-00000-000.tokens.npy": npy_header(TOKEN_DTYPE, 6)
        + bytes.fromhex("05000000 06000000 00000000 00000000 70110100 00000000"),
        "shard-00000-000.ends.npy": npy_header(END_DTYPE, 3)
        + bytes.fromhex("0300000000000000 0400000000000000 0600000000000000"),
    }
    assert info == ShardInfo(
        name="shard-00000-000",
        num_tokens=6,
        num_documents=3,
        num_bytes=11,
        max_token_id=70000,
        tokens_checksum="xxh3:d8f32987d63158375d0aa64c456c89ec",
        ends_checksum="xxh3:0bb58980dbd4e987360d76816a0e409f",
    )


def test_numpy_alone_maps_a_shard(tmp_path: Path) -> None:
    (info,) = write(tmp_path, [3, 1, 4], 100)
    tokens = np.load(tmp_path / "train" / f"{info.name}.tokens.npy", mmap_mode="r")
    ends = np.load(tmp_path / "train" / f"{info.name}.ends.npy", mmap_mode="r")
    assert (tokens.dtype, tokens.tolist()) == (np.uint32, list(range(8)))
    assert (ends.dtype, ends.tolist()) == (np.uint64, [3, 4, 8])


@pytest.mark.parametrize(
    ("lengths", "shard_tokens", "expected"),
    [
        ([10], 10, [10]),
        ([9, 1, 1], 10, [10, 1]),
        ([9, 2, 1], 10, [11, 1]),
        ([4, 4, 4, 4], 8, [8, 8]),
        ([1] * 5, 1, [1] * 5),
        ([10_001, 5, 999, 1], 1000, [10_001, 1004, 1]),
        ([5, 10_001, 5], 1000, [10_006, 5]),
        ([7], 2**28, [7]),
        ([], 10, []),
    ],
)
def test_a_shard_ends_at_the_first_document_end_at_or_past_its_size(
    tmp_path: Path, lengths: list[int], shard_tokens: int, expected: list[int]
) -> None:
    shards = write(tmp_path, lengths, shard_tokens)
    assert [shard.num_tokens for shard in shards] == expected
    assert [shard.name for shard in shards] == [f"shard-00003-{part:03d}" for part in range(len(expected))]
    assert sum(shard.num_documents for shard in shards) == len(lengths)
    assert sum(shard.num_bytes for shard in shards) == sum(range(1, len(lengths) + 1))


@given(
    lengths=st.lists(st.integers(1, 30), max_size=40),
    shard_tokens=st.integers(1, 80),
    cuts=st.lists(st.integers(0, 40), max_size=8),
)
def test_the_files_are_the_same_however_they_are_appended(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], shard_tokens: int, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("x")
    whole = write(folder / "whole", lengths, shard_tokens)
    cut = write(folder / "cut", lengths, shard_tokens, [cut for cut in cuts if cut <= len(lengths)])
    assert cut == whole
    assert all_files(folder / "cut") == all_files(folder / "whole")


def test_checksums_are_of_the_payload_alone(tmp_path: Path) -> None:
    (info,) = write(tmp_path, [3, 1, 4], 100)
    for suffix, checksum in (("tokens", info.tokens_checksum), ("ends", info.ends_checksum)):
        payload = (tmp_path / "train" / f"{info.name}.{suffix}.npy").read_bytes()[HEADER_BYTES:]
        assert checksum == "xxh3:" + xxhash.xxh3_128_hexdigest(payload)


def test_provenance_has_a_row_a_document_in_order(tmp_path: Path) -> None:
    shards = write(tmp_path, [1] * 50_000, 30_000, cuts=[3, 20_000, 20_001])
    tables = [pq.read_table(tmp_path / "train" / f"{shard.name}.docs.parquet") for shard in shards]
    assert [table.num_rows for table in tables] == [30_000, 20_000]
    assert tables[0].schema.equals(SCHEMA)
    assert pa.concat_tables(tables).equals(docs(50_000).select(SCHEMA.names).cast(SCHEMA))
    metadata = pq.ParquetFile(tmp_path / "train" / f"{shards[0].name}.docs.parquet").metadata
    column = metadata.row_group(0).column(0)
    assert (column.path_in_schema, column.compression) == ("source_file", "ZSTD")
    assert "RLE_DICTIONARY" in column.encodings


def test_what_is_being_written_has_no_final_name(tmp_path: Path) -> None:
    writer = SplitWriter(tmp_path, "train", task=0, shard_tokens=10, docs_schema=SCHEMA)
    writer.append(np.arange(15, dtype=np.uint32), np.array([10, 5]), docs(2))
    names = {path.name for path in (tmp_path / "train").iterdir()}
    done = {f"shard-00000-000.{suffix}" for suffix in ("tokens.npy", "ends.npy", "docs.parquet")}
    begun = {f"shard-00000-001.{suffix}.tmp" for suffix in ("tokens.npy", "ends.npy", "docs.parquet")}
    assert names == done | begun
    writer.abort()
    assert {path.name for path in (tmp_path / "train").iterdir()} == done
    writer.abort()


def test_tokens_get_their_name_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    rename = os.rename

    def spy(source: Path, target: Path) -> None:
        order.append(Path(target).name)
        assert not list((tmp_path / "train").glob("*.npy.tmp")) or len(order) <= 3
        rename(source, target)

    monkeypatch.setattr(os, "rename", spy)
    write(tmp_path, [3], 10)
    assert order == [f"shard-00003-000.{suffix}" for suffix in ("docs.parquet", "ends.npy", "tokens.npy")]


def test_lengths_must_be_those_of_the_tokens(tmp_path: Path) -> None:
    writer = SplitWriter(tmp_path, "train", task=0, shard_tokens=10, docs_schema=None)
    for lengths in ([2], [4], [3, 0], [4, -1], []):
        with pytest.raises(AssertionError):
            writer.append(np.arange(3, dtype=np.uint32), np.array(lengths, dtype=np.int64), num_bytes=np.array([1]))
    with pytest.raises(AssertionError, match="own type"):
        writer.append(np.arange(3, dtype=np.int64), np.array([3]), num_bytes=np.array([1]))  # type: ignore[arg-type]
    writer.abort()


# Stands for a full disk: the kernel refuses to let a file of this process grow (EFBIG where a disk says ENOSPC).
FULL_DISK = """
import resource, signal, sys
import numpy as np, pyarrow as pa
from pathlib import Path
from flame.errors import FlameError
from flame.shards.writer import PROVENANCE_FIELDS, SplitWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder, limit, n, kept = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "kept"
rng = np.random.default_rng(0)
schema = pa.schema([*PROVENANCE_FIELDS, ("url", pa.string())]) if kept else None
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
writer = SplitWriter(folder, "train", task=0, shard_tokens=2**28, docs_schema=schema)
try:
    for batch in range(20):
        urls = [str(value) for value in rng.integers(0, 2**62, n)]
        table = pa.table({"source_file": ["a"] * n, "row": range(n), "num_bytes": [1] * n, "url": urls})
        tokens, ones = rng.integers(0, 2**16, n, dtype=np.uint32), np.ones(n, np.int64)
        writer.append(tokens, ones, table if kept else None, num_bytes=ones)
    writer.finish()
except FlameError as error:
    writer.abort()
    print(error)
    sys.exit(1)
"""


@pytest.mark.parametrize(
    ("limit", "batch", "provenance", "where"),
    [
        (3_000_000, 40_000, "none", "ends.npy"),  # while it is written: the ends grow fastest
        (1_000, 100, "none", "tokens.npy"),  # all of it waits in buffers until the end
        (3_000_000, 20_000, "kept", "docs.parquet"),
        (17_000, 100, "kept", "docs.parquet"),  # its last row group
    ],
)
def test_a_full_disk_is_named_and_leaves_nothing(
    tmp_path: Path, limit: int, batch: int, provenance: str, where: str
) -> None:
    arguments = [str(tmp_path), str(limit), str(batch), provenance]
    run = subprocess.run([sys.executable, "-c", FULL_DISK, *arguments], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (1, "")
    assert "no space left on the device" in run.stdout and f"shard-00000-000.{where}" in run.stdout
    assert "expected at least" in run.stdout and "bytes for this write" in run.stdout
    assert list((tmp_path / "train").iterdir()) == []
