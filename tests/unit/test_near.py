"""An absent path, and what lies beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flame.near import near_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "llama_1.2B.json").touch()
    (tmp_path / "llama_374M.json").touch()
    for name, file in (("Qwen3-0.6B", "config.json"), ("corpora", "manifest.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("llama_1.2B", "llama_1.2B.json"),
        ("llama_347M.json", "llama_374M.json"),
        ("lama_1.2B.json", "llama_1.2B.json"),
        ("Qwen3-0.6", "Qwen3-0.6B"),
        ("corpus", None),
        ("elsewhere/llama_1.2B", None),
    ],
)
def test_what_was_meant(folder: Path, typed: str, meant: str | None) -> None:
    expected = None if meant is None else f"Did you mean {folder / meant}?"
    assert near_path(folder / typed, "config.json") == expected


def test_the_shell_leaves_a_tilde_behind_an_equals_sign(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    assert near_path(Path("~/llama_1.2B.json"), "config.json") == f"Did you mean {folder / 'llama_1.2B.json'}?"
    assert near_path(Path("~nobody-of-that-name/llama_1.2B.json"), "config.json") is None
