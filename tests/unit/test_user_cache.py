"""What is kept of a tokenizer between builds: never another answer than a fresh look would give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flame.preprocess import tokenizer as tokenizer_module
from flame.preprocess.tokenizer import TokenizerSpec, read_tokenizer
from flame.preprocess.user_cache import keep, read_kept, user_cache
from tests.tokenizers import EOS, write_tiny_tokenizer

KEY = "sha256:" + "ab" * 32


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "flame"


def read(path: Path, bos: str = "auto", parse_special: bool = False) -> TokenizerSpec:
    return read_tokenizer(path, eos_token=None, bos=bos, parse_special=parse_special)


def test_a_value_is_read_back_under_its_own_key_only(cache: Path) -> None:
    path = user_cache("thing", KEY)
    assert path.parent == cache
    keep(path, KEY, {"value": [1, None, "x"]})
    assert read_kept([cache / "absent.json", path], KEY) == {"value": [1, None, "x"]}
    assert read_kept([path], "sha256:" + "cd" * 32) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff", b'{"value": 1}'])
def test_a_damaged_file_is_as_good_as_none(cache: Path, content: bytes) -> None:
    cache.mkdir(parents=True)
    (cache / "thing.json").write_bytes(content)
    assert read_kept([cache / "thing.json"], KEY) is None


def test_a_value_in_which_a_digit_flipped_is_as_good_as_none(cache: Path) -> None:
    path = user_cache("thing", KEY)
    keep(path, KEY, {"eos_id": 12345})
    path.write_bytes(path.read_bytes().replace(b"12345", b"12346"))
    assert read_kept([path], KEY) is None


def test_a_folder_that_cannot_be_written_is_passed_over() -> None:
    keep(Path("/proc/none/thing.json"), KEY, {"value": 1})


def test_a_tokenizer_is_taken_apart_once_and_again_when_anything_of_it_changes(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_tokenizer(tmp_path / "tok", bos="<s>")
    fresh = {(bos, parse): read(folder, bos, parse) for bos in ("always", "never") for parse in (False, True)}
    assert len({spec.info.fingerprint for spec in fresh.values()}) == 4

    parsed = []
    monkeypatch.setattr(tokenizer_module, "_vocabulary", lambda value: parsed.append(value) or {EOS: 0, "<s>": 1})
    assert {(bos, parse): read(folder, bos, parse) for bos, parse in fresh} == fresh and not parsed

    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation": None, "extra": 1}))
    assert read(folder).info.vocab_size == 2 and len(parsed) == 1

    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token": "<s>"}))
    assert read(folder).eos_token == "<s>" and len(parsed) == 2
