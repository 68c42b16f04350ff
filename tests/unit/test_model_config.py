"""Reading a model's configuration: where it may be, what it must say, and how it is fitted to a tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, PretrainedConfig

from flame.errors import CorpusError, TrainingError, UsageError
from flame.train.families import family_of
from flame.train.model_config import check_token_ids, construct_model, embedding_rows, load_model_config

PROJECT = Path(__file__).resolve().parents[2]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 300,
    "pad_token_id": 2,
}


def write(path: Path, values: Any = None) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(LLAMA if values is None else values))
    return str(path)


def test_a_file_and_a_folder_say_the_same(tmp_path: Path) -> None:
    file = load_model_config(write(tmp_path / "a.json"), vocab_size=10, eos_id=7, bos_id=3)
    write(tmp_path / "folder" / "config.json")
    folder = load_model_config(str(tmp_path / "folder"), vocab_size=10, eos_id=7, bos_id=3)
    assert isinstance(file, LlamaConfig) and file.to_json_string() == folder.to_json_string()
    assert (file.bos_token_id, file.eos_token_id, file.hidden_size) == (3, 7, 32)


def test_there_is_no_padding_token(tmp_path: Path) -> None:
    """torch would hold the embedding of a padding token at zero: that of EOS, where the two are one."""
    config = load_model_config(write(tmp_path / "a.json"), vocab_size=10, eos_id=2)
    assert config.pad_token_id is None


@pytest.mark.parametrize(
    ("vocab_size", "configured", "rows"), [(10, 300, 384), (384, 300, 384), (385, 300, 512), (1, 1, 128)]
)
def test_rows_are_the_larger_size_rounded_up(
    tmp_path: Path, vocab_size: int, configured: int, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    source = write(tmp_path / "a.json", {**LLAMA, "vocab_size": configured})
    with caplog.at_level("INFO", logger="flame"):
        assert load_model_config(source, vocab_size=vocab_size, eos_id=0).vocab_size == rows
    assert embedding_rows(vocab_size, configured) == rows
    assert f"embedding rows: {rows} (the tokenizer has {vocab_size} tokens" in caplog.text


def test_weights_that_will_be_loaded_keep_their_rows(tmp_path: Path) -> None:
    assert load_model_config(write(tmp_path / "a.json"), vocab_size=10, eos_id=0, keep_rows=True).vocab_size == 300


def test_an_id_beyond_the_rows_is_refused() -> None:
    check_token_ids(127, 128, "corpora/web")
    with pytest.raises(CorpusError, match=r"in corpora/web; got id 128; expected ids below 128"):
        check_token_ids(128, 128, "corpora/web")


@pytest.mark.parametrize("source", ["absent.json", "absent", "a/b/c", "/absent/model"])
def test_a_path_that_is_not_there(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="names a file that does not exist"):
        load_model_config(source, vocab_size=10, eos_id=0)


def test_a_path_that_is_nearly_there() -> None:
    with pytest.raises(UsageError, match=r"Did you mean .*configs/transformer_374M.json"):
        load_model_config(str(PROJECT / "configs" / "transformer_374.json"), vocab_size=10, eos_id=0)


@pytest.mark.parametrize("source", ["./llama_374", "../work/llama_374", "configs/llama_374", "~/llama_374", "configs/"])
def test_the_hub_is_not_asked_for_what_can_only_be_a_path(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network it would be tried for 23 s."""
    monkeypatch.setattr(PretrainedConfig, "get_config_dict", None)
    monkeypatch.setenv("HOME", str(tmp_path / "work"))
    for folder in ("work", "work/configs"):
        write(tmp_path / folder / "llama_374M.json")
    monkeypatch.chdir(tmp_path / "work")
    meant = "" if source == "configs/" else r"Did you mean .*llama_374M\.json\?"
    with pytest.raises(UsageError, match=rf"names a file that does not exist \(got {source.rstrip('/')}.*{meant}"):
        load_model_config(source, vocab_size=10, eos_id=0)


