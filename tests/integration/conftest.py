"""Fixtures of tests that train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import end_trainings, make_training_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """Two corpora and a model to train on (`make_training_folder`), which no test may change."""
    return make_training_folder(tmp_path_factory.mktemp("training"), tiny_tokenizer)


@pytest.fixture(autouse=True)
def trainings_end_with_their_test() -> Iterator[None]:
    """A test that fails leaves no training behind, nor a pipe that a later test's collector finds open."""
    yield
    end_trainings()
