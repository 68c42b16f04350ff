"""Mixtures as index maps: the trainer's own samples, in its order, from any position, on any number of ranks."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from flame.errors import MixtureError, UsageError
from flame.sampling.dataset import MixtureDataset, Sample, rank_samples, samples_per_step
from flame.sampling.geometry import BatchGeometry, sample_indices
from flame.sampling.mixture import Mixture
from flame.sampling.mixture_file import write_mixture
from flame.sampling.packing import pack
from flame.sampling.sampler import Sampler
from flame.sampling.sources import mixture_of_corpora, open_mixture
from flame.train.dataset import RankSampler, TorchDataset, collate, collate_packed
from flame.train.loader import StepLoader
from tests.corpora import make_corpus

WINDOW, CONTEXT = 8, 5


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    folder = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(3)
    corpora = []
    for name, count in (("web", 60), ("code", 40)):
        documents = [rng.integers(1, 400, rng.integers(0, 20)).tolist() for _ in range(count)]
        corpora.append(make_corpus(folder / name, documents, shard_tokens=100, provenance=False))
    return mixture_of_corpora(corpora, [0.6, 0.4], 11)


@pytest.fixture(scope="module")
def dataset(mixture: Mixture) -> MixtureDataset:
    return MixtureDataset(mixture, window_len=WINDOW, context_len=CONTEXT, num_samples=500)


def geometry(**changes: Any) -> BatchGeometry:
    chosen = {"seq_len": WINDOW, "window_len": WINDOW, "context_len": CONTEXT, "micro_batch": 1, "accumulation": 1}
    return BatchGeometry(**({"dp_size": 1, "varlen": True} | chosen | changes))


def same(one: Sample, other: Sample) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in Sample.__annotations__)  # type: ignore[literal-required]


def test_a_sample_is_what_packing_it_alone_gives(mixture: Mixture, dataset: MixtureDataset) -> None:
    splits = open_mixture(mixture)
    sampler = Sampler(mixture, splits, WINDOW)
    assert len(dataset) == 500 and dataset.window_len == WINDOW
    for k in (0, 1, 77, 499):
        batch, sample = pack(sampler, splits, np.array([[k]]), geometry()), dataset[k]
        assert set(sample) == set(Sample.__annotations__)
        assert all(array.dtype == np.int32 for array in sample.values())
        assert sample["input_ids"].shape == sample["labels"].shape == sample["positions"].shape == (WINDOW,)
        for name in ("input_ids", "labels", "positions"):
            assert np.array_equal(sample[name], getattr(batch, name)[0])
        assert batch.cu_seqlens is not None and sample["cu_seqlens"].tolist() == batch.cu_seqlens.tolist()
        assert max(np.diff(sample["cu_seqlens"])) <= CONTEXT
    assert all(same(dataset[k], sample) for k, sample in zip((9, 2, 400), dataset.read([9, 2, 400]), strict=True))
    assert all(same(dataset[k], sample) for k, sample in enumerate(dataset))
    assert sum(1 for _ in dataset) == 500


def test_without_varlen_a_window_is_one_sequence(mixture: Mixture) -> None:
    dataset = MixtureDataset(mixture, window_len=WINDOW, varlen=False)
    sample = dataset[2**40]
    assert sample["cu_seqlens"].tolist() == [0, WINDOW] and sample["positions"].tolist() == list(range(WINDOW))
    assert (sample["labels"][:-1] == sample["input_ids"][1:]).all()


def test_lengths_and_what_is_outside_of_them(mixture: Mixture, dataset: MixtureDataset) -> None:
    endless = MixtureDataset(mixture, window_len=WINDOW)
    with pytest.raises(TypeError, match="num_samples"):
        len(endless)
    assert same(next(iter(endless)), endless[0])
    for k in (-1, 500):
        with pytest.raises(IndexError, match=f"sample {k} of a dataset of 500"):
            dataset[k]
    with pytest.raises(UsageError, match="no such length"):
        MixtureDataset(mixture, window_len=0)
    with pytest.raises(UsageError, match="number of samples"):
        MixtureDataset(mixture, window_len=1, num_samples=-1)
    with pytest.raises(MixtureError, match="too small for one window"):
        MixtureDataset(mixture, window_len=10**6)


def test_it_opens_a_manifest_and_travels_to_other_processes(
    mixture: Mixture, dataset: MixtureDataset, tmp_path: Path
) -> None:
    write_mixture(tmp_path / "mix.json", mixture)
    opened = MixtureDataset.open(tmp_path / "mix.json", window_len=WINDOW, context_len=CONTEXT)
    sent = pickle.loads(pickle.dumps(dataset))
    assert same(opened[123], dataset[123]) and same(sent[123], dataset[123]) and len(sent) == 500


@given(
    world_size=st.integers(1, 64),
    batch_size=st.integers(1, 9),
    accumulation=st.integers(1, 5),
    consumed=st.integers(0, 2**50),
    steps=st.integers(0, 3),
)
def test_ranks_take_what_the_trainer_deals_them_and_all_of_it(
    world_size: int, batch_size: int, accumulation: int, consumed: int, steps: int
) -> None:
    chosen = {"world_size": world_size, "batch_size": batch_size, "gradient_accumulation_steps": accumulation}
    per_step = samples_per_step(**chosen)
    end = consumed + steps * per_step
    taken = [
        list(rank_samples(rank=rank, **chosen, consumed_samples=consumed, num_samples=end + per_step - 1))
        for rank in range(world_size)
    ]
    assert sorted(itertools.chain(*taken)) == list(range(consumed, end))
    trainer = geometry(micro_batch=batch_size, accumulation=accumulation, dp_size=world_size)
    for rank in {0, world_size - 1}:
        dealt = [sample_indices(trainer, consumed + step * per_step, rank).reshape(-1) for step in range(steps)]
        assert taken[rank] == [k for ks in dealt for k in ks.tolist()]


@pytest.mark.parametrize("resumed_at", range(4))
def test_two_ranks_read_the_batches_of_the_step_loader_from_any_step_on(
    mixture: Mixture, dataset: MixtureDataset, resumed_at: int
) -> None:
    """Rows of two windows, two rows a micro-batch, three micro-batches a step: batches of four samples."""
    splits = open_mixture(mixture)
    sampler = Sampler(mixture, splits, WINDOW)
    trainer = geometry(seq_len=2 * WINDOW, micro_batch=2, accumulation=3, dp_size=2)
    chosen = {"world_size": 2, "batch_size": 4, "gradient_accumulation_steps": 3}
    consumed = resumed_at * samples_per_step(**chosen)
    assert samples_per_step(**chosen) == trainer.samples_per_step
    torch_dataset = TorchDataset(dataset)
    for rank in range(2):
        order = RankSampler(torch_dataset, rank=rank, **chosen, consumed_samples=consumed)
        batches = iter(DataLoader(torch_dataset, batch_size=4, sampler=order, collate_fn=collate_packed))
        steps = StepLoader(
            sampler,
            splits,
            trainer,
            dp_rank=rank,
            consumed_samples=consumed,
            num_embeddings=512,
            device=torch.device("cpu"),
            num_threads=0,
        )
        for step in itertools.islice(steps, 4):
            for micro in step.micro_batches:
                batch = next(batches)
                assert torch.equal(batch["input_ids"], micro.input_ids.long())
                assert torch.equal(batch["labels"], micro.labels.long())
                assert torch.equal(batch["position_ids"], micro.positions.long())
                assert micro.cu_seqlens is not None and torch.equal(batch["cu_seqlens"], micro.cu_seqlens)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_read_the_same_batches(dataset: MixtureDataset, start: str) -> None:
    torch_dataset = TorchDataset(dataset)
    options: dict[str, Any] = {"batch_size": 50, "collate_fn": collate}
    order = RankSampler(torch_dataset, rank=1, world_size=2, batch_size=50, consumed_samples=100)
    assert len(order) == len(list(order)) == 200
    here = list(DataLoader(torch_dataset, sampler=order, **options))
    there = list(DataLoader(torch_dataset, sampler=order, **options, num_workers=1, multiprocessing_context=start))
    assert len(here) == len(there) == 4
    for one, other in zip(here, there, strict=True):
        assert one["labels"].shape == (50, WINDOW) and one["labels"].dtype == torch.int64
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_ranks_and_positions_that_cannot_be_are_refused(dataset: MixtureDataset) -> None:
    torch_dataset = TorchDataset(dataset)
    assert torch_dataset[3]["input_ids"].tolist() == dataset[3]["input_ids"].tolist()
    for wrong in ({"rank": 2}, {"rank": -1}, {"consumed_samples": -1}, {"batch_size": 0}, {"world_size": 0}):
        with pytest.raises(UsageError):
            RankSampler(torch_dataset, **({"rank": 0, "world_size": 2, "batch_size": 4} | wrong))
    assert len(RankSampler(torch_dataset, rank=0, world_size=1, batch_size=4, consumed_samples=501)) == 0
