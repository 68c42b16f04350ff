"""Samples of a mixture for torch: a dataset, the sampler of a data-parallel rank, and what makes batches of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from flame.sampling.dataset import MixtureDataset, Sample, rank_samples, samples_per_step


class TorchDataset(Dataset[dict[str, Tensor]]):
    """A `MixtureDataset` as a map-style dataset of torch; a `DataLoader` may read it in any number of workers.

    Items are int64 tensors `[window_len]`, `input_ids`, `labels`, `positions`, and `cu_seqlens` (int32,
    `[num_sequences + 1]`): see `Sample`.
    """

    def __init__(self, samples: MixtureDataset) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        return _tensors(self.samples[k])

    def __getitems__(self, ks: list[int]) -> list[dict[str, Tensor]]:
        """Return a batch: a `DataLoader` asks for all of one at once, which costs little more than one sample."""
        return [_tensors(sample) for sample in self.samples.read(ks)]


class RankSampler(Sampler[int]):
    """The samples of one data-parallel rank, for a `DataLoader` with the same `batch_size`; see `rank_samples`.

    Its batches are the micro-batches that this rank of `flame-train` would have. To resume, make one with the
    `consumed_samples` of the checkpoint: `steps × samples_per_step(…)`. It keeps no position of its own, because
    workers that read ahead have asked for more than was trained on.
    """

    def __init__(
        self,
        dataset: TorchDataset,
        *,
        rank: int,
        world_size: int,
        batch_size: int,
        gradient_accumulation_steps: int = 1,
        consumed_samples: int = 0,
    ) -> None:
        self._samples = dataset.samples
        self._rank = rank
        self._world_size = world_size
        self._batch_size = batch_size
        self._accumulation = gradient_accumulation_steps
        self._consumed_samples = consumed_samples
        next(iter(self), None)  # says what cannot be

    def __iter__(self) -> Iterator[int]:
        return rank_samples(
            rank=self._rank,
            world_size=self._world_size,
            batch_size=self._batch_size,
            gradient_accumulation_steps=self._accumulation,
            consumed_samples=self._consumed_samples,
            num_samples=self._samples.num_samples,
        )

    def __len__(self) -> int:
        """Return how many samples this rank has left, whole steps only."""
        per_step = samples_per_step(
            world_size=self._world_size, batch_size=self._batch_size, gradient_accumulation_steps=self._accumulation
        )
        num_steps = max(0, len(self._samples) - self._consumed_samples) // per_step
        return num_steps * self._batch_size * self._accumulation


def collate(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch for a Hugging Face causal language model: int64 `[batch_size, window_len]` each.

    `input_ids` and `position_ids`, which restart with each document: transformers' attention keeps documents apart by
    them, where no attention mask is given. `shift_labels` are the labels, already one token ahead; `labels` are the
    same tensor, for code that looks whether there are any. A loss of your own compares `logits[t]` with them,
    unshifted.
    """
    labels = torch.stack([sample["labels"] for sample in samples])
    return {
        "input_ids": torch.stack([sample["input_ids"] for sample in samples]),
        "position_ids": torch.stack([sample["positions"] for sample in samples]),
        "labels": labels,
        "shift_labels": labels,
    }


def collate_packed(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return `collate`'s batch as one row, `[1, batch_size × window_len]`, and its `cu_seqlens` (int32).

    For models that take documents packed in one row: those of flash-linear-attention.
    """
    batch = {name: rows.reshape(1, -1) for name, rows in collate(samples).items()}
    begin, parts = 0, [torch.zeros(1, dtype=torch.int32)]
    for sample in samples:
        parts.append(sample["cu_seqlens"][1:] + begin)
        begin += sample["input_ids"].numel()
    return batch | {"cu_seqlens": torch.cat(parts)}


def _tensors(sample: Sample) -> dict[str, Tensor]:
    return {
        "input_ids": torch.from_numpy(sample["input_ids"]).long(),
        "labels": torch.from_numpy(sample["labels"]).long(),
        "positions": torch.from_numpy(sample["positions"]).long(),
        "cu_seqlens": torch.from_numpy(sample["cu_seqlens"]),
    }
