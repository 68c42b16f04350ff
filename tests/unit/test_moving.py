"""What users of the predecessor find: train.sh, the recipes, and a page that says what is true."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from flame.config import parse_flat
from flame.preprocess.config import BuildOptions
from flame.train.config import flatten, parse_train_config
from flame.train.refusals import NOT_AVAILABLE_YET

PROJECT = Path(__file__).resolve().parents[2]
PAGE = (PROJECT / "docs/moving.md").read_text("utf-8")
RECIPES = sorted((PROJECT / "configs/train").glob("*.toml"))


# ---- train.sh


def run_train_sh(folder: Path, *, num_gpus: int | None, **environment: str) -> tuple[str, int]:
    """Run train.sh with a flame-train that tells its NGPU and arguments, and an nvidia-smi with so many GPUs."""
    programs = folder / "bin"
    programs.mkdir()
    scripts = {"flame-train": 'echo "$NGPU $*"; exit 75'}
    if num_gpus is not None:
        scripts["nvidia-smi"] = f'for i in $(seq {num_gpus}); do echo "GPU $i: H200"; done'
    for name, script in scripts.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    for name in ("bash", "grep", "tr", "seq"):
        (programs / name).symlink_to(next(p for d in os.get_exec_path() if (p := Path(d) / name).exists()))
    ended = subprocess.run(
        [programs / "bash", PROJECT / "train.sh", "--job.description", "a b"],
        env={"PATH": str(programs), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr == ""
    return ended.stdout.strip(), ended.returncode


@pytest.mark.parametrize(
    ("num_gpus", "environment", "expected"),
    [
        (8, {}, 8),
        (0, {}, 1),
        (None, {}, 1),
        (8, {"NGPU": "2"}, 2),
        (8, {"CUDA_VISIBLE_DEVICES": "3,5,7"}, 3),
        (8, {"CUDA_VISIBLE_DEVICES": ""}, 1),
    ],
)
def test_train_sh_starts_a_rank_for_each_gpu(
    tmp_path: Path, num_gpus: int | None, environment: dict[str, str], expected: int
) -> None:
    told, code = run_train_sh(tmp_path, num_gpus=num_gpus, **environment)
    assert told == f"{expected} --job.description a b" and code == 75


# ---- the recipes


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_parses_and_so_does_the_call_that_it_shows(recipe: Path) -> None:
    lines = [line[1:].strip() for line in recipe.read_text("utf-8").splitlines() if line.startswith("#")]
    call = " ".join(lines).partition("flame-train ")[2].replace("\\", " ")
    words = [word.replace("configs/train/", f"{recipe.parent}/") for word in shlex.split(call)]
    config = parse_train_config(words)
    assert config.job.config_file == recipe
    assert config.model_config.startswith("my_") or (PROJECT / config.model_config).is_file()


def test_there_are_recipes() -> None:
    assert [path.stem for path in RECIPES] == ["pretrain", "trial", "wsd"]


# ---- the page


def test_the_page_lists_what_is_not_available_yet_and_nothing_else() -> None:
    section = PAGE.partition("## Not available yet")[2].partition("`delayed`")[0]
    assert sorted(re.findall(r"`(\w+\.\w+)`", section)) == sorted(NOT_AVAILABLE_YET)


@pytest.mark.parametrize(
    "old", re.findall(r"^\| `(--(?:training|optimizer|checkpoint)[^`]*)` \| `(--[^`]*)`", PAGE, re.M)
)
def test_an_old_spelling_is_what_the_page_says(old: tuple[str, str]) -> None:
    needed = ["--model.config=m", "--training.dataset=d"]
    values = []
    for words in old:
        filled = words.replace(" N", " 7").replace(" R", " 0.3").split()
        try:
            values.append(str(flatten(parse_train_config([*needed, *filled]))))
        except Exception as error:
            values.append(str(error))
    assert values[0] == values[1]


def test_the_commands_of_the_page_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)  # the recipe's path is relative
    block = re.findall(r"```bash\n(.*?)```", PAGE, re.S)[0].replace("\\\n", " ")
    build, train = (shlex.split(line) for line in block.strip().splitlines())
    assert build[:2] == ["flame-preprocess", "build"] and train[1] == "flame-train"
    parse_flat(BuildOptions, build[2:], program="flame-preprocess build")
    assert parse_train_config(train[2:]).training.context_len == 4096
