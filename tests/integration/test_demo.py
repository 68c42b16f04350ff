"""The demo: its texts, its refusals, and the whole of it at a size of seconds."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
SOURCE = '''"""A module that stands for the library in these tests."""

import os


class Reader:
    """Reads a line at a time, and never more than that."""

    size = 1

    def read(self):
        """Return the next line of the file that was opened — or an empty one."""

    def close(self): "A docstring that shares its line with code, and therefore stays where it is."

    async def wait(self):
        """short"""
        return os.getpid()
'''


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The demo's main module."""
    monkeypatch.syspath_prepend(str(TOOLS))
    import demo

    return demo


@pytest.fixture
def texts(demo: ModuleType) -> ModuleType:
    """The demo's texts."""
    import demo_texts

    return demo_texts


def test_docstrings_are_cut_out_of_code_that_still_parses(texts: ModuleType) -> None:
    code, docstrings = texts.split_module(SOURCE, path="reader.py")
    assert [(doc.name, doc.line) for doc in docstrings] == [("module", 1), ("Reader", 7), ("Reader.read", 12)]
    assert docstrings[2].text == "Return the next line of the file that was opened — or an empty one."
    assert '"""' not in code and "stays where it is" in code
    reader = ast.parse(code).body[1]
    assert isinstance(reader, ast.ClassDef)
    assert [ast.unparse(part).splitlines()[0] for part in reader.body[:2]] == ["size = 1", "def read(self):"]
    assert "def read(self):\n        ...\n" in code


def test_modules_are_in_order_without_tests_and_packages(texts: ModuleType, tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "a.py", "test/c.py", "a/tests/d.py", "site-packages/e.py", "_sysconfigdata_x.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(SOURCE)
    assert [path.as_posix() for path in texts.module_paths(tmp_path)] == ["a.py", "a/z.py", "b.py"]


def test_a_module_that_does_not_parse_is_left_out(texts: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(SOURCE)
    (tmp_path / "bad.py").write_text("def (:\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    modules, docstrings = texts.read_library(tmp_path, [Path("bad.py"), Path("good.py"), Path("latin.py")])
    assert [module.path for module in modules] == ["good.py", "latin.py"]
    assert "é" in modules[1].text
    assert {doc.path for doc in docstrings} == {"good.py"}
    texts.write_code(tmp_path / "code.jsonl", modules)
    texts.write_docstrings(tmp_path / "docstrings.parquet", docstrings)
    assert [json.loads(line)["text"] for line in (tmp_path / "code.jsonl").open()] == [m.text for m in modules]
    assert pq.read_table(tmp_path / "docstrings.parquet")["text"].to_pylist() == [doc.text for doc in docstrings]


def test_only_a_folder_of_its_own_is_emptied(demo: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    demo.begin_folder(folder)
    (folder / "left over").write_text("")
    demo.begin_folder(folder)
    assert [path.name for path in folder.iterdir()] == [demo.MARKER]
    (folder / demo.MARKER).rename(folder / "something of mine")
    with pytest.raises(demo.DemoError, match="was not made by the demo"):
        demo.begin_folder(folder)
    assert (folder / "something of mine").exists()


def test_a_command_is_printed_as_one_would_type_it(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import demo_commands

    monkeypatch.chdir(tmp_path)
    words = demo_commands.announce(
        [tmp_path / "bin" / "tool", "run", "--name", "two words", *["--option", "x" * 30] * 3]
    )
    assert words[0] == str(tmp_path / "bin" / "tool")
    printed = capsys.readouterr().out
    assert printed.lstrip().startswith("$ bin/tool run --name 'two words' --option xxx")
    assert printed.count("\\\n") == 1, "long commands go on in the next line"


def test_a_failed_command_is_the_demos_failure(demo: ModuleType) -> None:
    with pytest.raises(demo.DemoError, match="exited 3"):
        demo.call([Path(sys.executable), "-c", "raise SystemExit(3)"])


def write_run(run: Path, *, starts: list[int], losses: dict[int, float], lost: dict[int, float]) -> None:
    """Write what a run of the demo leaves behind."""
    run.mkdir()
    (run / "segments.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in starts))
    for name, values in (("metrics.jsonl", losses), ("metrics.abandoned.jsonl", lost)):
        lines = ({"step": s, "loss_metrics/global_avg_loss": v, "validation/code/loss": v} for s, v in values.items())
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"starts": [0, 0]}, "began at steps"),
        ({"starts": [0]}, "began at steps"),
        ({"losses": {1: 5.0, 2: 4.0}}, "does not lead"),
        ({"lost": {}}, "nothing shows"),
        ({"lost": {3: 3.5}}, "differ by up to 0.5"),
    ],
)
def test_a_run_that_did_not_resume_is_told(
    demo: ModuleType, tmp_path: Path, changed: dict[str, object], reason: str | None
) -> None:
    import demo_training

    whole: dict[str, object] = {"starts": [0, 2], "losses": {1: 5.0, 2: 4.0, 3: 3.0, 4: 2.0}, "lost": {3: 3.0}}
    write_run(tmp_path / "run", **(whole | changed))  # type: ignore[arg-type]
    killed = demo_training.Killed(step=3, checkpoint=2)
    if reason is None:
        said = demo_training.check_resumed(tmp_path / "run", killed, steps=4)
        assert "equal to the last bit" in said
    else:
        with pytest.raises(demo.DemoError, match=reason):
            demo_training.check_resumed(tmp_path / "run", killed, steps=4)


def test_validation_that_does_not_fall_is_told(demo: ModuleType, tmp_path: Path) -> None:
    write_run(tmp_path / "falls", starts=[0], losses={1: 5.0, 2: 6.0, 3: 4.0}, lost={})
    assert demo.check_validation(tmp_path / "falls") == {"code": (5.0, 4.0)}
    write_run(tmp_path / "rises", starts=[0], losses={1: 4.0, 2: 3.0, 3: 4.0}, lost={})
    with pytest.raises(demo.DemoError, match="did not fall"):
        demo.check_validation(tmp_path / "rises")


@pytest.mark.slow
def test_the_whole_demo_at_a_size_of_seconds(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(TOOLS / "demo.py"), "--tiny", "--folder", str(tmp_path / "demo")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert "SIGKILL to process group" in result.stdout and "equal to the last bit" in result.stdout
    folder = tmp_path / "demo"
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "summary.txt").read_text().strip() in result.stdout
    assert (folder / "hf" / "config.json").exists()
    assert list((folder / "run" / "checkpoint").glob("step-40/complete.json"))
