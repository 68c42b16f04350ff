"""A Hugging Face folder becomes a step-0 checkpoint and a folder again: every bit, name and format comes back."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from flame.cli.export import main
from flame.errors import CheckpointError, FlameError, TokenizerError, TrainingError, UsageError
from flame.export.dcp import convert_folder
from flame.export.hf import export_checkpoint
from flame.train.checkpoint_files import open_checkpoint
from flame.train.checkpoint_tensors import StoredModel, named_tensors
from flame.train.families import family_of
from tests.tiny_states import differences, file_size_limit, tiny_llama
from tests.tokenizers import write_tiny_tokenizer

ROWS = 437  # embedding rows that are no multiple of 128, and more than the tokenizer has tokens


def with_constants(model: Any) -> Any:
    """Fill each tensor with a constant of its own, exact in every number format."""
    with torch.no_grad():
        for number, tensor in enumerate(named_tensors(model).values()):
            tensor.fill_(1.0 + number / 64)
    return model


def write_folder(
    folder: Path, model: Any, dtype: str = "float32", *, shard_size: str = "5GB", **tokenizer: Any
) -> Path:
    """Save a model and a tokenizer whose EOS is id 0, as a user does."""
    model.config.eos_token_id = model.generation_config.eos_token_id = 0
    model.config.bos_token_id = model.generation_config.bos_token_id = None
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)
    return write_tiny_tokenizer(folder, **tokenizer)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor in the safetensors of a folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def read_bits(folder: Path) -> dict[str, Tensor]:
    """The same, with bfloat16 as the integers that have its bits."""
    tensors = read_tensors(folder)
    return {name: t.view(torch.int16) if t.dtype == torch.bfloat16 else t for name, t in tensors.items()}


def read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_bytes())
    return value


def convert(folder: Path, run: Path) -> Path:
    return convert_folder(folder, run / "checkpoint" / "step-0")


def llama(**changes: Any) -> Any:
    return tiny_llama(vocab_size=ROWS, **changes)


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=ROWS, n_embd=16, n_layer=2, n_head=2, n_positions=32, attn_pdrop=0.0))


def fla_transformer() -> Any:
    pytest.importorskip("fla")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": ROWS}
    config = AutoConfig.for_model("transformer", tie_word_embeddings=False, **sizes)
    return family_of(config).construct(config, "sdpa")


MODELS: dict[str, Callable[[], Any]] = {
    "untied": llama,
    "tied": lambda: llama(tied=True),
    "gpt2": gpt2,
    "fla transformer": fla_transformer,
}


# ---- round trips


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODELS)
def test_every_key_value_and_dtype_comes_back(tmp_path: Path, kind: str, dtype: str) -> None:
    source = write_folder(tmp_path / "hf", with_constants(MODELS[kind]()), dtype, shard_size="20KB")
    checkpoint = convert(source, tmp_path / "run")
    output = export_checkpoint(checkpoint, tmp_path / "back", max_shard_size="30KB", check=True)
    assert differences(read_bits(source), read_bits(output)) == []
    constants = {float(tensor.float().min()) for tensor in read_tensors(output).values()}
    assert len(constants) == len(read_tensors(output)) > 10, "each tensor has its own"
    assert all(tensor.dtype == getattr(torch, dtype) for tensor in read_tensors(output).values())
    before, after = read_json(source / "config.json"), read_json(output / "config.json")
    assert before == after | {name: before.get(name) for name in ("transformers_version",)}
    assert after["dtype"] == dtype and after["vocab_size"] == ROWS
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (source / name).read_bytes() == (output / name).read_bytes()
    before, after = (read_json(folder / "generation_config.json") for folder in (source, output))
    assert {name: value for name, value in before.items() if not name.startswith("_")} == {
        name: value for name, value in after.items() if value is not None
    }


@pytest.mark.parametrize("exported", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_and_configuration_agree_for_any_dtypes(tmp_path: Path, dtype: str, exported: str) -> None:
    source = write_folder(tmp_path / "hf", llama(), dtype)
    config = read_json(source / "config.json")
    wrong = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    config.pop("dtype")
    (source / "config.json").write_text(json.dumps({**config, "torch_dtype": wrong}))  # the weights are right
    output = export_checkpoint(convert(source, tmp_path / "run"), tmp_path / "back", dtype=exported, check=True)
    kept, before = read_tensors(output), read_tensors(source)
    assert kept.keys() == before.keys()
    for name, tensor in kept.items():
        assert torch.equal(tensor, before[name].to(getattr(torch, exported))), name
        assert tensor.dtype == getattr(torch, exported)
    after = read_json(output / "config.json")
    assert after["dtype"] == exported and "torch_dtype" not in after


def test_each_tensor_keeps_a_number_format_of_its_own(tmp_path: Path) -> None:
    model = llama()
    source = write_folder(tmp_path / "hf", model, "bfloat16")
    tensors = read_tensors(source)
    tensors["model.norm.weight"] = torch.rand(16)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    output = export_checkpoint(convert(source, tmp_path / "run"), tmp_path / "back", check=True)
    assert differences(read_bits(source), read_bits(output)) == []
    assert read_json(output / "config.json")["dtype"] == "bfloat16", "as most numbers are"


def test_the_checkpoint_is_whole_holds_weights_only_and_nothing_else_is_left(tmp_path: Path) -> None:
    checkpoint = convert(write_folder(tmp_path / "hf", llama(tied=True)), tmp_path / "run")
    assert checkpoint == tmp_path / "run/checkpoint/step-0"
    complete = open_checkpoint(checkpoint, fast_open=False).complete
    assert (complete.step, complete.consumed_samples, complete.has_optimizer) == (0, 0, False)
    assert complete.identity is None, "it fits any data"
    stored = StoredModel(checkpoint)
    assert "lm_head.weight" not in stored.tensors and "model.embed_tokens.weight" in stored.tensors
    assert [path.name for path in checkpoint.parent.iterdir()] == ["step-0"]
    files = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (checkpoint / "hf").iterdir()} == files


def test_a_small_shard_size_an_added_eos_and_a_generation_config(tmp_path: Path) -> None:
    """The exported folder is loaded in a fresh process that has no network, and says what it found."""
    source = write_folder(tmp_path / "hf", llama(), eos=None)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|stop|>"])
    tokenizer.save(str(source / "tokenizer.json"))
    settings = read_json(source / "tokenizer_config.json") | {"eos_token": "<|stop|>"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    stop = tokenizer.token_to_id("<|stop|>")
    assert 0 < stop < ROWS
    generation = {"eos_token_id": [5, stop], "temperature": 0.7, "do_sample": True, "max_new_tokens": 9}
    (source / "generation_config.json").write_text(json.dumps(generation))
    output = export_checkpoint(convert(source, tmp_path / "run"), tmp_path / "back", max_shard_size="4KB", check=True)
    assert len(list(output.glob("*.safetensors"))) > 5
    program = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model, told = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
tokenizer, generation = AutoTokenizer.from_pretrained(sys.argv[1]), model.generation_config
print(json.dumps({
    "problems": {name: sorted(map(str, keys)) for name, keys in told.items() if keys},
    "config": model.config.eos_token_id, "generation": generation.eos_token_id, "tokenizer": tokenizer.eos_token_id,
    "temperature": generation.temperature, "max_new_tokens": generation.max_new_tokens,
    "text": tokenizer.decode(tokenizer("naïve façade", add_special_tokens=False)["input_ids"]),
}))
"""
    command = [sys.executable, "-c", program, str(output)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found == {
        "problems": {},
        "config": [5, stop],
        "generation": [5, stop],
        "tokenizer": stop,
        "temperature": 0.7,
        "max_new_tokens": 9,
        "text": "naïve façade",
    }


def test_weights_are_not_copied_into_memory(tmp_path: Path) -> None:
    """The peak of the process's own memory stays far below the size of the weights."""
    wide = llama(hidden_size=512, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8)
    source = write_folder(tmp_path / "hf", wide, shard_size="50MB")
    size = sum(tensor.nbytes for tensor in wide.parameters())
    assert size > 100e6
    program = """
import sys, threading
from pathlib import Path
from flame.export import dcp
from flame.train.checkpoint_writer import HashingWriter

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

peak, write = 0, dcp.save_checkpoint
before = anonymous()

def watched(*args, **options):
    def watch():
        global peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())
    done = threading.Event()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        return write(*args, **options)
    finally:
        done.set()
        thread.join()

dcp.save_checkpoint = watched
dcp.convert_folder(Path(sys.argv[1]), Path(sys.argv[2]))
print(peak - before)
"""
    command = [sys.executable, "-c", program, str(source), str(tmp_path / "run/checkpoint/step-0")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert 0 < grown < size / 2


# ---- what weights may be called


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    save_file(change(read_tensors(folder)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_base_models_names_and_computed_buffers_are_understood(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", gpt2())
    before = read_tensors(source)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in before.items()}
    rewrite(source, lambda _: bare | {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "h.0.attn.masked_bias": torch.ones(1)})
    output = export_checkpoint(convert(source, tmp_path / "run"), tmp_path / "back", check=True)
    assert differences(before, read_tensors(output)) == []


@pytest.mark.parametrize("names", [["lm_head.weight"], ["lm_head.weight", "model.embed_tokens.weight"]])
def test_tied_weights_may_have_either_name_or_both(tmp_path: Path, names: list[str]) -> None:
    source = write_folder(tmp_path / "hf", llama(tied=True))
    before = read_tensors(source)
    weight = before["model.embed_tokens.weight"]
    rest = {name: tensor for name, tensor in before.items() if name != "model.embed_tokens.weight"}
    rewrite(source, lambda _: rest | {name: weight.clone() for name in names})
    output = export_checkpoint(convert(source, tmp_path / "run"), tmp_path / "back", check=True)
    assert differences(before, read_tensors(output)) == []


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", llama(tied=True))
    rewrite(source, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    with pytest.raises(CheckpointError, match=r"ties two tensors.*lm_head\.weight.*tie_word_embeddings"):
        convert(source, tmp_path / "run")


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {other: tensor for other, tensor in tensors.items() if other != name}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: without(t, "model.norm.weight"), r"missing model\.norm\.weight"),
        (lambda t: t | {"model.extra.weight": torch.ones(2)}, r"unexpected model\.extra\.weight"),
        (lambda t: {f"x.{name}": tensor for name, tensor in t.items()}, r"missing lm_head.* more; unexpected x\."),
        (lambda t: t | {"model.norm.weight": torch.ones(17)}, r"norm\.weight \(17,\) instead of \(16,\)"),
        (lambda t: t | {"model.norm.weight": torch.ones(16, dtype=torch.int8)}, r"format.*norm\.weight int8"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], told: str
) -> None:
    source = rewrite(write_folder(tmp_path / "hf", llama()), change)
    with pytest.raises(CheckpointError, match=told):
        convert(source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---- refusals


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def lost_shard(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def wrong_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')


def index_of_numbers(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3}}')


def generation_list(folder: Path) -> None:
    (folder / "generation_config.json").write_text("[]")


def odd_width(folder: Path) -> None:
    config = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "x"}))


def outside_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model.safetensors"}}')


def own_code(folder: Path) -> None:
    config = read_json(folder / "config.json")
    config |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))


