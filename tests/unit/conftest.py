"""Fixtures of tests of `verify`."""

from __future__ import annotations

from pathlib import Path

import pytest

from flame.preprocess import shard_check
from tests.tokenizers import eos_of


@pytest.fixture
def eos_id(tiny_tokenizer: Path) -> int:
    return eos_of(tiny_tokenizer)


@pytest.fixture(params=[shard_check.CHUNK_BYTES, 64], ids=["one chunk", "chunks of 64 bytes"])
def shard_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are checked in one chunk, and in many."""
    monkeypatch.setattr(shard_check, "CHUNK_BYTES", request.param)
