"""Fixtures of whole runs on GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flame.kernels.tuning import keep_tuned_configurations
from tests.runs import LLAMA, end_trainings, make_training_folder


@pytest.fixture(scope="session")
def tuned_configurations() -> None:
    """Sweeps of fla's kernels compile on all cores, and what is shipped or kept is not sought again, as in training."""
    if torch.cuda.is_available():
        keep_tuned_configurations(torch.cuda.get_device_name())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """Two corpora and a model whose heads the kernels of a GPU take."""
    folder = make_training_folder(tmp_path_factory.mktemp("training"), tiny_tokenizer)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    (folder / "llama.json").write_text(json.dumps(LLAMA | shape))
    return folder


@pytest.fixture(autouse=True)
def trainings_end_with_their_test() -> Iterator[None]:
    """A test that fails leaves no training on a GPU behind."""
    yield
    end_trainings()
