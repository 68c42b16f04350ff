"""The loader: whole steps in order, whoever reads them; restored at any step; errors where they belong."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flame.errors import CorpusError, TrainingError
from flame.sampling.geometry import BatchGeometry, sample_indices
from flame.sampling.mixture import Mixture, Stage
from flame.sampling.packing import IGNORE_INDEX, pack
from flame.sampling.sampler import Sampler
from flame.sampling.sources import mixture_of_corpora, open_mixture
from flame.shards.format import tokens_path
from flame.shards.reader import Split
from flame.train import loader as loader_module
from flame.train.loader import StepBatch, StepLoader, to_device
from tests.corpora import make_corpus

WINDOW = 8
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    folder = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(3)
    corpora = []
    for name, count in (("web", 60), ("code", 40), ("math", 10)):
        documents = [rng.integers(1, 400, rng.integers(0, 20)).tolist() for _ in range(count)]
        corpora.append(make_corpus(folder / name, documents, shard_tokens=100, provenance=False))
    return mixture_of_corpora(corpora, [0.5, 0.3, 0.2], 11)


@pytest.fixture(scope="module")
def splits(mixture: Mixture) -> list[Split]:
    return open_mixture(mixture)


@pytest.fixture(scope="module")
def sampler(mixture: Mixture, splits: list[Split]) -> Sampler:
    return Sampler(mixture, splits, WINDOW)


def geometry(**changes: Any) -> BatchGeometry:
    chosen: dict[str, Any] = {
        "seq_len": 2 * WINDOW,
        "window_len": WINDOW,
        "context_len": 5,
        "micro_batch": 2,
        "accumulation": 3,
        "dp_size": 1,
        "varlen": True,
    }
    return BatchGeometry(**{**chosen, **changes})


def read_steps(
    sampler: Sampler, splits: list[Split], chosen: BatchGeometry, count: int, **options: Any
) -> list[StepBatch]:
    given: dict[str, Any] = {"dp_rank": 0, "consumed_samples": 0, "num_embeddings": 512, "device": CPU}
    steps = StepLoader(sampler, splits, chosen, **{**given, **options})
    try:
        return list(itertools.islice(steps, count))
    finally:
        steps.close()


def content(step: StepBatch) -> Any:
    """All that a step says, to be compared."""
    batches = [
        (
            batch.input_ids.tolist(),
            batch.labels.tolist(),
            batch.positions.tolist(),
            None if batch.cu_seqlens is None else batch.cu_seqlens.tolist(),
            batch.max_seqlen,
            batch.lengths.tolist(),
        )
        for batch in step.micro_batches
    ]
    return batches, step.num_labels, step.samples.tolist(), step.sources.tolist(), step.consumed_samples


def test_a_step_is_what_packing_its_samples_gives(sampler: Sampler, splits: list[Split]) -> None:
    chosen = geometry(dp_size=2)
    step = read_steps(sampler, splits, chosen, 2, dp_rank=1, consumed_samples=48, num_threads=0)[1]
    ks = sample_indices(chosen, 48 + 24, 1)
    assert step.samples.tolist() == ks.reshape(-1).tolist()
    assert step.consumed_samples == 48 + 2 * 24
    batches = [pack(sampler, splits, micro_step, chosen) for micro_step in ks]
    assert len(step.micro_batches) == 3
    for got, batch in zip(step.micro_batches, batches, strict=True):
        for name in ("input_ids", "labels", "positions", "cu_seqlens"):
            tensor = getattr(got, name)
            assert tensor.dtype == torch.int32 and torch.equal(tensor, torch.from_numpy(getattr(batch, name)))
        assert got.input_ids.shape == (1, 2 * 2 * WINDOW) and got.max_seqlen == batch.max_seqlen
        assert int(got.lengths.sum()) == 2 * 2 * WINDOW
    assert step.num_labels == sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in step.micro_batches)
    sources = np.concatenate([batch.sources for batch in batches])
    assert step.sources.tolist() == list(sources)
    labels = [(batch.labels != -100).view(-1, WINDOW).sum(1) for batch in step.micro_batches]
    assert (
        step.labels_by_sample.tolist() == torch.cat(labels).tolist() and step.labels_by_sample.sum() == step.num_labels
    )


def test_without_varlen_rows_stay_rows(sampler: Sampler, splits: list[Split]) -> None:
    chosen = geometry(seq_len=WINDOW, context_len=WINDOW, varlen=False)
    (step,) = read_steps(sampler, splits, chosen, 1)
    for batch in step.micro_batches:
        assert batch.input_ids.shape == batch.labels.shape == batch.positions.shape == (2, WINDOW)
        assert batch.cu_seqlens is None and batch.max_seqlen is None and batch.lengths.tolist() == [WINDOW] * 2
    assert step.num_labels == 3 * 2 * WINDOW


@pytest.mark.parametrize(("num_threads", "prefetch_steps"), [(1, 1), (1, 2), (4, 2), (4, 9), (3, 0)])
def test_any_number_of_threads_reads_the_same_steps_in_order(
    sampler: Sampler, splits: list[Split], num_threads: int, prefetch_steps: int
) -> None:
    expected = read_steps(sampler, splits, geometry(), 12, num_threads=0)
    found = read_steps(sampler, splits, geometry(), 12, num_threads=num_threads, prefetch_steps=prefetch_steps)
    assert [content(step) for step in found] == [content(step) for step in expected]
    assert [step.consumed_samples for step in found] == [12 * n for n in range(1, 13)]


def test_restored_after_any_step_the_rest_is_the_same(sampler: Sampler, splits: list[Split]) -> None:
    whole = [content(step) for step in read_steps(sampler, splits, geometry(), 10)]
    consumed = [0, *(step[-1] for step in whole)]
    for stop in range(10):
        rest = read_steps(sampler, splits, geometry(), 10 - stop, consumed_samples=consumed[stop])
        assert [content(step) for step in rest] == whole[stop:]


@pytest.mark.parametrize("at_once", [1, 17, 36, 10**5])
def test_how_many_samples_are_located_at_once_changes_nothing(
    sampler: Sampler, splits: list[Split], monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    expected = [content(step) for step in read_steps(sampler, splits, geometry(), 8)]
    monkeypatch.setattr(loader_module, "_LOCATED_SAMPLES", at_once)
    assert [content(step) for step in read_steps(sampler, splits, geometry(), 8)] == expected


def test_a_stop_at_two_ranks_goes_on_at_one_and_at_four_in_the_same_order(
    sampler: Sampler, splits: list[Split]
) -> None:
    """The samples of all ranks together, in global order, are 0, 1, 2 … without a gap."""
    seen: list[int] = []
    for dp_size, steps in ((2, 3), (1, 4), (4, 2)):
        chosen = geometry(dp_size=dp_size, micro_batch=2, accumulation=2)
        ranks = [
            read_steps(sampler, splits, chosen, steps, dp_rank=rank, consumed_samples=len(seen))
            for rank in range(dp_size)
        ]
        for step in zip(*ranks, strict=True):
            of_rank = [part.samples.reshape(2, -1) for part in step]  # [accumulation, samples]
            seen += np.stack(of_rank, axis=1).reshape(-1).tolist()
            assert {part.consumed_samples for part in step} == {len(seen)}
    assert seen == list(range(len(seen))) and len(seen) == 3 * 16 + 4 * 8 + 2 * 32


def test_every_rank_does_its_steps_and_each_window_comes_once_an_epoch(tmp_path: Path) -> None:
    """20 windows, 3 ranks, batch 2, 50 steps."""
    corpus = make_corpus(tmp_path / "corpus", [[1 + i % 99 for i in range(20 * WINDOW)]], provenance=False)
    mixture = mixture_of_corpora([corpus], None, 5)
    splits = open_mixture(mixture)
    sampler = Sampler(mixture, splits, WINDOW)
    assert sampler.num_windows == (20,)
    chosen = geometry(seq_len=WINDOW, micro_batch=2, accumulation=1, dp_size=3)
    ranks = [read_steps(sampler, splits, chosen, 50, dp_rank=rank) for rank in range(3)]
    assert [len(steps) for steps in ranks] == [50, 50, 50]
    ks = np.concatenate([np.concatenate([step.samples for step in steps]) for steps in ranks])
    located = sampler.locate(np.sort(ks))
    assert sorted(ks.tolist()) == list(range(300))
    orders = located.window.reshape(15, 20).tolist()
    assert located.epoch.reshape(15, 20).tolist() == [[epoch] * 20 for epoch in range(15)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders}) == 15


@pytest.mark.parametrize("num_threads", [0, 1, 4])
def test_an_id_beyond_the_model_is_an_error_of_its_own_step(tmp_path: Path, num_threads: int) -> None:
    """One bad id late, which the manifest of the corpus knows nothing of."""
    corpus = make_corpus(tmp_path / "corpus", [[7] * 159], provenance=False)
    path = tokens_path(corpus, "train", "shard-00000-000")
    data = bytearray(path.read_bytes())
    data[-4 * 12 : -4 * 11] = (50_000).to_bytes(4, "little")  # token 148 of 160
    path.write_bytes(data)
    mixture = mixture_of_corpora([corpus], None, 5)
    splits = open_mixture(mixture)
    sampler = Sampler(mixture, splits, WINDOW)
    bad = next(k for k in range(19) if 0 <= 148 - int(sampler.locate(np.array([k])).offset[0]) <= WINDOW)
    chosen = geometry(seq_len=WINDOW, micro_batch=1, accumulation=1)
    steps = StepLoader(
        sampler,
        splits,
        chosen,
        dp_rank=0,
        consumed_samples=0,
        num_embeddings=512,
        device=CPU,
        num_threads=num_threads,
        prefetch_steps=4,
    )
    assert [step.samples.tolist() for step in itertools.islice(steps, bad)] == [[k] for k in range(bad)]
    with pytest.raises(TrainingError, match=rf"samples {bad} to {bad}; got id 50000; expected ids below 512"):
        next(steps)
    steps.close()


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_shard_that_is_cut_before_it_is_read_is_an_error_with_its_name(tmp_path: Path, num_threads: int) -> None:
    corpus = make_corpus(tmp_path / "corpus", [[7] * 9] * 20, shard_tokens=100, provenance=False)
    mixture = mixture_of_corpora([corpus], None, 5)
    path = tokens_path(corpus, "train", "shard-00000-001")
    path.write_bytes(path.read_bytes()[:-2])
    splits = open_mixture(mixture)
    with pytest.raises(CorpusError, match=r"shard-00000-001\.tokens\.npy"):
        read_steps(Sampler(mixture, splits, WINDOW), splits, geometry(), 10, num_threads=num_threads)


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("flame-loader")]


def test_close_joins_the_threads_with_steps_in_flight(sampler: Sampler, splits: list[Split]) -> None:
    steps = StepLoader(
        sampler,
        splits,
        geometry(),
        dp_rank=0,
        consumed_samples=0,
        num_embeddings=512,
        device=CPU,
        num_threads=3,
        prefetch_steps=50,
    )
    assert steps.wait_seconds == 0
    next(steps)
    assert steps.wait_seconds > 0
    assert loader_threads()
    steps.close()
    assert not loader_threads()


def test_stages_hand_over_in_the_middle_of_a_step(mixture: Mixture, splits: list[Split], sampler: Sampler) -> None:
    changed = Mixture(
        data_seed=mixture.data_seed,
        sources=mixture.sources,
        stages=(*mixture.stages, Stage(start_tokens=18 * WINDOW, weights=(0, 1 << 22, 0))),
    )
    first, second = read_steps(Sampler(changed, splits, WINDOW), splits, geometry(), 2)
    assert content(first) == content(read_steps(sampler, splits, geometry(), 1)[0])
    before = sampler.counts(18) - sampler.counts(12)
    assert np.bincount(second.sources, minlength=3).tolist() == (before + np.array([0, 6, 0])).tolist()


def test_a_batch_moves_to_its_device(sampler: Sampler, splits: list[Split]) -> None:
    batch = pack(sampler, splits, np.arange(4).reshape(2, 2), geometry())
    on_cpu = to_device(batch, CPU)
    assert on_cpu.input_ids.data_ptr() == batch.input_ids.ctypes.data  # no copy
    moved = on_cpu.to(torch.device("meta"))
    for name in ("input_ids", "labels", "positions", "cu_seqlens"):
        assert getattr(moved, name).device.type == "meta"
        assert getattr(moved, name).shape == getattr(on_cpu, name).shape
    assert moved.max_seqlen == on_cpu.max_seqlen and moved.lengths is on_cpu.lengths


def test_positions_far_into_a_run_are_exact(sampler: Sampler, splits: list[Split]) -> None:
    """Beyond 2^32 samples, and the same whichever step one begins with."""
    far = 2**32 + 5
    whole = read_steps(sampler, splits, geometry(), 3, consumed_samples=far)
    again = read_steps(sampler, splits, geometry(), 1, consumed_samples=far + 24)
    assert content(whole[2]) == content(again[0])
    assert whole[2].samples.tolist() == list(range(far + 24, far + 36))


@pytest.mark.parametrize("varlen", [True, False])
def test_what_is_written_into_one_piece_of_memory_is_the_same_batch(
    sampler: Sampler, splits: list[Split], monkeypatch: pytest.MonkeyPatch, varlen: bool
) -> None:
    """As for a GPU, whose pinned memory is a piece a micro-batch; no two batches share any of it."""
    chosen = geometry() if varlen else geometry(seq_len=WINDOW, context_len=WINDOW, varlen=False)
    expected = read_steps(sampler, splits, chosen, 8, num_threads=0)
    pieces: list[torch.Tensor] = []

    def one_piece(length: int) -> torch.Tensor:
        pieces.append(torch.full((length,), 77, dtype=torch.int32))
        return pieces[-1]

    monkeypatch.setattr(loader_module, "_pinned", one_piece)
    into_memory = loader_module._HostMemory
    monkeypatch.setattr(loader_module, "_HostMemory", lambda pinned: into_memory(pinned=True))
    found = read_steps(sampler, splits, chosen, 8, num_threads=3, prefetch_steps=5)
    assert [content(step) for step in found] == [content(step) for step in expected]
    assert len({piece.data_ptr() for piece in pieces}) == len(pieces) >= 8 * 3
    owned = {piece.untyped_storage().data_ptr() for piece in pieces}
    for step in found:
        for batch in step.micro_batches:
            tensors = [batch.input_ids, batch.labels, batch.positions]
            assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
            tensors += [] if batch.cu_seqlens is None else [batch.cu_seqlens]
            assert {tensor.untyped_storage().data_ptr() for tensor in tensors} < owned
            assert all(tensor.is_contiguous() for tensor in tensors)
