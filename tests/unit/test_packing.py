"""Packed batches against a reference that goes token by token, with every kind of boundary."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flame.errors import CorpusError
from flame.sampling.geometry import BatchGeometry, sample_indices
from flame.sampling.packing import IGNORE_INDEX, PackedBatch, cut_sequences, pack, pack_windows
from flame.sampling.sampler import Sampler
from flame.sampling.sources import mixture_of_corpora, open_mixture
from flame.shards.format import HEADER_BYTES, ends_path
from flame.shards.reader import Corpus, Split
from tests.corpora import make_corpus

EOS = 0


@pytest.fixture(scope="module", autouse=True)
def no_fsync() -> Iterator[None]:
    """These corpora need not outlive a power cut: hundreds of them are written in seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


def geometry(
    *, window_len: int, context_len: int, windows_per_row: int = 1, micro_batch: int = 1, varlen: bool = True
) -> BatchGeometry:
    return BatchGeometry(
        seq_len=window_len * windows_per_row,
        window_len=window_len,
        context_len=context_len,
        micro_batch=micro_batch,
        accumulation=1,
        dp_size=1,
        varlen=varlen,
    )


def packed(split: Split, offsets: Sequence[int], chosen: BatchGeometry) -> PackedBatch:
    return pack_windows(
        [(split, offset) for offset in offsets],
        chosen,
        sources=np.zeros(len(offsets), dtype=np.int32),
        samples=np.arange(len(offsets)),
    )


@dataclass
class Expected:
    """What a batch must hold, as plain lists."""

    input_ids: list[int]
    labels: list[int]
    positions: list[int]
    cu_seqlens: list[int]


def reference(
    documents: Sequence[Sequence[int]], offsets: Sequence[int], window_len: int, context_len: int
) -> Expected:
    """Go over the windows token by token; `documents` hold their EOS."""
    stream = [token for document in documents for token in document]
    last_tokens = set((np.cumsum([len(document) for document in documents]) - 1).tolist())
    expected = Expected([], [], [], [0])
    for offset in offsets:
        position = 0
        for place in range(offset, offset + window_len):
            expected.input_ids.append(stream[place])
            expected.labels.append(IGNORE_INDEX if place in last_tokens else stream[place + 1])
            expected.positions.append(position)
            position += 1
            ends = place == offset + window_len - 1 or place in last_tokens or position == context_len
            if ends:
                expected.cu_seqlens.append(len(expected.input_ids))
                position = 0
    return expected


def assert_equal(batch: PackedBatch, expected: Expected) -> None:
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == expected.cu_seqlens
    assert batch.input_ids.tolist() == [expected.input_ids]
    assert batch.labels.tolist() == [expected.labels]
    assert batch.positions.tolist() == [expected.positions]
    lengths = np.diff(expected.cu_seqlens)
    assert batch.lengths.tolist() == lengths.tolist()
    assert batch.max_seqlen == lengths.max() and type(batch.max_seqlen) is int
    assert batch.num_labels == sum(label != IGNORE_INDEX for label in expected.labels)
    assert type(batch.num_labels) is int
    for array in (batch.input_ids, batch.labels, batch.positions, batch.cu_seqlens):
        assert array.dtype == np.int32 and array.flags.c_contiguous and array.flags.writeable


lengths_of_documents = st.one_of(
    st.lists(st.integers(0, 3), min_size=12, max_size=60),
    st.lists(st.sampled_from([0, 1, 7, 8, 9, 31, 60]), min_size=4, max_size=20),
    st.integers(12, 80).map(lambda count: [0] * count),
    st.integers(20, 120).map(lambda length: [length]),
)


@settings(max_examples=120)
@given(data=st.data(), lengths=lengths_of_documents, shard_tokens=st.sampled_from([1, 16, 1000]))
def test_a_batch_equals_the_reference(data: st.DataObject, lengths: list[int], shard_tokens: int) -> None:
    documents = [[1 + (7 * i + j) % 200 for j in range(length)] for i, length in enumerate(lengths)]
    num_tokens = sum(length + 1 for length in lengths)
    window_len = data.draw(st.integers(1, num_tokens - 1))
    windows = data.draw(st.lists(st.integers(0, num_tokens - 1 - window_len), min_size=1, max_size=6))
    context_len = data.draw(st.integers(1, window_len * len(windows)))
    chosen = geometry(window_len=window_len, context_len=context_len, windows_per_row=len(windows))
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder) / "corpus", documents, shard_tokens=shard_tokens, provenance=False)
        batch = packed(Corpus.open(corpus).split("train"), windows, chosen)
    assert_equal(batch, reference([[*tokens, EOS] for tokens in documents], windows, window_len, context_len))