def experts(folder: Path) -> None:
    config = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen2_moe"}))


def eos_beyond(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<|{number}|>" for number in range(20)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = read_json(folder / "tokenizer_config.json") | {"eos_token": "<|19|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("damage", "kind", "told"),
    [
        (no_config, CheckpointError, "not a Hugging Face model.*no config.json"),
        (no_weights, CheckpointError, "holds no weights.*model.safetensors"),
        (pickled, CheckpointError, r"pickles.*got pytorch_model\.bin.*save_pretrained"),
        (no_tokenizer, TokenizerError, r"no tokenizer.*tokenizer\.json.*--tokenizer"),
        (broken_tokenizer, TokenizerError, "files cannot be understood"),
        (cut_weights, CheckpointError, "weights cannot be read"),
        (lost_shard, CheckpointError, r"weights is absent.*model-00001"),
        (wrong_index, CheckpointError, r"lacks tensors.*got a"),
        (outside_index, CheckpointError, "outside its folder"),
        (index_of_numbers, CheckpointError, "names no files"),
        (generation_list, CheckpointError, "no JSON object.*generation_config"),
        (odd_width, TrainingError, "configuration is refused.*hidden_size"),
        (own_code, TrainingError, "trust_remote_code"),
        (experts, TrainingError, "mixture of experts"),
        (eos_beyond, CheckpointError, r"EOS has no embedding.*below 437"),
    ],
)
def test_a_folder_that_cannot_be_converted_is_told_why_and_leaves_nothing(
    tmp_path: Path, damage: Callable[[Path], None], kind: type[FlameError], told: str
) -> None:
    source = write_folder(tmp_path / "hf", llama())
    damage(source)
    with pytest.raises(kind, match=f"(?s){told}"):
        convert(source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_tokenizer_may_come_from_another_folder(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", llama())
    no_tokenizer(source)
    other = write_tiny_tokenizer(tmp_path / "tok")
    checkpoint = convert_folder(source, tmp_path / "run/checkpoint/step-0", tokenizer=other)
    assert (checkpoint / "hf/tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


def test_a_full_disk_leaves_no_checkpoint(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", llama())
    with file_size_limit(30_000), pytest.raises(FlameError, match=r"no space"):
        convert(source, tmp_path / "run")
    assert not list((tmp_path / "run/checkpoint").iterdir())


@pytest.mark.parametrize(
    ("output", "proposed"),
    [
        ("b", "b/checkpoint/step-0"),
        ("b/checkpoint", "b/checkpoint/step-0"),
        ("b/checkpoint/step-5", "b/checkpoint/step-0"),
        ("b/checkpoint/seed", "b/checkpoint/step-0"),
    ],
)
def test_another_name_than_step_0_is_refused_with_the_right_one(tmp_path: Path, output: str, proposed: str) -> None:
    source = write_folder(tmp_path / "hf", llama())
    with pytest.raises(UsageError, match=re.escape(f"Name it {tmp_path / proposed},")):
        convert_folder(source, tmp_path / output)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write_folder(tmp_path / "hf", llama()), tmp_path / "run/checkpoint/step-0"
    command = ["dcp", f"--model={source}", f"--output={output}"]
    capsys.readouterr()
    assert main(command) == 0
    assert capsys.readouterr().out == f"{output}\n"
    (tmp_path / "begun/checkpoint/step-7").mkdir(parents=True)
    wrong_calls = {
        "is there already": command,
        "no such folder": ["dcp", "--model=nowhere", f"--output={tmp_path / 'b/checkpoint/step-0'}"],
        f"Did you mean {source}?": ["dcp", f"--model={source}s", f"--output={tmp_path / 'b/checkpoint/step-0'}"],
        "has checkpoints already": [*command[:2], f"--output={tmp_path / 'begun/checkpoint/step-0'}"],
        "not named step-0": [*command[:2], f"--output={tmp_path / 'b'}"],
        "needs --output": command[:2],
    }
    for message, words in wrong_calls.items():
        assert main(words) == 2
        told = capsys.readouterr()
        assert message in told.err and told.out == "" and "Traceback" not in told.err
    no_weights(source)
    assert main([*command[:2], f"--output={tmp_path / 'c/checkpoint/step-0'}"]) == 1


def test_the_logits_come_back(tmp_path: Path) -> None:
    model = llama()
    output = export_checkpoint(convert(write_folder(tmp_path / "hf", model), tmp_path / "run"), tmp_path / "back")
    ids = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(output)(ids).logits, model.eval()(ids).logits)
    with safe_open(output / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
