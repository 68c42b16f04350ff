"""Reading a corpus: exact at every index, lazy, bounded in descriptors, and never silent about damage."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flame.shards.reader
from flame.errors import CorpusError, UsageError
from flame.shards.format import END_DTYPE, HEADER_BYTES, TOKEN_DTYPE, ends_path, npy_header, tokens_path
from flame.shards.manifest import Manifest, ShardInfo, SplitInfo, read_manifest, write_manifest
from flame.shards.maps import MAX_MAPPED_SHARDS, ShardMaps
from flame.shards.reader import Corpus, Split
from tests.corpora import link_shards, make_corpus, tokenizer_info

DOCUMENTS = [[(31 * number + place) % 500 + 1 for place in range(number % 37)] for number in range(1500)]
FLAT = [token for document in DOCUMENTS for token in [*document, 0]]
ENDS = list(accumulate(len(document) + 1 for document in DOCUMENTS))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return make_corpus(tmp_path / "corpus", DOCUMENTS, val=[[1, 2]], shard_tokens=2500)


@pytest.fixture
def split(corpus: Path) -> Split:
    return Corpus.open(corpus).split("train")


# ---- what is read


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages lie in memory")
def test_a_cold_window_is_read_ahead_when_it_is_advised(tmp_path: Path) -> None:
    path = make_corpus(tmp_path / "corpus", [[7] * 2_000_000], provenance=False)
    split = Corpus.open(path).split("train")
    start, length = 1_000_000, 65_536  # far from the header, which brings some pages along
    file = tokens_path(path, "train", split.shards[0].name)
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    mapped = np.memmap(file, np.uint8, "r")
    first, stop = (HEADER_BYTES + 4 * start) // mmap.PAGESIZE, (HEADER_BYTES + 4 * (start + length)) // mmap.PAGESIZE

    def num_cached() -> int:
        pages = (ctypes.c_ubyte * (stop - first))()
        address = ctypes.c_void_p(mapped.ctypes.data + first * mmap.PAGESIZE)
        size_bytes = ctypes.c_size_t((stop - first) * mmap.PAGESIZE)
        assert ctypes.CDLL(None, use_errno=True).mincore(address, size_bytes, pages) == 0, ctypes.get_errno()
        return sum(page & 1 for page in pages)

    if num_cached():
        pytest.skip("a file system in memory")
    split.advise_window(start, length)
    deadline = time.monotonic() + 60
    while num_cached() < stop - first:
        assert time.monotonic() < deadline, "nobody reads it"
    assert split.read(start, start + 3).tolist() == [7, 7, 7]


def test_a_corpus_says_what_it_holds(corpus: Path) -> None:
    opened = Corpus.open(corpus)
    split = opened.split("train")
    assert opened.split("train") is split and split.corpus is opened
    assert opened.fingerprint == read_manifest(corpus).fingerprint
    assert opened.tokenizer_folder == corpus / "tokenizer"
    assert (split.name, split.num_tokens, split.num_documents) == ("train", len(FLAT), len(DOCUMENTS))
    assert (split.num_bytes, split.max_token_id) == (len(FLAT) - len(DOCUMENTS), max(FLAT))
    assert len(split.shards) == 12 and sum(shard.num_tokens for shard in split.shards) == len(FLAT)
    assert opened.split("val").read(0, 3).tolist() == [1, 2, 0]


@given(st.data())
def test_any_reading_equals_the_lists(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    token = st.integers(1, 2**32 - 1)
    documents = data.draw(st.lists(st.lists(token, max_size=12), min_size=1, max_size=25))
    folder = tmp_path_factory.mktemp("x") / "corpus"
    split = Corpus.open(make_corpus(folder, documents, shard_tokens=data.draw(st.integers(1, 60)))).split("train")
    flat = [token for document in documents for token in [*document, 0]]
    ends = list(accumulate(len(document) + 1 for document in documents))
    assert (split.num_tokens, split.num_documents) == (len(flat), len(documents))
    for _ in range(5):
        start = data.draw(st.integers(0, len(flat)))
        stop = data.draw(st.integers(start, len(flat)))
        assert split.read(start, stop).tolist() == flat[start:stop]
        found = split.ends_between(start, stop)
        assert found.dtype == np.int64 and found.tolist() == [end for end in ends if start < end <= stop]
    for number, end in enumerate(ends):
        start = ends[number - 1] if number else 0
        assert split.document_bounds(number) == (start, end)
        for place in (start, end - 1):
            assert split.document_containing(place) == number
            shard, offset = split.locate(place)
            assert sum(info.num_tokens for info in split.shards[:shard]) + offset == place
            assert offset < split.shards[shard].num_tokens
    split.check()


@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
def test_tokens_are_read_into_an_array(split: Split, dtype: type[np.generic]) -> None:
    out = np.full(len(FLAT) + 2, 7, dtype=dtype)
    split.read_into(0, out[1:-1])
    assert out.tolist() == [7, *FLAT, 7]
    split.read_into(np.int64(3), out[:0])
    split.read_into(np.int64(3), out[:2000])
    assert out[:2000].tolist() == FLAT[3:2003]


def test_what_was_read_is_ours_to_write(split: Split) -> None:
    tokens = split.read(0, 10)
    tokens += 1
    ends = split.ends_between(0, 1000)
    ends += 1
    assert split.read(0, 10).tolist() == FLAT[:10]
    assert split.ends_between(0, 1000).tolist() == ENDS[: bisect_right(ENDS, 1000)]


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (0, len(FLAT) + 1), (5, 4), (len(FLAT) + 1, len(FLAT) + 1)])
def test_reading_outside_is_an_error_of_ours(split: Split, start: int, stop: int) -> None:
    with pytest.raises(IndexError):
        split.read(start, stop)
    with pytest.raises(IndexError):
        split.ends_between(start, stop)


@pytest.mark.parametrize("document", [-1, len(DOCUMENTS), 10**12])
def test_an_absent_document_is_named(split: Split, document: int) -> None:
    for read in (split.document_bounds, split.provenance):
        with pytest.raises(CorpusError, match=f"no such document.*train.*got {document}; expected .* 0 to 1499"):
            read(document)


def test_an_absent_split_or_corpus_is_named(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"no split 'test'.*expected one of train, val"):
        Corpus.open(corpus).split("test")
    with pytest.raises(UsageError, match="no such corpus folder"):
        Corpus.open(tmp_path / "absent")
    without = make_corpus(tmp_path / "without", [[1]])
    with pytest.raises(CorpusError, match="--val_fraction"):
        Corpus.open(without).split("val")


def test_an_empty_split_reads_as_nothing(corpus: Path, tmp_path: Path) -> None:
    manifest = read_manifest(corpus)
    write_manifest(tmp_path / "empty", dataclasses.replace(manifest, splits={"val": SplitInfo.of(())}))
    split = Corpus.open(tmp_path / "empty").split("val")
    split.check()
    assert split.read(0, 0).tolist() == split.ends_between(0, 0).tolist() == []
    with pytest.raises(IndexError):
        split.locate(0)
    with pytest.raises(CorpusError, match="it is empty"):
        split.document_bounds(0)


def test_a_document_longer_than_a_shard_is_one_document(tmp_path: Path) -> None:
    long = [place % 500 + 1 for place in range(10_000)]
    split = Corpus.open(make_corpus(tmp_path / "corpus", [[1], long, [2]], shard_tokens=1000)).split("train")
    assert split.document_bounds(1) == (2, 10_003)
    assert split.read(2, 10_003).tolist() == [*long, 0]
    assert split.ends_between(2, 10_003).tolist() == [10_003]
    assert split.document_containing(9_000) == 1


# ---- indices that do not fit into 32 bits; the files are holes


def sparse_corpus(folder: Path, shards: list[list[int]]) -> Split:
    """Write shards with these document ends; every token is 0 but the one before an end, which is the end's number."""
    infos = []
    for part, ends in enumerate(shards):
        name = f"shard-00000-{part:03d}"
        path = tokens_path(folder, "train", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.write(npy_header(TOKEN_DTYPE, ends[-1]))
            file.truncate(128 + 4 * ends[-1])
            for number, end in enumerate(ends):
                file.seek(128 + 4 * (end - 1))
                file.write(np.array([number + 1], TOKEN_DTYPE).tobytes())
        payload = np.array(ends, END_DTYPE).tobytes()
        ends_path(folder, "train", name).write_bytes(npy_header(END_DTYPE, len(ends)) + payload)
        infos.append(
            ShardInfo(
                name=name,
                num_tokens=ends[-1],
                num_documents=len(ends),
                num_bytes=0,
                max_token_id=len(ends),
                tokens_checksum="xxh3:" + "0" * 32,
                ends_checksum="xxh3:" + "0" * 32,
            )
        )
    splits = {"train": SplitInfo.of(tuple(infos))}
    write_manifest(folder, Manifest(tokenizer=tokenizer_info(b"{}", 0, 9), splits=splits))
    return Corpus.open(folder).split("train")


@pytest.mark.parametrize(
    "shards",
    [
        [[2**31 - 1, 2**31, 2**31 + 1, 2**32 + 5, 2**32 + 9]],
        [[2**31 - 1], [1, 2], [2**31 + 4, 2**31 + 8]],
    ],
)
def test_indices_beyond_32_bits_are_exact(tmp_path: Path, shards: list[list[int]]) -> None:
    split = sparse_corpus(tmp_path / "corpus", shards)
    split.check()
    ends = [2**31 - 1, 2**31, 2**31 + 1, 2**32 + 5, 2**32 + 9]
    last = [number + 1 for shard in shards for number in range(len(shard))]
    assert split.num_tokens == 2**32 + 9
    for document, (end, token) in enumerate(zip(ends, last, strict=True)):
        assert split.document_bounds(document) == (ends[document - 1] if document else 0, end)
        assert split.document_containing(end - 1) == document
        assert split.read(end - 1, end).tolist() == [token]
        assert split.ends_between(end - 1, end).tolist() == [end]
    assert split.read(2**31 - 3, 2**31 + 2).tolist() == [0, *last[:3], 0]
    assert split.read(2**32 + 1, 2**32 + 9).tolist() == [0, 0, 0, last[3], 0, 0, 0, last[4]]
    assert split.ends_between(0, 2**32 + 9).tolist() == ends
    assert split.ends_between(2**31 - 1, 2**32 + 5).tolist() == ends[1:4]


# ---- many shards, many threads


TWO_THOUSAND = """
import os, random, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from flame.shards.reader import Corpus
splits = [Corpus.open(Path(sys.argv[1])).split("train") for _ in range(3)]
for split in splits:
    split.check()
order = [(split, shard) for split in splits for shard in range(2000)]
random.Random(0).shuffle(order)
for split, shard in order:
    assert split.read(6 * shard, 6 * shard + 6).tolist() == [5, 6, 7, 0, 8, 0]
    assert split.ends_between(6 * shard, 6 * shard + 6).tolist() == [6 * shard + 4, 6 * shard + 6]
assert splits[0].read(0, 12000).tolist() == [5, 6, 7, 0, 8, 0] * 2000
print(len(os.listdir("/proc/self/fd")))
"""


def test_thousands_of_shards_work_with_256_descriptors(tmp_path: Path) -> None:
    link_shards(tmp_path / "corpus", 2000)
    run = subprocess.run([sys.executable, "-c", TWO_THOUSAND, str(tmp_path / "corpus")], capture_output=True, text=True)
    assert run.stderr == ""
    assert 2 * MAX_MAPPED_SHARDS <= int(run.stdout) < 2 * MAX_MAPPED_SHARDS + 20


def test_too_few_descriptors_are_named(tmp_path: Path) -> None:
    link_shards(tmp_path / "corpus", 60)
    code = TWO_THOUSAND.replace("256, 256", "40, 40").replace("2000", "60").replace("12000", "360")
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path / "corpus")], capture_output=True, text=True)
    assert run.returncode == 1
    assert "CorpusError: a file of the corpus cannot be read" in run.stderr
    assert "got Too many open files" in run.stderr and "ulimit -n" in run.stderr


