"""Steps of data, read ahead by threads: the samples of a step are a function of `consumed_samples` alone.

The reader is memory-mapped and spends its time outside Python's lock, so threads are enough, and a thread that reads
ahead holds no state that a resume would need.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flame.errors import TrainingError
from flame.sampling.geometry import BatchGeometry, sample_indices
from flame.sampling.packing import Memory, PackedBatch, pack_windows
from flame.sampling.sampler import Sampler
from flame.shards.reader import Split

_LOCATED_SAMPLES = 4096  # at once: locating has a fixed cost, and 4096 samples are 80 KB


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A packed batch as tensors; `lengths` (numpy) are those of its sequences, for counting operations."""

    input_ids: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: Tensor | None
    max_seqlen: int | None
    lengths: NDArray[np.int64]

    def to(self, device: torch.device) -> MicroBatch:
        """Return the batch on `device`; a copy of pinned memory does not wait."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            cu_seqlens=None if self.cu_seqlens is None else self.cu_seqlens.to(device, non_blocking=True),
        )


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """All that one rank sees in a step. Counts are this rank's; `consumed_samples` is the run's, after the step.

    `samples`, `sources` and `labels_by_sample` have an entry for each window, in the order of the micro-batches.
    """

    micro_batches: tuple[MicroBatch, ...]
    num_labels: int
    samples: NDArray[np.int64]
    sources: NDArray[np.int32]
    labels_by_sample: NDArray[np.int64]
    consumed_samples: int


class StepLoader:
    """Iterates over steps from `consumed_samples` on, for ever, in order, `prefetch_steps` ahead in `num_threads`.

    With 0 threads every step is read when it is asked for. `num_embeddings` bounds token ids: a larger one raises
    `TrainingError` before it reaches the model. What goes wrong in a thread is raised by the step that it was for.
    Close it when done.
    """

    def __init__(
        self,
        sampler: Sampler,
        splits: Sequence[Split],
        geometry: BatchGeometry,
        *,
        dp_rank: int,
        consumed_samples: int,
        num_embeddings: int,
        device: torch.device,
        num_threads: int = 1,
        prefetch_steps: int = 2,
    ) -> None:
        self.wait_seconds = 0.0
        """How long the last step was waited for."""
        self._splits = splits
        self._geometry = geometry
        self._num_embeddings = num_embeddings
        self._device = device
        self._planned = plan_steps(sampler, geometry, dp_rank=dp_rank, consumed_samples=consumed_samples)
        self._ahead: deque[Future[StepBatch]] = deque()
        self._prefetch_steps = max(1, prefetch_steps)
        self._threads = (
            ThreadPoolExecutor(num_threads, "flame-loader", initializer=_use_device, initargs=(device,))
            if num_threads > 0
            else None
        )

    def __iter__(self) -> StepLoader:
        return self

    def __next__(self) -> StepBatch:
        began = time.perf_counter()
        step = self._read(next(self._planned)) if self._threads is None else self._take(self._threads)
        if self._device.type != "cpu":
            step = replace(step, micro_batches=tuple(batch.to(self._device) for batch in step.micro_batches))
        self.wait_seconds = time.perf_counter() - began
        return step

    def close(self) -> None:
        """Stop reading ahead and join the threads."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _take(self, threads: ThreadPoolExecutor) -> StepBatch:
        while len(self._ahead) <= self._prefetch_steps:
            self._ahead.append(threads.submit(self._read, next(self._planned)))
        return self._ahead.popleft().result()

    def _read(self, planned: PlannedStep) -> StepBatch:
        """Read a step into host memory, pinned where it will be copied to a GPU."""
        self._advise(planned)
        memories = [_HostMemory(pinned=self._device.type == "cuda") for _ in range(self._geometry.accumulation)]
        batches = [self._pack(planned, micro_step, memory) for micro_step, memory in enumerate(memories)]
        by_sample = np.array([labels for batch in batches for labels in batch.labels_by_sample], dtype=np.int64)
        return StepBatch(
            micro_batches=tuple(memory.tensors(batch) for memory, batch in zip(memories, batches, strict=True)),
            num_labels=int(by_sample.sum()),
            samples=planned.samples.reshape(-1),
            sources=planned.sources.reshape(-1),
            labels_by_sample=by_sample,
            consumed_samples=planned.consumed_samples,
        )

    def _advise(self, planned: PlannedStep) -> None:
        """Have the disk read all windows of a step at once, before the first is waited for."""
        for source, offset in zip(
            planned.sources.reshape(-1).tolist(), planned.offsets.reshape(-1).tolist(), strict=True
        ):
            self._splits[source].advise_window(offset, self._geometry.window_len)

    def _pack(self, planned: PlannedStep, micro_step: int, memory: _HostMemory) -> PackedBatch:
        sources, offsets = planned.sources[micro_step], planned.offsets[micro_step].tolist()
        windows = [(self._splits[source], offset) for source, offset in zip(sources.tolist(), offsets, strict=True)]
        batch = pack_windows(
            windows, self._geometry, sources=sources, samples=planned.samples[micro_step], memory=memory.pinned
        )
        if batch.max_token_id >= self._num_embeddings:
            raise TrainingError(
                "a sample holds a token id that the model has no embedding for",
                where=f"samples {batch.samples[0]} to {batch.samples[-1]}",
                got=f"id {batch.max_token_id}",
                expected=f"ids below {self._num_embeddings}",
                fix="The corpus changed after it was sealed: check it with flame-preprocess verify",
            )
        return batch


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """Which windows a rank reads for a step (`[accumulation, windows]`), and what `StepBatch` tells of them."""

    samples: NDArray[np.int64]
    sources: NDArray[np.int32]
    offsets: NDArray[np.int64]
    consumed_samples: int


