"""A Hugging Face model is converted, trained on from its step 0, and exported: it is the same model at every door."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from flame.cli.export import main as export
from flame.sampling.sampler import Sampler
from flame.sampling.sources import mixture_of_corpora, open_mixture
from flame.train.__main__ import main as train
from flame.train.checkpoint_tensors import StoredModel
from tests.corpora import make_corpus
from tests.runs import LLAMA, VOCABULARY, arguments, random_documents, read_metrics

ROWS = 437  # no multiple of 128: the trainer must keep the model's own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A corpus, a bfloat16 Llama with the corpus's tokenizer, and a run folder that begins from it."""
    folder = tmp_path_factory.mktemp("round_trip")
    make_corpus(folder / "web", random_documents(200, seed=1), vocab_size=VOCABULARY, tokenizer=tiny_tokenizer)
    torch.manual_seed(3)
    shape = {name: value for name, value in LLAMA.items() if name not in ("model_type", "architectures", "vocab_size")}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=ROWS, eos_token_id=0, bos_token_id=None))
    model.to(torch.bfloat16).save_pretrained(folder / "hf")
    for path in tiny_tokenizer.iterdir():
        shutil.copy(path, folder / "hf")
    assert export(["dcp", f"--model={folder / 'hf'}", f"--output={folder / 'run/checkpoint/step-0'}"]) == 0
    return folder


def begin(folder: Path, run: Path) -> Path:
    shutil.copytree(folder / "run", run)
    return run


def options(folder: Path, run: Path, **changes: Any) -> list[str]:
    chosen: dict[str, Any] = {
        "model__config": folder / "hf",
        "training__dataset": folder / "web",
        "training__data_probs": 1,
        "training__varlen": "false",
        "training__seq_len": 128,
        "training__window_len": 128,
        "training__context_len": 128,
        "training__batch_size": 1,
        "training__steps": 3,
        "lr_scheduler__warmup_steps": 1,
        **changes,
    }
    return arguments(folder, run, **chosen)


def own_loss(folder: Path) -> float:
    """The Hugging Face model's loss, in float32, on what the run's first step reads: a window and the token after."""
    mixture = mixture_of_corpora([folder / "web"], [1.0], 42)
    splits = open_mixture(mixture)
    offset = int(Sampler(mixture, splits, 128).locate(np.arange(1)).offset[0])
    tokens = torch.from_numpy(splits[0].read(offset, offset + 129).astype("int64"))
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    with torch.no_grad():
        return float(F.cross_entropy(model(tokens[None, :-1]).logits[0], tokens[1:]))


def test_training_goes_on_from_the_very_weights(folder: Path, tmp_path: Path) -> None:
    run = begin(folder, tmp_path / "run")
    assert train(options(folder, run, checkpoint__export_hf="true", optimizer__lr=0)) == 0
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3], "training.steps counts from 0"
    assert abs(lines[0]["loss_metrics/global_avg_loss"] - own_loss(folder)) < 1e-5
    source = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32).state_dict()
    last = StoredModel(run / "checkpoint/step-3")
    assert last.tensors.keys() == source.keys()
    for name, tensor in source.items():
        assert torch.equal(last.read(name), tensor), f"{name}: a learning rate of 0 leaves the weights as they began"
    exported, told = AutoModelForCausalLM.from_pretrained(run / "hf", output_loading_info=True)
    assert not any(told.values()) and exported.get_input_embeddings().weight.shape[0] == ROWS
    before, after = (json.loads((run / f"checkpoint/step-{step}/hf/config.json").read_text()) for step in (0, 3))
    assert before | {"dtype": "float32"} == after | {"use_cache": before["use_cache"]}, "only the number format changed"


def test_a_run_learns_and_goes_on_as_any_other(folder: Path, tmp_path: Path) -> None:
    run = begin(folder, tmp_path / "run")
    assert train(options(folder, run)) == 0
    assert train(options(folder, run, training__steps=5)) == 0
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 3, 4, 5]
    segments = [json.loads(line) for line in (run / "segments.jsonl").read_text().splitlines()]
    assert [line["step"] for line in segments] == [0, 3]
    assert (run / "checkpoint/step-0").is_dir(), "a converted model is never put away"


@pytest.mark.parametrize(
    ("change", "told"),
    [({"num_hidden_layers": 3}, "num_hidden_layers 3"), ({"intermediate_size": 48}, "intermediate_size 48")],
)
def test_another_architecture_is_refused_by_name(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], told: str
) -> None:
    run = begin(folder, tmp_path / "run")
    other = tmp_path / "other.json"
    other.write_text(json.dumps(LLAMA | {"vocab_size": ROWS} | change))
    assert train(options(folder, run, model__config=other)) == 1
    assert told in capsys.readouterr().err
    assert not (run / "metrics.jsonl").exists()
