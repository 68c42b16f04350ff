"""The predecessor's DCP folders become Hugging Face folders, given the configuration and tokenizer that they lack."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from flame.cli.export import main
from flame.errors import CheckpointError
from flame.export.predecessor import export_predecessor
from tests.tiny_states import adamw, differences, tiny_llama, update
from tests.tokenizers import write_tiny_tokenizer
from tests.unit.test_export_dcp import read_json, read_tensors, with_constants

ROWS = 423


def save_as_the_predecessor(folder: Path, state: dict[str, Tensor], *, bare: bool = False) -> Path:
    """What its trainer saved: all states in one dictionary, a tied weight under both names; `bare`, weights alone."""
    model = tiny_llama()
    optimizer = adamw(model)
    update(model, optimizer, seed=0)
    states: dict[str, Any] = {
        "model": state,
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": {"last_epoch": 7},
        "train_state": {"step": torch.tensor(7)},
        "dataloader": {"dp_rank_0": b"position"},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state if bare else states, checkpoint_id=folder, no_dist=True)
    return folder


def write_config(path: Path, model: Any, **changes: Any) -> Path:
    path.write_text(json.dumps(model.config.to_dict() | {"architectures": None} | changes))
    return path


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_comes_over_and_nothing_else(tmp_path: Path, tied: bool, bare: bool) -> None:
    model = with_constants(tiny_llama(vocab_size=ROWS, tied=tied))
    state = dict(model.state_dict())
    assert ("lm_head.weight" in state) and ("model.embed_tokens.weight" in state)
    source = save_as_the_predecessor(tmp_path / "step-7", state, bare=bare)
    # The predecessor raised the configuration's vocabulary to the tokenizer's.
    config = write_config(tmp_path / "model.json", model, vocab_size=100, eos_token_id=2)
    tokenizer = write_tiny_tokenizer(tmp_path / "tok")
    output = export_predecessor(source, tmp_path / "hf", config=config, tokenizer=tokenizer, check=True)
    expected = {name: tensor for name, tensor in state.items() if not (tied and name == "lm_head.weight")}
    assert differences(expected, read_tensors(output)) == []
    written = read_json(output / "config.json")
    assert (written["vocab_size"], written["dtype"]) == (ROWS, "float32")
    assert written["architectures"] == ["LlamaForCausalLM"] and written["eos_token_id"] == 0, "the tokenizer's EOS"
    assert (output / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()


def test_another_configuration_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_llama(vocab_size=ROWS)
    source = save_as_the_predecessor(tmp_path / "step-7", dict(model.state_dict()))
    tokenizer = write_tiny_tokenizer(tmp_path / "tok")
    for changes, told in (
        ({"num_hidden_layers": 3}, r"missing model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"unexpected model\.layers\.1"),
        ({"intermediate_size": 32}, r"mlp\.\w+\.weight \(24, 16\) instead of \(32, 16\)"),
    ):
        config = write_config(tmp_path / "model.json", model, **changes)
        with pytest.raises(CheckpointError, match=told):
            export_predecessor(source, tmp_path / "hf", config=config, tokenizer=tokenizer)
    assert not list(tmp_path.glob("hf*"))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    model = tiny_llama(vocab_size=ROWS)
    dcp.save({"other": torch.ones(3)}, checkpoint_id=tmp_path / "step-7", no_dist=True)
    config, tokenizer = write_config(tmp_path / "model.json", model), write_tiny_tokenizer(tmp_path / "tok")
    with pytest.raises(CheckpointError, match=r"holds no model.*model\.<name>"):
        export_predecessor(tmp_path / "step-7", tmp_path / "hf", config=config, tokenizer=tokenizer)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_llama(vocab_size=ROWS)
    source = save_as_the_predecessor(tmp_path / "step-7", dict(model.state_dict()))
    config, tokenizer = write_config(tmp_path / "model.json", model), write_tiny_tokenizer(tmp_path / "tok")
    output = tmp_path / "hf"
    command = ["hf", f"--checkpoint={source}", f"--output={output}", "--dtype=bfloat16"]
    named = [f"--config={config}", f"--tokenizer={tokenizer}"]
    wrong_calls = {
        "Name both by --config and --tokenizer": [*command, named[0]],
        "no such file or folder": [*command, named[0], "--tokenizer=nowhere"],
        f"Did you mean {tokenizer}?": [*command, named[0], f"--tokenizer={tokenizer}s"],
        f"Did you mean {config}?": [*command, "--config=" + str(config).replace("model", "models"), named[1]],
        "no such checkpoint": ["hf", "--checkpoint=nowhere", f"--output={output}", *named],
    }
    for message, words in wrong_calls.items():
        assert main(words) == 2
        told = capsys.readouterr()
        assert message in told.err and told.out == "" and "Traceback" not in told.err
    assert main([*command, *named, "--check"]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert read_json(output / "config.json")["dtype"] == "bfloat16"
    (source / ".metadata").rename(tmp_path / "lost")
    assert main(["hf", f"--checkpoint={source}", f"--output={tmp_path / 'b'}", *named]) == 1
    assert "neither of ours nor of the predecessor" in capsys.readouterr().err
    # One of ours has both already.
    run = tmp_path / "run/checkpoint/step-0"
    assert main(["dcp", f"--model={output}", f"--output={run}"]) == 0
    capsys.readouterr()
    assert main(["hf", f"--checkpoint={run}", f"--output={tmp_path / 'b'}", named[0]]) == 2
    assert "Leave --config away" in capsys.readouterr().err
