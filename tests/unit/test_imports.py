"""Imports point down, and the offline half never loads torch or transformers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

FLAME = Path(__file__).resolve().parents[2] / "flame"
ALLOWED = {
    "errors": set(),
    "words": set(),
    "near": set(),
    "files": {"errors"},
    "config": {"errors", "files"},
    "program": {"errors", "config"},
    "shards": {"errors", "files", "config"},
    "sampling": {"errors", "words", "files", "config", "shards"},
    "preprocess": {"errors", "words", "near", "files", "config", "shards"},
    "kernels": {"errors"},
    "train": {"errors", "words", "near", "files", "config", "program", "shards", "sampling", "kernels"},
    "export": {"errors", "near", "files", "config", "shards", "train"},
    "cli": {"errors", "files", "config", "program", "shards", "sampling", "preprocess", "train", "export"},
}
# The run's own final export is the exporter's one function; the exporter reads the trainer's checkpoints.
EXCEPTIONS = {("train/ending.py", "export")}
WITHOUT_TORCH = ("errors", "words", "near", "files", "config", "program", "shards", "sampling", "preprocess")
HEAVY = {"torch", "transformers", "fla", "triton"}


def modules() -> list[Path]:
    return sorted(path for path in FLAME.rglob("*.py") if path.name != "__init__.py")


def package_of(path: Path) -> str:
    return path.relative_to(FLAME).parts[0].removesuffix(".py")


def imported_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_there_are_modules_to_check() -> None:
    assert {package_of(path) for path in modules()} <= set(ALLOWED)
    assert len(modules()) > 20


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(FLAME)))
def test_imports_point_down(path: Path) -> None:
    package = package_of(path)
    inside = {name.split(".")[1] for name in imported_names(path) if name.startswith("flame.")} - {package}
    allowed = ALLOWED[package] | {
        target for name, target in EXCEPTIONS if name == str(path.relative_to(FLAME)) and target in inside
    }
    assert inside <= allowed


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(FLAME)))
def test_the_offline_half_never_names_torch(path: Path) -> None:
    if package_of(path) in WITHOUT_TORCH or path.name in ("preprocess.py", "mix.py"):
        assert not {name.split(".")[0] for name in imported_names(path)} & HEAVY


def test_packages_do_not_re_export() -> None:
    for path in FLAME.rglob("__init__.py"):
        assert not path.read_text().strip(), f"{path} is not empty"


@pytest.mark.parametrize("module", ["flame.cli.preprocess", "flame.cli.mix"])
def test_the_offline_commands_load_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(name in sys.modules for name in {sorted(HEAVY)!r}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
