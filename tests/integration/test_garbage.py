"""Python's garbage is collected between steps, when the run says so, and never in the middle of one."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from flame.train import loop
from flame.train.__main__ import main
from tests.runs import arguments


def test_garbage_is_collected_every_few_steps_and_not_in_between(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    collect, train_step = gc.collect, loop.train_step

    def collected(generation: int = 2) -> int:
        happened.append(f"collect {generation}")
        return collect(generation)

    def stepped(*arguments: Any) -> Any:
        happened.append("step, by itself" if gc.isenabled() else "step")
        return train_step(*arguments)

    monkeypatch.setattr(loop.gc, "collect", collected)
    monkeypatch.setattr(loop, "train_step", stepped)
    assert main(arguments(folder, tmp_path / "run", training__steps=5, training__gc_freq=2)) == 0
    first = happened.index("step")
    assert happened[:first][-1] == "collect 2", "what was made before the first step is looked at once"
    assert happened[first:] == ["step", "step", "collect 2", "step", "step", "collect 2", "step"]
    assert gc.isenabled()
