"""`tools/tune_kernels.py` without a GPU: what it writes, and what its second start is given to find."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.runs import PROJECT

SETTING = "Device_triton1.0_fla1.0"
OUTCOME = {"kernel": "walk", "key": "(64,)", "config": "BLOCK: 32"}


@pytest.fixture
def tune_kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(PROJECT / "tools")
    import tune_kernels

    return tune_kernels


class Starts:
    """Stands for `flame-train`: a start sweeps, and keeps an outcome, where it finds none by its name."""

    def __init__(self, *, name_again: str) -> None:
        self.names = ["walk-1", name_again]

    def __call__(self, words: list[str], variables: dict[str, str]) -> str:
        assert variables["FLAME_TUNED_SHIPPED"] == "off", "what flame ships would stand for what was written elsewhere"
        kept = Path(variables["FLAME_TUNED_DIR"], SETTING, f"{self.names.pop(0)}.json")
        if kept.exists():
            assert json.loads(kept.read_bytes()) == OUTCOME
            return "first step done 2.5 s after the start"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(OUTCOME))
        return "tuning walk, the 1st\nfirst step done 9.5 s after the start"


def tune(tune_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, output: Path, **starts: Any) -> None:
    monkeypatch.setattr(tune_kernels, "train", Starts(**starts))
    monkeypatch.setattr("sys.argv", ["tune_kernels.py", "--config=a/tiny.json", "--seq_len=64", f"--output={output}"])
    tune_kernels.main()


def test_a_file_elsewhere_is_added_to_and_the_second_start_takes_it(
    tune_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"{SETTING}.json"
    file.write_text(json.dumps({"outcomes": {"old-1": OUTCOME}}))
    tune(tune_kernels, monkeypatch, tmp_path, name_again="walk-1")
    assert json.loads(file.read_bytes()) == {"outcomes": {"old-1": OUTCOME, "walk-1": OUTCOME}}
    told = capsys.readouterr().out
    assert told == f"tiny: 1 kernels and shapes into {file}; first step after 9.5 s tuning, 2.5 s tuned\n"


def test_a_second_start_that_sweeps_is_an_error_wherever_the_file_lies(
    tune_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"swept again, which none should be: walk"):
        tune(tune_kernels, monkeypatch, tmp_path, name_again="walk-2")
