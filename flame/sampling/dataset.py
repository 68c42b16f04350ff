"""The samples of a mixture as an index map, for other trainers: `dataset[k]` is what sample k of a run is, any k.

Nothing here keeps a position. A trainer that knows how many samples it has consumed goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import index
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from flame.errors import UsageError
from flame.sampling.geometry import BatchGeometry, sample_indices
from flame.sampling.mixture import Mixture
from flame.sampling.mixture_file import read_mixture
from flame.sampling.packing import PackedBatch, pack_windows
from flame.sampling.sampler import MAX_SAMPLES, Sampler, check_packs
from flame.sampling.sources import open_mixture


class Sample(TypedDict):
    """One window of S = window_len tokens, as `flame-train` gives it to a model; all arrays are int32.

    `input_ids` `[S]`; `labels` `[S]`, where labels[t] is the token after input_ids[t] (nothing is left to shift), and
    −100 at a document's last token; `positions` `[S]`, which restart with each sequence; `cu_seqlens`
    `[num_sequences + 1]`, where sequences begin and end: 0 first, S last. Without varlen the window is one sequence.
    """

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    positions: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]


class MixtureDataset:
    """The samples of a mixture by their global index: the same ones, in the same order, as a run of `flame-train`.

    `window_len` is `training.window_len`, in tokens. With `varlen` (the default) documents are separate sequences, cut
    every `context_len` tokens (default: window_len); without it a window is one sequence, and every position has a
    label. `num_samples` is what `len()` says; without it the dataset has no length, and no end.

    Safe to read from several threads; pickled, it is opened again where it arrives. Raises `MixtureError` if a corpus
    is not the one that was mixed, or is too small for one window.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        window_len: int,
        context_len: int | None = None,
        varlen: bool = True,
        num_samples: int | None = None,
    ) -> None:
        if window_len < 1 or (context_len is not None and context_len < 1):
            got = f"window_len {window_len}, context_len {context_len}"
            raise UsageError("no such length", got=got, expected="1 or more")
        if num_samples is not None and not 0 <= num_samples <= MAX_SAMPLES:
            raise UsageError("no such number of samples", got=num_samples, expected=f"from 0 to {MAX_SAMPLES}")
        self.mixture = mixture
        self.num_samples = num_samples
        self._geometry = BatchGeometry(
            seq_len=window_len,
            window_len=window_len,
            context_len=window_len if context_len is None else context_len,
            micro_batch=1,
            accumulation=1,
            dp_size=1,
            varlen=varlen,
        )
        check_packs(mixture, varlen=varlen)
        self._splits = open_mixture(mixture)
        self._sampler = Sampler(mixture, self._splits, window_len)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        window_len: int,
        context_len: int | None = None,
        varlen: bool = True,
        num_samples: int | None = None,
    ) -> MixtureDataset:
        """Open a mixture manifest, as `flame-mix create` writes it. Cost: see `Sampler`."""
        mixture = read_mixture(Path(path))
        return cls(mixture, window_len=window_len, context_len=context_len, varlen=varlen, num_samples=num_samples)

    @property
    def window_len(self) -> int:
        return self._geometry.window_len

    def __len__(self) -> int:
        if self.num_samples is None:
            raise TypeError("this MixtureDataset has no length: give num_samples when it is made")
        return self.num_samples

    def __getitem__(self, k: int) -> Sample:
        """Return sample `k`; `IndexError` outside of `[0, len)`. Cost: some 2 ms; `read` shares it among many."""
        return self.read([k])[0]

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples from 0 on, to `num_samples` or for ever."""
        at_once, stop = 64, MAX_SAMPLES if self.num_samples is None else self.num_samples
        for first in range(0, stop, at_once):
            yield from self.read(range(first, min(first + at_once, stop)))

    def read(self, ks: Sequence[int]) -> list[Sample]:
        """Return the samples `ks`, in that order; `IndexError` if one is outside of `[0, len)`."""
        stop = MAX_SAMPLES if self.num_samples is None else self.num_samples
        numbers = [index(k) for k in ks]
        for k in numbers:
            if not 0 <= k < stop:
                raise IndexError(f"sample {k} of a dataset of {stop}")
        located = self._sampler.locate(np.array(numbers, dtype=np.int64))
        samples = []
        for i, (source, offset) in enumerate(zip(located.source.tolist(), located.offset.tolist(), strict=True)):
            window = (self._splits[source], offset)
            batch = pack_windows(
                [window], self._geometry, sources=located.source[i : i + 1], samples=np.array([numbers[i]])
            )
            samples.append(_sample(batch))
        return samples

    def __reduce__(self) -> tuple[Any, ...]:
        geometry = self._geometry
        return _reopened, (self.mixture, self.window_len, geometry.context_len, geometry.varlen, self.num_samples)


def rank_samples(
    *,
    rank: int,
    world_size: int,
    batch_size: int,
    gradient_accumulation_steps: int = 1,
    consumed_samples: int = 0,
    num_samples: int | None = None,
) -> Iterator[int]:
    """Yield the samples that a data-parallel rank takes, in order: as `flame-train` deals them, from any position on.

    Each `batch_size` of them are a micro-batch of this rank; it is counted in samples, so `training.batch_size` rows of
    `seq_len / window_len` windows are their product. A step takes `batch_size × gradient_accumulation_steps ×
    world_size` samples from `consumed_samples` on; ends before a step that would go past `num_samples` of the run.
    """
    geometry = _geometry_of_ranks(world_size, batch_size, gradient_accumulation_steps)
    if not 0 <= rank < world_size or consumed_samples < 0:
        raise UsageError(
            "no such rank or position",
            got=f"rank {rank}, consumed_samples {consumed_samples}",
            expected=f"a rank from 0 to {world_size - 1}, and a position of 0 or more",
        )
    stop = MAX_SAMPLES if num_samples is None else num_samples
    while consumed_samples + geometry.samples_per_step <= stop:
        yield from sample_indices(geometry, consumed_samples, rank).reshape(-1).tolist()
        consumed_samples += geometry.samples_per_step


def samples_per_step(*, world_size: int, batch_size: int, gradient_accumulation_steps: int = 1) -> int:
    """Return how many samples an optimizer step of all ranks consumes: what a trainer adds to its position."""
    return _geometry_of_ranks(world_size, batch_size, gradient_accumulation_steps).samples_per_step


def _geometry_of_ranks(world_size: int, batch_size: int, gradient_accumulation_steps: int) -> BatchGeometry:
    """Return the geometry whose rows are single samples; how long they are decides no order."""
    for name, value in (
        ("world_size", world_size),
        ("batch_size", batch_size),
        ("gradient_accumulation_steps", gradient_accumulation_steps),
    ):
        if value < 1:
            raise UsageError(f"{name} cannot be {value}", expected="1 or more")
    return BatchGeometry(
        seq_len=1,
        window_len=1,
        context_len=1,
        micro_batch=batch_size,
        accumulation=gradient_accumulation_steps,
        dp_size=world_size,
        varlen=True,
    )


def _reopened(
    mixture: Mixture, window_len: int, context_len: int, varlen: bool, num_samples: int | None
) -> MixtureDataset:
    return MixtureDataset(
        mixture, window_len=window_len, context_len=context_len, varlen=varlen, num_samples=num_samples
    )


def _sample(batch: PackedBatch) -> Sample:
    cu_seqlens = batch.cu_seqlens
    if cu_seqlens is None:
        cu_seqlens = np.array([0, batch.input_ids.size], dtype=np.int32)
    return Sample(
        input_ids=batch.input_ids[0], labels=batch.labels[0], positions=batch.positions[0], cu_seqlens=cu_seqlens
    )
