"""Splits of more than 2^31 and 2^32 tokens, nearly all of them holes on disk: what is read there is exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from flame.sampling.geometry import BatchGeometry
from flame.sampling.packing import IGNORE_INDEX, pack_windows
from flame.sampling.sampler import Sampler
from flame.sampling.sources import mixture_of_corpora, open_mixture
from flame.shards.format import END_DTYPE, HEADER_BYTES, TOKEN_DTYPE, ends_path, npy_header, tokens_path
from flame.shards.manifest import Manifest, ShardInfo, SplitInfo, write_manifest
from flame.shards.reader import Corpus, Split
from tests.corpora import tokenizer_info

EOS, VOCAB = 1, 50_000
SHARDS = [2**31 + 5000, 2**32 + 9000, 7000]  # tokens
STARTS = [0, SHARDS[0], SHARDS[0] + SHARDS[1]]
WRITTEN = 4096  # tokens on either side of a place that is looked at
WINDOW = 512
# Of the whole split: around 2^31, 2^32, the starts of shards, the same powers within the second shard, and the end.
PLACES = [2**31, 2**32, *STARTS[1:], STARTS[1] + 2**31, STARTS[1] + 2**32, sum(SHARDS) - WRITTEN]


def token_at(position: NDArray[np.int64]) -> NDArray[np.uint32]:
    """What stands at each token of the split: no two places that could be taken for one another are alike."""
    return ((position * 2_654_435_761 >> 7) % (VOCAB - 2) + 2).astype(np.uint32)


def written() -> NDArray[np.int64]:
    return np.unique(np.concatenate([np.arange(place - WRITTEN, place + WRITTEN) for place in PLACES]))


def all_ends() -> NDArray[np.int64]:
    """Documents end every 100 tokens where tokens are written, and with each shard; the others are huge."""
    stops = np.cumsum(SHARDS)
    ends = np.concatenate([np.arange(place - WRITTEN + 37, place + WRITTEN, 100) for place in PLACES])
    return np.unique(np.concatenate([ends[ends < stops[-1]], stops]))


def expected_tokens(start: int, stop: int) -> NDArray[np.uint32]:
    tokens = token_at(np.arange(start, stop))
    ends = all_ends()
    mine = ends[(ends > start) & (ends <= stop)]
    tokens[mine - 1 - start] = EOS
    return tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    (folder / "train").mkdir()
    infos = []
    for number, (start, length) in enumerate(zip(STARTS, SHARDS, strict=True)):
        name = f"shard-{number:05d}-000"
        with open(tokens_path(folder, "train", name), "wb") as file:
            file.write(npy_header(TOKEN_DTYPE, length))
            file.truncate(HEADER_BYTES + length * TOKEN_DTYPE.itemsize)
            for place in PLACES:
                first, stop = max(place - WRITTEN, start), min(place + WRITTEN, start + length)
                if first < stop:
                    file.seek(HEADER_BYTES + (first - start) * TOKEN_DTYPE.itemsize)
                    file.write(expected_tokens(first, stop).tobytes())
        ends = all_ends()
        ends = ends[(ends > start) & (ends <= start + length)] - start
        ends_path(folder, "train", name).write_bytes(
            npy_header(END_DTYPE, len(ends)) + ends.astype(END_DTYPE).tobytes()
        )
        infos.append(
            ShardInfo(
                name=name,
                num_tokens=length,
                num_documents=len(ends),
                num_bytes=length,
                max_token_id=VOCAB - 1,
                tokens_checksum=f"xxh3:{number:032x}",
                ends_checksum=f"xxh3:{number:032x}",
            )
        )
    splits = {"train": SplitInfo.of(tuple(infos))}
    write_manifest(folder, Manifest(tokenizer=tokenizer_info(b"{}", EOS, VOCAB), splits=splits))
    return folder


@pytest.fixture(scope="module")
def split(folder: Path) -> Split:
    return Corpus.open(folder).split("train")


def test_the_disk_holds_no_more_than_what_was_written(folder: Path, split: Split) -> None:
    assert split.num_tokens == sum(SHARDS) > 2**32 + 2**31
    taken = sum(path.stat().st_blocks * 512 for path in (folder / "train").iterdir())
    assert taken < 1 << 20, "holes take no room: the file system keeps none"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shift", [-WINDOW - 1, -WINDOW, -WINDOW // 2, -1, 0, 1])
def test_windows_are_exact(split: Split, place: int, shift: int) -> None:
    first = place + shift
    assert np.array_equal(split.read(first, first + WINDOW), expected_tokens(first, first + WINDOW))
    chosen = BatchGeometry(
        seq_len=WINDOW, window_len=WINDOW, context_len=64, micro_batch=1, accumulation=1, dp_size=1, varlen=True
    )
    batch = pack_windows([(split, first)], chosen, sources=np.zeros(1, np.int32), samples=np.zeros(1, np.int64))
    ends = all_ends()
    ends = ends[(ends > first) & (ends <= first + WINDOW)]
    labels = expected_tokens(first + 1, first + WINDOW + 1).astype(np.int64)
    labels[ends - 1 - first] = IGNORE_INDEX
    assert np.array_equal(batch.input_ids[0], expected_tokens(first, first + WINDOW))
    assert batch.labels[0].tolist() == labels.tolist()
    cuts = [0]
    for stop in dict.fromkeys([*(ends - first).tolist(), WINDOW]):
        cuts += [*range(cuts[-1] + 64, stop, 64), stop]
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == cuts


@pytest.mark.parametrize("place", PLACES)
def test_documents_are_found_by_their_tokens_and_their_numbers(split: Split, place: int) -> None:
    ends = all_ends()
    for token in (place - 1, place, place + 1):
        number = split.document_containing(token)
        assert number == np.searchsorted(ends, token, side="right")
        assert split.document_bounds(number) == (ends[number - 1], ends[number])
        shard, offset = split.locate(token)
        assert STARTS[shard] + offset == token and 0 <= offset < SHARDS[shard]


@pytest.mark.parametrize("place", PLACES)
def test_the_sampler_leads_to_the_window_that_holds_a_token(folder: Path, split: Split, place: int) -> None:
    mixture = mixture_of_corpora([folder], None, 42)
    sampler = Sampler(mixture, open_mixture(mixture), WINDOW)
    for epoch in (0, 7):
        window = (place - sampler.first_token(0, epoch)) // WINDOW
        window = min(window, sampler.num_windows[0] - 1)
        (k,) = sampler.find_windows(0, epoch, np.array([window]))
        located = sampler.locate(np.array([k]))
        assert (located.epoch[0], located.window[0]) == (epoch, window)
        offset = int(located.offset[0])
        assert offset == sampler.first_token(0, epoch) + window * WINDOW and offset + WINDOW < split.num_tokens
        assert np.array_equal(split.read(offset, offset + WINDOW), expected_tokens(offset, offset + WINDOW))