@settings(max_examples=10)
@given(
    data=st.data(),
    window_len=st.sampled_from([32_767, 32_768, 65_537]),
    lengths=st.lists(st.sampled_from([1, 1_000, 9_000, 200_000]), min_size=1, max_size=6),
)
def test_long_windows_equal_the_reference(data: st.DataObject, window_len: int, lengths: list[int]) -> None:
    """On both sides of the length from which ids and labels are copied apart; sequences up to a whole window."""
    rest = max(0, window_len + 1 - sum(lengths))
    documents = [np.arange(1 + i, 1 + i + length) % 500 + 1 for i, length in enumerate([*lengths, rest])]
    num_tokens = sum(len(tokens) + 1 for tokens in documents)
    windows = data.draw(st.lists(st.integers(0, num_tokens - 1 - window_len), min_size=1, max_size=2))
    context_len = data.draw(st.sampled_from([4_096, window_len - 1, window_len]))
    chosen = geometry(window_len=window_len, context_len=context_len, windows_per_row=len(windows))
    with_eos = [[*tokens.tolist(), EOS] for tokens in documents]
    with tempfile.TemporaryDirectory() as folder:
        lists = [tokens[:-1] for tokens in with_eos]
        shard_tokens = data.draw(st.sampled_from([50_000, 1_000_000]))
        corpus = make_corpus(Path(folder) / "corpus", lists, shard_tokens=shard_tokens, provenance=False)
        batch = packed(Corpus.open(corpus).split("train"), windows, chosen)
    assert_equal(batch, reference(with_eos, windows, window_len, context_len))


@pytest.mark.parametrize(
    ("offset", "label"),
    [
        pytest.param(0, 3, id="the token that follows, in the same document"),
        pytest.param(1, EOS, id="the EOS that follows"),
        pytest.param(2, IGNORE_INDEX, id="none: the document ends with the window"),
        pytest.param(3, 12, id="the next document's second token, its first being the window's last"),
    ],
)
def test_the_label_of_a_windows_last_token(tmp_path: Path, offset: int, label: int) -> None:
    split = Corpus.open(make_corpus(tmp_path / "corpus", [[1, 2, 3], [11, 12, 13]])).split("train")
    batch = packed(split, [offset], geometry(window_len=2, context_len=2))
    assert batch.labels[0, -1] == label
    assert batch.num_labels == 2 - (offset == 2) - (offset == 3)


def test_labels_cross_a_cut_at_context_len_and_positions_restart(tmp_path: Path) -> None:
    split = Corpus.open(make_corpus(tmp_path / "corpus", [[1, 2, 3, 4, 5, 6, 7, 8, 9]])).split("train")
    batch = packed(split, [0], geometry(window_len=8, context_len=3))
    assert batch.labels.tolist() == [[2, 3, 4, 5, 6, 7, 8, 9]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]]
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 3, 6, 8]
    assert batch.max_seqlen == 3 and batch.num_labels == 8


def test_only_one_token_documents_leave_no_label(tmp_path: Path) -> None:
    split = Corpus.open(make_corpus(tmp_path / "corpus", [[]] * 100)).split("train")
    batch = packed(split, [0, 32, 64], geometry(window_len=32, context_len=32, windows_per_row=3))
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == list(range(97))
    assert (batch.labels == IGNORE_INDEX).all() and batch.num_labels == 0
    assert (batch.positions == 0).all() and batch.max_seqlen == 1


def test_a_real_eos_is_a_label_though_it_might_pad(tmp_path: Path) -> None:
    split = Corpus.open(make_corpus(tmp_path / "corpus", [[4, 5], [6, 7], [8]])).split("train")
    batch = packed(split, [0], geometry(window_len=7, context_len=7))
    assert batch.input_ids.tolist() == [[4, 5, EOS, 6, 7, EOS, 8]]
    assert batch.labels.tolist() == [[5, EOS, IGNORE_INDEX, 7, EOS, IGNORE_INDEX, EOS]]


