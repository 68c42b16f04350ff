"""The loader on a GPU: pinned by its threads, copied without waiting, and what the CPU has."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from flame.sampling.geometry import BatchGeometry
from flame.sampling.sampler import Sampler
from flame.sampling.sources import mixture_of_corpora, open_mixture
from flame.train.loader import StepLoader
from tests.corpora import make_corpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FIELDS = ("input_ids", "labels", "positions", "cu_seqlens")


@pytest.mark.parametrize("num_threads", [0, 3])
def test_what_arrives_is_what_the_cpu_has(tmp_path: Path, num_threads: int) -> None:
    """Steps are read far ahead while the GPU lags behind: memory that is reused too early would show."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 500, rng.integers(1, 3000)).tolist() for _ in range(300)]
    mixture = mixture_of_corpora([make_corpus(tmp_path / "corpus", documents, provenance=False)], None, 3)
    splits = open_mixture(mixture)
    geometry = BatchGeometry(
        seq_len=16384, window_len=8192, context_len=2048, micro_batch=4, accumulation=2, dp_size=1, varlen=True
    )
    kept: dict[str, list[list[torch.Tensor]]] = {}
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        steps = StepLoader(
            Sampler(mixture, splits, 8192),
            splits,
            geometry,
            dp_rank=0,
            consumed_samples=0,
            num_embeddings=512,
            device=device,
            num_threads=num_threads,
            prefetch_steps=6,
        )
        busy = torch.ones(4096, 4096, device=device) if device.type == "cuda" else None
        kept[device.type] = []
        for step in itertools.islice(steps, 40):
            for batch in step.micro_batches:
                tensors = [getattr(batch, name) for name in FIELDS]
                assert all(tensor.device == device for tensor in tensors)
                if busy is not None:
                    busy = busy @ busy * 1e-4
                kept[device.type].append([tensor.clone() for tensor in tensors])
        steps.close()
    for ours, expected in zip(kept["cuda"], kept["cpu"], strict=True):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, expected, strict=True))