def plan_steps(
    sampler: Sampler, geometry: BatchGeometry, *, dp_rank: int, consumed_samples: int
) -> Iterator[PlannedStep]:
    """Yield a rank's steps, for ever; many are located at once."""
    per_step = geometry.samples_per_step
    of_step = sample_indices(geometry, 0, dp_rank).reshape(geometry.accumulation, -1)
    num_steps = max(1, _LOCATED_SAMPLES // of_step.size)
    firsts = np.arange(num_steps, dtype=np.int64)[:, None, None] * per_step
    while True:
        samples = firsts + (of_step + consumed_samples)
        located = sampler.locate(samples.reshape(-1))
        for ks, sources, offsets in zip(
            samples, located.source.reshape(samples.shape), located.offset.reshape(samples.shape), strict=True
        ):
            consumed_samples += per_step
            yield PlannedStep(samples=ks, sources=sources, offsets=offsets, consumed_samples=consumed_samples)


class _HostMemory:
    """What a micro-batch is written into: pinned, where a GPU will copy it, else its arrays' own memory.

    Each batch has its own. Torch keeps pinned memory for later batches, and gives it out again only once no tensor is
    in it and no copy out of it is under way.
    """

    def __init__(self, *, pinned: bool) -> None:
        self.pinned: Memory | None = self._allocate if pinned else None
        self._pieces: list[Tensor] = []

    def _allocate(self, length: int) -> NDArray[np.int32]:
        self._pieces.append(_pinned(length))
        values: NDArray[np.int32] = self._pieces[-1].numpy()
        return values

    def tensors(self, batch: PackedBatch) -> MicroBatch:
        """Return a batch that was packed here as tensors over the same memory."""
        if not self._pieces:
            return on_host(batch, pinned=False)
        first, *rest = self._pieces
        ids, labels, positions = first.view(3, *batch.input_ids.shape)
        return MicroBatch(
            input_ids=ids,
            labels=labels,
            positions=positions,
            cu_seqlens=rest[0] if rest else None,
            max_seqlen=batch.max_seqlen,
            lengths=batch.lengths.astype(np.int64),
        )


def _pinned(length: int) -> Tensor:
    return torch.empty(length, dtype=torch.int32, pin_memory=True)


def on_host(batch: PackedBatch, *, pinned: bool) -> MicroBatch:
    """Return a packed batch as tensors: the same memory, or a pinned copy."""

    def tensor(array: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array).pin_memory() if pinned else torch.from_numpy(array)

    return MicroBatch(
        input_ids=tensor(batch.input_ids),
        labels=tensor(batch.labels),
        positions=tensor(batch.positions),
        cu_seqlens=None if batch.cu_seqlens is None else tensor(batch.cu_seqlens),
        max_seqlen=batch.max_seqlen,
        lengths=batch.lengths.astype(np.int64),
    )


def to_device(batch: PackedBatch, device: torch.device) -> MicroBatch:
    """Return a packed batch as tensors on `device`."""
    return on_host(batch, pinned=device.type == "cuda").to(device)


def _use_device(device: torch.device) -> None:
    """Let a reading thread pin memory for its rank's own GPU: a new thread's is the first one of the host."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
