"""From documents to a run over packs: packed, trained, resumed to the last bit, and traced to what it saw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flame.cli.mix import main as flame_mix
from flame.cli.preprocess import main as flame_preprocess
from flame.shards.packed import open_packed
from flame.shards.reader import Corpus
from flame.train.__main__ import main as flame_train
from flame.train.run import read_status
from tests.builds import build_here, some_texts, write_jsonl
from tests.faults import ids_trained, note_samples
from tests.runs import LLAMA, arguments, losses_and_norms, read_metrics, refused

N = 64


def test_a_run_over_packs_is_resumed_and_traced(
    tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, corpus, run = some_texts(200, longest=40), tmp_path / "web", tmp_path / "run"
    build_here(write_jsonl(tmp_path / "texts.jsonl", texts), corpus, tiny_tokenizer)
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    options: dict[str, Any] = {
        "training__dataset": corpus,
        "training__packing": "best_fit",
        "training__window_len": N,
        "training__steps": 2,
        "checkpoint__interval": 1,
    }
    command = [word for word in arguments(tmp_path, run, **options) if "data_probs" not in word]
    refused(capsys, command, 1, "not packed for 64 tokens", f"flame-preprocess pack {corpus} --context_len 64")
    assert flame_preprocess(["pack", str(corpus), f"--context_len={N}"]) == 0
    without = [word for word in command if not any(name in word for name in ("varlen", "context_len", "window_len"))]
    refused(capsys, without, 2, "needs varlen")

    note_samples(monkeypatch, tmp_path / "first")
    assert flame_train(command) == 0
    whole, seen = losses_and_norms(run), ids_trained(tmp_path / "first")
    note_samples(monkeypatch, tmp_path / "second")
    assert flame_train([*command, "--checkpoint.load_step=1"]) == 0
    assert losses_and_norms(run) == whole and len(whole) == 2
    assert ids_trained(tmp_path / "second") == seen[1:]

    capsys.readouterr()
    assert flame_mix(["trace", "--run", str(run), "--step", ":", "--ids", "--json"]) == 0
    traced = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    split = open_packed(Corpus.open(corpus), "train", N)
    eos_id = split.corpus.manifest.tokenizer.eos_id
    rows: dict[int, list[int]] = {}
    for part in traced:
        document = split.document(part["document"])
        if part["num_tokens"] == len(document.ids):
            assert part["text"] == document.text and part["text"] in texts
        assert part["start"] == len(rows.setdefault(part["k"], []))
        rows[part["k"]].extend(part["ids"])
    padded = [[*row, *[eos_id] * (N - len(row))] for _, row in sorted(rows.items())]
    assert [token for row in padded for token in row] == [
        token for step in seen for micro_step in step for token in micro_step
    ]
    assert any(len(row) < N for row in rows.values()), "padding is seen, too"
    metrics = read_metrics(run)
    assert sum(line["tokens/web"] for line in metrics) == len(rows) * N  # what the model is run on, padding counted
    status = read_status(run)
    assert status is not None and status["data"]["sources"]["web"]["consumed_samples"] == len(rows)

    assert flame_train([*command, "--training.packing=windows", "--training.steps=3"]) == 1
    assert "packing" in capsys.readouterr().err
