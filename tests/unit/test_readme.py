"""The README: every command that it shows is parsed by the program that it names, every path of its tree exists."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flame.config import parse_flat
from flame.program import Command

PROJECT = Path(__file__).resolve().parents[2]
README = (PROJECT / "README.md").read_text(encoding="utf-8")
FLAT_PROGRAMS = {
    "flame-preprocess": "flame.cli.preprocess",
    "flame-mix": "flame.cli.mix",
    "flame-export": "flame.cli.export",
}


def shell_commands(markdown: str) -> list[list[str]]:
    """The commands of all ```bash blocks, as words, without comments and leading variables."""
    commands = []
    for block in re.findall(r"^```bash\n(.*?)^```", markdown, flags=re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words = words[1:]
            if words:
                commands.append(words)
    return commands


def tree_paths(markdown: str) -> list[tuple[str, bool]]:
    """The paths of the README's tree, with whether each stands there as a folder.

    A line is an indented name (or several), two spaces or more, and what it is; a name with a slash at its end holds
    the lines that are indented further.
    """
    block = re.search(r"^```\n(flame/\n.*?)^```", markdown, flags=re.MULTILINE | re.DOTALL)
    assert block is not None, "README.md has no tree that begins with flame/"
    paths: list[tuple[str, bool]] = []
    folders: dict[int, str] = {}
    for line in block[1].splitlines():
        indent = len(line) - len(line.lstrip())
        for depth in [depth for depth in folders if depth >= indent]:
            del folders[depth]
        for name in re.split(r"\s{2,}", line.strip())[0].split():
            path = "".join(folders[depth] for depth in sorted(folders)) + name
            paths.append((path, name.endswith("/")))
            if name.endswith("/"):
                folders[indent] = name
    return paths


COMMANDS = shell_commands(README)
FLAME_COMMANDS = [words for words in COMMANDS if words[0].startswith("flame-")]


def test_the_readme_shows_every_program() -> None:
    assert {words[0] for words in FLAME_COMMANDS} == {*FLAT_PROGRAMS, "flame-train"}


@pytest.mark.parametrize("words", FLAME_COMMANDS, ids=[" ".join(words[:2]) for words in FLAME_COMMANDS])
def test_a_command_of_the_readme_parses(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if words[0] == "flame-train":
        from flame.train.config import parse_train_config

        parse_train_config(words[1:])
    else:
        commands = {command.name: command for command in commands_of(FLAT_PROGRAMS[words[0]], monkeypatch)}
        parse_flat(commands[words[1]].options, words[2:], program=" ".join(words[:2]))


def commands_of(module_name: str, monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """The subcommands that a program's `main` would offer."""
    module = importlib.import_module(module_name)
    offered: list[Command] = []

    def keep(program: str, description: str, commands: Sequence[Command], argv: Any = None) -> int:
        offered.extend(commands)
        return 0

    monkeypatch.setattr(module, "run_program", keep)
    assert module.main([]) == 0 and offered
    return offered


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    targets = [words[1] for words in COMMANDS if words[0] == "make"]
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_every_path_of_the_tree_exists() -> None:
    for path, is_folder in tree_paths(README):
        assert (PROJECT / path).is_dir() if is_folder else (PROJECT / path).is_file(), path


def test_the_tree_names_every_module() -> None:
    told = {path for path, is_folder in tree_paths(README) if not is_folder}
    modules = {path.relative_to(PROJECT).as_posix() for path in (PROJECT / "flame").rglob("*.py")}
    assert {path for path in modules if not path.endswith("__init__.py")} - told == set()


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (PROJECT / target).exists(), target


def test_tests_that_the_readme_names_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", README)
    assert named
    for path, function in named:
        text = (PROJECT / path).read_text(encoding="utf-8")
        assert not function or f"def {function}(" in text, f"{path}::{function}"