def test_the_least_recently_used_shard_is_unmapped(tmp_path: Path) -> None:
    link_shards(tmp_path / "corpus", 5)
    split = Corpus.open(tmp_path / "corpus").split("train")
    maps = ShardMaps(limit=2)
    files = split._files
    kept = maps.get(files[0])
    assert maps.get(files[0]) is kept
    second = maps.get(files[1])
    assert maps.get(files[0]) is kept
    maps.get(files[2])
    assert len(maps) == 2
    assert maps.get(files[0]) is kept
    assert maps.get(files[1]) is not second


def test_threads_read_the_same(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flame.shards.reader, "MAPS", ShardMaps(limit=2))
    starts = np.random.default_rng(0).integers(0, len(FLAT) - 700, 800).tolist()

    def read(start: int) -> bool:
        tokens, ends = split.read(start, start + 700), split.ends_between(start, start + 700)
        return tokens.tolist() == FLAT[start : start + 700] and ends.tolist() == [
            end for end in ENDS if start < end <= start + 700
        ]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, starts))


def test_nothing_is_written_into_a_corpus_that_is_read(corpus: Path) -> None:
    def state() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in [corpus, *corpus.rglob("*")]}

    before = state()
    for name in ("train", "val"):
        split = Corpus.open(corpus).split(name)
        split.check()
        split.read(0, split.num_tokens)
        split.ends_between(0, split.num_tokens)
        assert split.provenance(0)["row"] == 0
    assert state() == before


