"""What a run exports is what it trained: the same logits, offline, without Flame."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flame.cli.export import main as export
from flame.shards.reader import Corpus
from flame.train import loop
from flame.train.__main__ import main
from flame.train.config import parse_train_config
from flame.train.setup import Run
from tests.runs import LLAMA, arguments, make_training_folder


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_the_exported_model_is_the_trained_one(
    tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    folder, run = make_training_folder(tmp_path / "data", tiny_tokenizer), tmp_path / "run"
    names = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    shape = LLAMA | {"model_type": model, "architectures": [names[model]], "head_dim": 16}
    (folder / "llama.json").write_text(json.dumps(shape))
    window = Corpus.open(folder / "web").split("val").read(0, 96).astype("int64")
    trained: list[torch.Tensor] = []
    finish = loop.finish

    def look(prepared: Run, *rest: object) -> None:
        prepared.module.unshard()  # type: ignore[operator]  # what its own forward would do first
        with torch.no_grad():
            trained.append(prepared.module.model(torch.from_numpy(window)[None]).logits.float())
        finish(prepared, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "finish", look)
    argv = arguments(folder, run, training__steps=8, checkpoint__export_hf="true", optimizer__lr=0.01)
    assert loop.train(parse_train_config(argv)) == 0
    checkpoint, output = run / "checkpoint" / "step-8", tmp_path / "hf"
    assert export(["hf", f"--checkpoint={checkpoint}", f"--output={output}", "--check"]) == 0
    for exported in (run / "hf", output):
        reloaded, told = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
        assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
        with torch.no_grad():
            logits = reloaded(torch.from_numpy(window)[None]).logits
        assert float((logits - trained[0]).abs().max()) <= 1e-4
        assert torch.equal(logits.argmax(-1), trained[0].argmax(-1))
        tokenizer = AutoTokenizer.from_pretrained(exported)
        assert reloaded.config.eos_token_id == reloaded.generation_config.eos_token_id == 0
        assert len(tokenizer) <= reloaded.config.vocab_size == reloaded.get_input_embeddings().weight.shape[0]


def test_a_resume_below_the_latest_moves_later_checkpoints_aside(tmp_path: Path, tiny_tokenizer: Path) -> None:
    folder, run = make_training_folder(tmp_path / "data", tiny_tokenizer), tmp_path / "run"
    assert main(arguments(folder, run, training__steps=6, checkpoint__interval=2, checkpoint__keep_latest_k=2)) == 0
    assert sorted(path.name for path in (run / "checkpoint").iterdir()) == ["step-4", "step-6"]
    assert main(arguments(folder, run, training__steps=6, checkpoint__load_step=4)) == 0
    kept = sorted(path.name.partition("-2")[0] for path in (run / "checkpoint").iterdir())
    assert kept == ["abandoned", "step-4", "step-6"]