@pytest.mark.parametrize("source", ["Qwen/Qwen3-0.6B", "models/Qwen3-0.6"])
def test_the_hub_is_asked_for_a_name(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a folder of the organisation's name holds other models."""
    asked = []

    def get_config_dict(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        asked.append(name)
        raise OSError("no such model")

    monkeypatch.setattr(PretrainedConfig, "get_config_dict", get_config_dict)
    write(tmp_path / "models" / "Qwen3-0.6B" / "config.json")
    monkeypatch.chdir(tmp_path)
    meant = r"\. Did you mean models/Qwen3-0\.6B\?" if source.startswith("models") else r"\."
    with pytest.raises(UsageError, match=rf"The hub said: no such model{meant}$"):
        load_model_config(source, vocab_size=10, eos_id=0)
    assert asked == [source]


def test_a_hub_name_without_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"neither a local path nor a model.*got nobody/nothing"):
        load_model_config("nobody/nothing", vocab_size=10, eos_id=0)


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json"):
        load_model_config(str(tmp_path), vocab_size=10, eos_id=0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "not a JSON object"),
        ("{}", 'expected "model_type"'),
        ('{"model_type": "lama"}', "got model_type lama; expected llama, perhaps"),
        ('{"model_type": "llama", "num_hidden_layers": 0}', "is refused .*num_hidden_layers 0"),
        ('{"model_type": "llama", "hidden_size": -3, "head_dim": 0}', "hidden_size -3, head_dim 0"),
        ('{"model_type": "gpt2", "n_layer": 0}', "n_layer 0"),
        ('{"model_type": "llama", "hidden_size": "x"}', "is refused .*hidden_size"),
        ('{"model_type": "llama", "hidden_size": 10, "num_attention_heads": 3}', "is refused .*attention heads"),
        ('{"model_type": "llama", "dtype": "float17"}', "is refused .*float17"),
        ('{"model_type": "llama", "rope_scaling": {"rope_type": "yarn"}}', "is refused .*factor"),
        (
            '{"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 3}',
            "heads 4, num_key_value_heads 3",
        ),
        ('{"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 0}', "num_key_value_heads 0"),
    ],
)
def test_what_a_configuration_must_say(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(TrainingError, match=reason):
        load_model_config(str(tmp_path / "a.json"), vocab_size=10, eos_id=0)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("hidden_act", "nope", "got hidden_act 'nope'; KeyError: 'nope'"),
        ("rope_scaling", {"rope_type": "spiral"}, r"rope_parameters\.rope_type 'spiral'"),
        ("rope_theta", "x", "TypeError: unsupported operand"),
    ],
)
def test_what_a_model_cannot_be_built_from_is_named(tmp_path: Path, name: str, value: Any, told: str) -> None:
    values = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    source = write(tmp_path / "a.json", {**values, "intermediate_size": 8, name: value})
    config = load_model_config(source, vocab_size=10, eos_id=0)
    with pytest.raises(TrainingError, match=rf"no model of the type llama can be built .*in {source};.*{told}"):
        construct_model(config, "sdpa")


def test_code_of_its_own_is_not_run_unasked(tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}})
    (tmp_path / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import PretrainedConfig\n"
        f"Path({str(tmp_path / 'ran')!r}).touch()\n"
        "class OwnConfig(PretrainedConfig):\n    model_type = 'own'\n    vocab_size = 5\n"
    )
    with pytest.raises(TrainingError, match=r"--model\.trust_remote_code"):
        load_model_config(str(tmp_path), vocab_size=10, eos_id=0)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("norm_type", "fused"), [("rmsnorm", False), ("fused_rmsnorm", True)])
def test_norm_types_of_fla(tmp_path: Path, norm_type: str, fused: bool) -> None:
    pytest.importorskip("fla")
    source = write(tmp_path / "a.json", {"model_type": "transformer", "hidden_size": 32, "fuse_norm": not fused})
    assert load_model_config(source, vocab_size=10, eos_id=0, norm_type=norm_type).fuse_norm is fused


@pytest.mark.parametrize(("model_type", "expected"), [("llama", "no model.norm_type"), ("gla", "rmsnorm or fused")])
def test_other_norm_types_are_refused(tmp_path: Path, model_type: str, expected: str) -> None:
    pytest.importorskip("fla")
    source = write(tmp_path / "a.json", {"model_type": model_type})
    with pytest.raises(TrainingError, match=f"cannot be layernorm for a model of the type {model_type}.*{expected}"):
        load_model_config(source, vocab_size=10, eos_id=0, norm_type="layernorm")


CUSTOM = """
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

class {name}Config(LlamaConfig):
    model_type = "{model_type}"
    def __init__(self, **values):
        super().__init__(**values)

class {name}ForCausalLM(LlamaForCausalLM):
    config_class = {name}Config

AutoConfig.register("{model_type}", {name}Config)
AutoModelForCausalLM.register({name}Config, {name}ForCausalLM)
"""
LOAD = """
import sys
from flame.train.families import family_of
from flame.train.model_config import load_model_config
path = sys.argv[2] if len(sys.argv) > 2 else None
config = load_model_config(sys.argv[1], vocab_size=10, eos_id=0, custom_model_path=path)
print(type(config).__name__, config.hidden_size)
"""


@pytest.mark.parametrize("path", [None, "elsewhere/mine"])
def test_models_of_ones_own_are_found(tmp_path: Path, path: str | None) -> None:
    package = tmp_path / ("custom_models" if path is None else "elsewhere") / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(CUSTOM.format(name="Mine", model_type="mine"))
    source = write(tmp_path / "a.json", {**LLAMA, "model_type": "mine"})
    command = [sys.executable, "-c", LOAD, source, *([] if path is None else [path])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "MineConfig 32\n"


def test_the_example_of_a_custom_model_takes_packed_documents(tmp_path: Path) -> None:
    pytest.importorskip("fla")
    config = load_model_config(write(tmp_path / "a.json", {"model_type": "sba"}), vocab_size=10, eos_id=0)
    assert type(config).__name__ == "SBAConfig"
    assert family_of(config).packed_refusal is None


def test_a_module_that_cannot_be_imported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names nothing that Python can import"):
        load_model_config(write(tmp_path / "a.json"), vocab_size=10, eos_id=0, custom_model_path="no.such.module")