def test_without_varlen_nothing_is_masked(tmp_path: Path) -> None:
    documents = [[1, 2], [3], [4, 5, 6], [7, 8]]
    split = Corpus.open(make_corpus(tmp_path / "corpus", documents)).split("train")
    batch = packed(split, [0, 6], geometry(window_len=5, context_len=5, micro_batch=2, varlen=False))
    assert batch.input_ids.tolist() == [[1, 2, EOS, 3, EOS], [5, 6, EOS, 7, 8]]
    assert batch.labels.tolist() == [[2, EOS, 3, EOS, 4], [6, EOS, 7, 8, EOS]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert batch.cu_seqlens is None and batch.max_seqlen is None
    assert batch.num_labels == 10 and batch.lengths.tolist() == [5, 5]


@pytest.mark.parametrize("place", ["first", "inside", "following"])
def test_the_largest_id_is_found_wherever_it_stands(tmp_path: Path, place: str) -> None:
    big = 2**31 + 5  # negative, were it read as an int32
    tokens = {"first": [big, 2, 3, 4, 5], "inside": [1, 2, big, 4, 5], "following": [1, 2, 3, 4, big]}[place]
    split = Corpus.open(make_corpus(tmp_path / "corpus", [tokens, [9, 9, 9, 9]])).split("train")
    chosen = geometry(window_len=4, context_len=4, windows_per_row=2)
    assert packed(split, [5, 0], chosen).max_token_id == big
    assert packed(split, [5, 5], chosen).max_token_id == 9


def test_pack_places_each_sample_of_a_mixture_in_its_row(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    corpora = []
    for name, count in (("web", 80), ("code", 50)):
        documents = [rng.integers(1, 500, rng.integers(0, 40)).tolist() for _ in range(count)]
        corpora.append(make_corpus(tmp_path / name, documents, shard_tokens=150))
    mixture = mixture_of_corpora(corpora, [0.6, 0.4], 7)
    splits = open_mixture(mixture)
    sampler = Sampler(mixture, splits, 16)
    chosen = geometry(window_len=16, context_len=10, windows_per_row=2, micro_batch=3)
    (ks,) = sample_indices(chosen, 1234, 0)
    batch = pack(sampler, splits, ks, chosen)
    assert batch.samples.tolist() == list(range(1234, 1240))
    located = sampler.locate(batch.samples)
    assert batch.sources.tolist() == located.source.tolist() and len(set(batch.sources.tolist())) == 2
    for i, (source, offset) in enumerate(zip(located.source.tolist(), located.offset.tolist(), strict=True)):
        assert batch.input_ids[0, 16 * i : 16 * i + 16].tolist() == splits[source].read(offset, offset + 16).tolist()


def test_ends_that_fall_inside_a_window_are_named(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1], [2, 2, 2]])
    split = Corpus.open(corpus).split("train")
    chosen = geometry(window_len=17, context_len=17)
    assert packed(split, [0], chosen).num_labels == 13
    path = ends_path(corpus, "train", split.shards[0].name)
    data = bytearray(path.read_bytes())
    for row, end in enumerate((4, 12, 8)):
        data[HEADER_BYTES + 8 * row : HEADER_BYTES + 8 * row + 8] = end.to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(CorpusError, match="do not rise"):
        packed(Corpus.open(corpus).split("train"), [0], chosen)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    window_len=st.integers(1, 50),
    context_len=st.integers(1, 60),
)
def test_sequences_are_cut_at_windows_documents_and_context(
    lengths: list[int], window_len: int, context_len: int
) -> None:
    num_windows = -(-sum(lengths) // window_len)
    ends = np.cumsum(lengths).tolist()
    stops = sorted({*ends, *range(window_len, num_windows * window_len + 1, window_len)})
    expected = [0]
    for stop in stops:
        while stop - expected[-1] > context_len:
            expected.append(expected[-1] + context_len)
        expected.append(stop)
    each_window = [
        view(1000, [1000 + end - start for end in ends if start < end <= start + window_len])
        for start in range(0, num_windows * window_len, window_len)
    ]
    labels = np.full(num_windows * window_len, 7, dtype=np.int32)
    assert cut_sequences(each_window, window_len, context_len, labels.data) == (expected, np.diff(expected).tolist())
    assert (np.flatnonzero(labels == IGNORE_INDEX) + 1).tolist() == ends


def view(base: int, ends: list[int]) -> tuple[NDArray[np.uint32], NDArray[np.uint64], int]:
    """What a split shows of a window, without tokens."""
    return np.empty(0, dtype=np.uint32), np.array(ends, dtype=np.uint64), base


@pytest.mark.parametrize("ends", [[3, 3], [5, 4], [0], [12, 4]])
def test_ends_that_fall_are_cut_nowhere(ends: list[int]) -> None:
    with pytest.raises((ValueError, IndexError)):
        cut_sequences([view(0, [2]), view(0, ends)], 9, 9, np.zeros(18, dtype=np.int32).data)


@settings(max_examples=60)
@given(data=st.data(), lengths=st.lists(st.integers(0, 9), min_size=2, max_size=30))
def test_a_view_of_a_window_is_what_is_read(data: st.DataObject, lengths: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder) / "corpus", [[3] * length for length in lengths], shard_tokens=12)
        split = Corpus.open(corpus).split("train")
        start = data.draw(st.integers(0, split.num_tokens - 2))
        length = data.draw(st.integers(1, split.num_tokens - 1 - start))
        tokens, ends, base = split.view_window(start, length)
        assert tokens.tolist() == split.read(start, start + length + 1).tolist()
        assert (ends.astype(np.int64) - base + start).tolist() == split.ends_between(start, start + length).tolist()
        assert tokens.dtype == np.uint32 and ends.dtype == np.uint64
        with pytest.raises(IndexError):
            split.view_window(split.num_tokens - length, length)
