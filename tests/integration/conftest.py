"""Fixtures of tests that train."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import make_training_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """Two corpora and a model to train on (`make_training_folder`), which no test may change."""
    return make_training_folder(tmp_path_factory.mktemp("training"), tiny_tokenizer)