def test_opening_reads_the_manifest_only(corpus: Path) -> None:
    for path in corpus.rglob("*.npy"):
        path.unlink()
    opened = Corpus.open(corpus)
    assert opened.manifest.splits["train"].num_tokens == len(FLAT)
    assert len(opened.fingerprint) == len("sha256:") + 64


# ---- damage


def cut(number: int) -> Callable[[Path, Path], None]:
    return lambda path, _: os.truncate(path, path.stat().st_size - number)


def swap(path: Path, other: Path) -> None:
    aside = path.with_suffix(".aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def overwrite(offset: int, data: bytes) -> Callable[[Path, Path], None]:
    def write(path: Path, _: Path) -> None:
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(data)

    return write


DAMAGE: dict[str, tuple[str, Callable[[Path, Path], None], str]] = {
    "tokens cut by 4 KB": (
        "tokens",
        cut(4096),
        "cut short",
    ),
    "tokens cut by 2 bytes": ("tokens", cut(2), "cut short"),
    "ends cut by 2 bytes": ("ends", cut(2), "cut short"),
    "tokens longer": ("tokens", lambda path, _: os.truncate(path, path.stat().st_size + 4), "written over"),
    "tokens absent": ("tokens", lambda path, _: path.unlink(), "is absent"),
    "ends absent": ("ends", lambda path, _: path.unlink(), "is absent"),
    "tokens empty": ("tokens", lambda path, _: os.truncate(path, 0), "cut short|does not begin with a header"),
    "tokens swapped": ("tokens", swap, "cut short|not the one that the manifest names"),
    "ends swapped": ("ends", swap, "cut short|not the one that the manifest names"),
}
SAME_SIZE: dict[str, tuple[str, Callable[[Path, Path], None], str]] = {
    "tokens of another type": ("tokens", overwrite(0, npy_header(END_DTYPE, 5)), "does not begin with a header"),
    "a header overwritten": ("ends", overwrite(0, b"\0" * 128), "does not begin with a header"),
    "a first end of 0": ("ends", overwrite(128, bytes(8)), "do not belong to its tokens .*first end of 0"),
}


def damage(corpus: Path, shard: int, suffix: str, harm: Callable[[Path, Path], None]) -> Path:
    shards = read_manifest(corpus).splits["train"].shards
    path_of = tokens_path if suffix == "tokens" else ends_path
    path = path_of(corpus, "train", shards[shard].name)
    harm(path, path_of(corpus, "train", shards[shard + 1].name))
    return path


@pytest.mark.parametrize("kind", DAMAGE | SAME_SIZE)
def test_damage_is_named_by_the_check_before_step_1(corpus: Path, kind: str) -> None:
    suffix, harm, message = (DAMAGE | SAME_SIZE)[kind]
    path = damage(corpus, 3, suffix, harm)
    with pytest.raises(CorpusError, match=message) as caught:
        Corpus.open(corpus).split("train").check()
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("kind", DAMAGE | SAME_SIZE)
def test_damage_is_named_where_it_is_touched(corpus: Path, kind: str) -> None:
    suffix, harm, message = (DAMAGE | SAME_SIZE)[kind]
    path = damage(corpus, 3, suffix, harm)
    split = Corpus.open(corpus).split("train")
    start = sum(shard.num_tokens for shard in split.shards[:3])
    for read in (split.read, split.ends_between):
        with pytest.raises(CorpusError, match=message) as caught:
            read(start - 1, start + 1)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_early_wherever_one_reads(corpus: Path, kind: str) -> None:
    suffix, harm, message = DAMAGE[kind]
    path = damage(corpus, 9, suffix, harm)
    split = Corpus.open(corpus).split("train")
    split._looking.join()
    with pytest.raises(CorpusError, match=message) as caught:
        split.read(0, 1)
    assert str(path) in str(caught.value)


def test_indices_of_two_shards_with_equal_counts_are_told_apart_by_their_last_end(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", [[1] * 4, [1] * 5, [1] * 4, [1] * 6], shard_tokens=11)
    path = damage(corpus, 0, "ends", swap)
    split = Corpus.open(corpus).split("train")
    assert [shard.num_documents for shard in split.shards] == [2, 2]
    for read in (split.check, lambda: split.read(0, 1)):
        with pytest.raises(CorpusError, match=r"do not belong to its tokens .*expected .*a last of 11") as caught:
            read()
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("value", [0, 2, 10**6, 2**64 - 1])
@pytest.mark.parametrize("document", [1, 5, 10])
def test_ends_that_do_not_rise_are_refused_where_they_are_read(tmp_path: Path, document: int, value: int) -> None:
    corpus = make_corpus(tmp_path / "corpus", [[1, 1]] * 12, shard_tokens=100)
    path = damage_end(corpus, document, value)
    split = Corpus.open(corpus).split("train")
    split.check()
    with pytest.raises(CorpusError, match="document ends do not rise") as caught:
        split.ends_between(0, 36)
    assert str(path) in str(caught.value)
    with pytest.raises(CorpusError, match="document ends do not rise"):
        for number in (document, document + 1):
            split.document_bounds(number)


def damage_end(corpus: Path, document: int, value: int) -> Path:
    (shard,) = read_manifest(corpus).splits["train"].shards
    path = ends_path(corpus, "train", shard.name)
    overwrite(128 + 8 * document, np.array([value], END_DTYPE).tobytes())(path, path)
    return path


def test_maps_of_a_process_are_shared_by_all_splits(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = ShardMaps(limit=5)
    monkeypatch.setattr(flame.shards.reader, "MAPS", maps)
    for _ in range(3):
        split = Corpus.open(corpus).split("train")
        split.read(0, split.num_tokens)
    assert len(maps) == 5
