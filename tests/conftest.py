"""Fixtures that every test may use; nothing here needs the network or data that the project does not make."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".pytest_cache" / "home")  # not the user's own
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

from tests.tokenizers import write_tiny_tokenizer

pytest.register_assert_rewrite("tests.promises")  # a failed assertion there tells its values

settings.register_profile(
    "flame", deadline=None, derandomize=bool(os.environ.get("CI")), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("flame")

PROJECT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real documents and tokenizers (`FLAME_SHARED_DATA`, else `../shared/data`); skips where absent."""
    folder = Path(os.environ.get("FLAME_SHARED_DATA", PROJECT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"the optional real documents and tokenizers are not at {folder} (FLAME_SHARED_DATA names them)")
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level BPE tokenizer of some 400 tokens whose EOS is `<|endoftext|>`."""
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def handlers_kept() -> Iterator[None]:
    """For a training run in the test's own process: it takes SIGTERM and SIGUSR1 for itself."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
