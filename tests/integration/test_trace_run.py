"""The ids that a trainer saw at a step are those that `flame-mix trace --run` prints, over ranks and resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flame.cli.mix import main as flame_mix
from tests.runs import PROJECT, arguments, make_training_folder

# Runs flame-train with a loader that writes down what each rank's micro-batches hold, row by row.
DRIVER = """
import json, os, sys
from flame.train import loop
from flame.train.__main__ import main

class Watched(loop.StepLoader):
    def __next__(self):
        batch = super().__next__()
        self.number = getattr(self, "number", int(os.environ["FIRST_STEP"]) - 1) + 1
        with open(os.environ["SEEN"], "a") as file:
            for micro_step, micro in enumerate(batch.micro_batches):
                line = [self.number, int(os.environ["RANK"]), micro_step, micro.input_ids.flatten().tolist()]
                file.write(json.dumps(line) + "\\n")
        return batch

loop.StepLoader = Watched
sys.exit(main(sys.argv[1:]))
"""


def train_watched(folder: Path, run: Path, *, ranks: int, first_step: int, **options: Any) -> None:
    (folder / "driver.py").write_text(DRIVER)
    environment = os.environ | {
        "SEEN": str(folder / "seen.jsonl"),
        "FIRST_STEP": str(first_step),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(PROJECT),
    }
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run(
        [sys.executable, *launch, str(folder / "driver.py"), *arguments(folder, run, **options)],
        env=environment,
        check=True,
        capture_output=True,
        timeout=300,
    )


def traced(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert flame_mix(["trace", *map(str, words), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_traced_step_is_what_its_ranks_saw(
    tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run = make_training_folder(tmp_path, tiny_tokenizer), tmp_path / "run"
    shape = {"training__batch_size": 2, "training__seq_len": 256, "training__window_len": 128}
    train_watched(
        folder, run, ranks=2, first_step=1, **shape, training__gradient_accumulation_steps=2, training__steps=3
    )
    # Other ranks, another batch, and other data: steps 4 and 5 are of a second start, and of a second data segment.
    other = {"training__data_probs": "0.5,0.5", "checkpoint__allow_data_change": "true", "training__steps": 5}
    train_watched(folder, run, ranks=1, first_step=4, **(shape | {"training__batch_size": 3} | other))
    seen: dict[tuple[int, int, int], list[int]] = {}
    for line in (folder / "seen.jsonl").read_text().splitlines():
        step, rank, micro_step, ids = json.loads(line)
        seen[step, rank, micro_step] = ids

    monkeypatch.chdir(tmp_path / "web")  # the run says where its corpora lie, whoever asks from where
    assert {step for step, _, _ in seen} == {1, 2, 3, 4, 5}
    for step in range(1, 6):
        found: dict[tuple[int, int, int], list[int]] = {}
        for document in traced(capsys, "--run", run, "--step", step, "--ids"):
            assert document["step"] == step and document["num_tokens"] == len(document["ids"])
            place = (step, document["rank"], document["micro_step"])
            found.setdefault(place, []).extend(document["ids"])
        assert found == {place: ids for place, ids in seen.items() if place[0] == step}

    one = traced(capsys, "--run", run, "--step", 2, "--rank", 1)
    assert one and {document["rank"] for document in one} == {1} and "ids" not in one[0]
    assert one == [
        {k: v for k, v in d.items() if k != "ids"}
        for d in traced(capsys, "--run", run, "--step", 2, "--ids")
        if d["rank"] == 1
    ]
    for words, told in (
        (("--run", run, "--step", 4, "--rank", 1), "no such rank"),
        (("--run", run, "--step", 0), "numbered from 1"),
        (("--run", tmp_path / "web", "--step", 1), "no run"),
        (("--run", run), "takes a step"),
        (("--run", run, "--step", 1, "--window_len", 128), "knows the mixture"),
        (("--step", 1), "go with --run"),
    ):
        assert flame_mix(["trace", *map(str, words)]) == 2
        assert told in capsys.readouterr().err
