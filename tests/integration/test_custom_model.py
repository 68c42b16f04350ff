"""A model of one's own, trained on packed documents: its export runs where nothing of this project is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flame.shards.reader import Corpus
from flame.train import loop
from flame.train.config import parse_train_config
from flame.train.setup import Run
from tests.runs import VOCABULARY, arguments, make_training_folder, read_metrics

SBA = {
    "model_type": "sba",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": VOCABULARY,
}
# Nothing of this project can be imported there, nor triton, which is absent where there is no GPU.
ELSEWHERE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("flame", "custom_models", "fla", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, window, output = sys.argv[1:]
model, told = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
assert not any(told.values()), told
assert type(model).__module__.startswith("transformers_modules."), type(model)
AutoTokenizer.from_pretrained(folder)
assert not {"flame", "custom_models", "fla", "triton"} & {name.split(".")[0] for name in sys.modules}
ids = torch.load(window)
offsets = torch.tensor([0, 30, 31, ids.shape[1]], dtype=torch.int32)
with torch.no_grad():
    whole = model(ids).logits
    packed = model(ids, cu_seqlens=offsets, max_seqlen=ids.shape[1] - 31).logits
    alone = torch.cat([model(ids[:, start:stop]).logits for start, stop in zip(offsets, offsets[1:])], dim=1)
generated = model.generate(ids[:, :4], max_new_tokens=3, do_sample=False)
torch.save({"whole": whole, "packed": packed, "alone": alone, "generated": generated}, output)
"""


def test_its_export_runs_where_this_project_is_not(
    tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, run = make_training_folder(tmp_path / "data", tiny_tokenizer), tmp_path / "run"
    (folder / "sba.json").write_text(json.dumps(SBA))
    window = torch.from_numpy(Corpus.open(folder / "web").split("val").read(0, 96).astype("int64"))[None]
    trained: list[torch.Tensor] = []
    finish = loop.finish

    def look(prepared: Run, *rest: object) -> None:
        prepared.module.unshard()  # type: ignore[operator]  # what its own forward would do first
        with torch.no_grad():
            trained.append(prepared.module.model(window).logits.float())
        finish(prepared, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "finish", look)
    options = {"model__config": folder / "sba.json", "training__steps": 30, "optimizer__lr": 0.01}
    assert loop.train(parse_train_config(arguments(folder, run, **options))) == 0
    metrics = read_metrics(run)
    losses = [line["loss_metrics/global_avg_loss"] for line in metrics]
    assert losses[-1] < losses[0] - 1

    exported = tmp_path / "hf"
    command = [sys.executable, "-m", "flame.cli.export", "hf", "--checkpoint", str(run / "checkpoint" / "step-30")]
    subprocess.run([*command, "--output", str(exported), "--check"], cwd=tmp_path, check=True)
    code = {"config_sba.py", "modeling_sba.py", "stick_breaking.py", "stick_breaking_triton.py"}
    assert {path.name for path in exported.glob("*.py")} == code
    assert json.loads((exported / "config.json").read_bytes())["auto_map"] == {
        "AutoConfig": "config_sba.SBAConfig",
        "AutoModelForCausalLM": "modeling_sba.SBAForCausalLM",
    }

    torch.save(window, tmp_path / "window.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-P", "-c", ELSEWHERE, str(exported), str(tmp_path / "window.pt"), str(tmp_path / "o.pt")]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "o.pt")
    torch.testing.assert_close(found["whole"], trained[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["packed"], found["alone"], rtol=1e-5, atol=1e-5)
    assert (found["packed"] - found["whole"])[0, 31:].abs().max() > 1e-3, "documents would see those before them"
    assert found["generated"].shape == (1, 7)
