"""Exports: what transformers loads, offline, is what the checkpoint holds, and its files agree with each other."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from flame.cli.export import main
from flame.errors import CheckpointError, DiskFullError, UsageError
from flame.export.check import check_export
from flame.export.hf import export_checkpoint, parse_shard_size
from flame.train.checkpoint_tensors import StoredModel, named_tensors
from flame.train.distributed import World
from flame.train.hf_files import build_hf_files
from flame.train.model import build_model
from flame.train.parallelize import parallelize
from tests.tiny_states import adamw, file_size_limit, one_rank, save, shard, tiny_llama, update
from tests.tokenizers import write_tiny_tokenizer


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank() as world:
        yield world


def checkpoint_of(folder: Path, model: nn.Module, world: World, tokenizer: Path | None = None, **ids: Any) -> Path:
    """A trained step's checkpoint, with its optimizer, sharded as the trainer does."""
    shard(model, world)
    optimizer = adamw(model)
    update(model, optimizer, seed=0)
    ids = {"eos_id": 3, **ids}
    return save(folder, model, optimizer, 5, world, hf_files=build_hf_files(model, tokenizer, **ids))


def load(folder: Path) -> Any:
    """Load as a user does; every kind of complaint is a failure."""
    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(loading.values()), loading
    return model


def constants(model: Any) -> dict[str, float]:
    """Fill each tensor with a constant of its own, exact in every format, and return them."""
    values = {name: 1.0 + number / 64 for number, name in enumerate(named_tensors(model))}
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            tensor.fill_(values[name])
    return values


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_tensor_is_its_own_constant(tmp_path: Path, world: World, tied: bool, dtype: str) -> None:
    model = tiny_llama(tied=tied)
    values = constants(model)
    path = save(tmp_path, model, None, 5, world, hf_files=build_hf_files(model, None, eos_id=3))
    output = export_checkpoint(path, tmp_path / "hf", dtype=dtype, max_shard_size="3KB")
    loaded = load(output)
    named = named_tensors(loaded)
    assert set(named) == set(values)
    for name, tensor in named.items():
        assert tensor.dtype == getattr(torch, dtype) and bool((tensor == values[name]).all()), name
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    config = json.loads((output / "config.json").read_text())
    assert config["dtype"] == dtype and "torch_dtype" not in config
    assert config["architectures"] == ["LlamaForCausalLM"] and config["vocab_size"] == 40


@pytest.mark.parametrize("size", ["1KB", "6KB", "5GB"])
def test_files_and_index(tmp_path: Path, world: World, size: str) -> None:
    path = checkpoint_of(tmp_path, tiny_llama(tied=True), world)
    output = export_checkpoint(path, tmp_path / "hf", max_shard_size=size)
    weights = sorted(output.glob("*.safetensors"))
    keys: dict[str, str] = {}
    for file in weights:
        with safe_open(file, "pt") as tensors:
            assert tensors.metadata() == {"format": "pt"}
            sizes = [tensors.get_tensor(key).nbytes for key in tensors.keys()]  # noqa: SIM118 - no iteration
            assert len(sizes) == 1 or sum(sizes) <= parse_shard_size(size)
            keys |= dict.fromkeys(tensors.keys(), file.name)
    assert "lm_head.weight" not in keys and "model.embed_tokens.weight" in keys, "tied weights are written once"
    if size == "5GB":
        assert [file.name for file in weights] == ["model.safetensors"]
        assert not (output / "model.safetensors.index.json").exists()
    else:
        assert len(weights) > 1 and weights[0].name == f"model-00001-of-{len(weights):05d}.safetensors"
        index = json.loads((output / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == keys
        assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in tiny_llama(tied=True).parameters())


def test_no_more_than_a_file_of_weights_is_in_memory(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound of a run's own export too: it never holds the model, whatever that takes."""
    path = checkpoint_of(tmp_path, tiny_llama(tied=True), world)
    read, held, peak = StoredModel.read, 0, 0

    def counted(stored: StoredModel, name: str) -> torch.Tensor:
        nonlocal held, peak
        tensor = read(stored, name)
        size = tensor.nbytes
        held += size
        peak = max(peak, held)
        weakref.finalize(tensor, freed, size)
        return tensor

    def freed(size: int) -> None:
        nonlocal held
        held -= size

    monkeypatch.setattr(StoredModel, "read", counted)
    export_checkpoint(path, tmp_path / "hf", max_shard_size="6KB")
    files = [file.stat().st_size for file in (tmp_path / "hf").glob("*.safetensors")]
    assert len(files) >= 3 and peak <= max(files)


def test_the_export_computes_what_the_trainer_computes(tmp_path: Path, world: World) -> None:
    model = tiny_llama()
    path = checkpoint_of(tmp_path, model, world)
    loaded = load(export_checkpoint(path, tmp_path / "hf", check=True)).eval()
    ids = torch.arange(12).reshape(1, 12) % 40
    with torch.no_grad():
        trained = model.eval()(input_ids=ids.to(world.device)).logits.cpu()
        torch.testing.assert_close(loaded(input_ids=ids).logits, trained, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "transformer"])
def test_what_the_trainer_builds_reloads(tmp_path: Path, world: World, model_type: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    if model_type == "transformer":
        pytest.importorskip("fla")
        sizes |= {"num_heads": 4, "num_kv_heads": 2}
    else:
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
    config = AutoConfig.for_model(model_type, tie_word_embeddings=model_type == "qwen3", **sizes)
    module = build_model(config, seed=1, rank=0, device=world.device, dtype=torch.float32, varlen=True)
    parallelize(module, world.mesh, device=world.device, param_dtype=torch.float32)
    files = build_hf_files(module.model, None, eos_id=3)
    path = save(tmp_path, module.model, None, 0, world, hf_files=files)
    export_checkpoint(path, tmp_path / "hf", check=True)
    exported = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert exported["model_type"] == model_type and "flame" not in json.dumps(exported)


@pytest.mark.parametrize("bos", [None, "<s>"])
def test_tokenizer_config_and_generation_config_agree(tmp_path: Path, world: World, bos: str | None) -> None:
    tokenizer = write_tiny_tokenizer(tmp_path / "tokenizer", bos=bos)
    ids = {
        text: Tokenizer.from_file(str(tokenizer / "tokenizer.json")).token_to_id(text)
        for text in ("<|endoftext|>", "<s>")
    }
    model = tiny_llama(vocab_size=512, eos_token_id=7, bos_token_id=9)
    path = checkpoint_of(tmp_path, model, world, tokenizer, eos_id=ids["<|endoftext|>"])
    output = export_checkpoint(path, tmp_path / "hf", check=True)
    config, generation = AutoConfig.from_pretrained(output), GenerationConfig.from_pretrained(output)
    loaded = AutoTokenizer.from_pretrained(output)
    assert config.eos_token_id == generation.eos_token_id == loaded.eos_token_id == ids["<|endoftext|>"]
    assert config.bos_token_id == generation.bos_token_id == loaded.bos_token_id == ids["<s>"]
    assert config.vocab_size == 512 and len(loaded) <= 512
    text = "the quick brown fox; naïve façade"
    assert loaded.decode(loaded(text, add_special_tokens=False)["input_ids"]) == text
    assert load(output).generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape[1] <= 5


def test_an_added_eos_reaches_every_file(tmp_path: Path, world: World) -> None:
    folder = write_tiny_tokenizer(tmp_path / "tokenizer", eos=None)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|stop|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>", "lstrip": False}}))
    stop = tokenizer.token_to_id("<|stop|>")
    for bare in (False, True):
        if bare:
            (folder / "tokenizer_config.json").unlink()
        path = checkpoint_of(tmp_path / str(bare), tiny_llama(vocab_size=512), world, folder, eos_id=stop)
        output = export_checkpoint(path, tmp_path / f"hf-{bare}", check=True)
        assert AutoTokenizer.from_pretrained(output).eos_token_id == stop
        assert GenerationConfig.from_pretrained(output).eos_token_id == stop


def test_a_sources_generation_config_is_kept(tmp_path: Path, world: World) -> None:
    model = tiny_llama()
    model.generation_config = GenerationConfig(eos_token_id=[3, 8], bos_token_id=2, temperature=0.7, do_sample=True)
    output = export_checkpoint(checkpoint_of(tmp_path, model, world), tmp_path / "hf", check=True)
    generation = GenerationConfig.from_pretrained(output)
    assert generation.eos_token_id == [3, 8] and generation.temperature == 0.7
    assert AutoConfig.from_pretrained(output).eos_token_id == [3, 8], "the data's EOS is among them"
    model = tiny_llama()
    model.generation_config = GenerationConfig(eos_token_id=[8, 9])
    output = export_checkpoint(checkpoint_of(tmp_path / "b", model, world), tmp_path / "hf2", check=True)
    assert GenerationConfig.from_pretrained(output).eos_token_id == 3, "the data's EOS wins where it is not"


def test_only_the_tokenizers_files_come_along(tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(tmp_path / "tokenizer")
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json", "code.py", "chat_template.jinja"):
        (folder / name).write_text("{}")
    files = build_hf_files(tiny_llama(), folder, eos_id=0)
    assert set(files) == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    }
    assert json.loads(files["config.json"])["model_type"] == "llama"


def test_the_command_line(tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint_of(tmp_path, tiny_llama(), world)
    output = tmp_path / "hf"
    command = ["hf", f"--checkpoint={path}", f"--output={output}", "--dtype", "bfloat16", "--max-shard-size", "3KB"]
    assert main([*command, "--check"]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert len(list(output.glob("*.safetensors"))) > 1 and load(output).dtype == torch.bfloat16
    modes = {file.stat().st_mode & 0o777 for file in output.iterdir()}
    assert len(modes) == 1, "weights are as readable as the other files"
    wrong_calls = {
        "there already": command,
        "no such checkpoint": ["hf", "--checkpoint=nowhere", f"--output={tmp_path / 'b'}"],
        "max_shard_size is no size": [*command[:2], f"--output={tmp_path / 'b'}", "--max_shard_size=many"],
        "one of float32, bfloat16, float16": [*command[:2], f"--output={tmp_path / 'b'}", "--dtype=int8"],
    }
    for message, words in wrong_calls.items():
        assert main(words) == 2
        told = capsys.readouterr()
        assert message in told.err and told.out == "" and "Traceback" not in told.err
    (path / ".metadata").unlink()
    assert main(["hf", f"--checkpoint={path}", f"--output={tmp_path / 'b'}"]) == 1
    assert ".metadata is absent" in capsys.readouterr().err
    assert not list(tmp_path.glob("b*"))


def test_an_output_that_is_there_is_refused(tmp_path: Path, world: World) -> None:
    path = checkpoint_of(tmp_path, tiny_llama(), world)
    output = tmp_path / "hf"
    output.mkdir()
    export_checkpoint(path, output)  # an empty folder is fine
    (output / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="there already"):
        export_checkpoint(path, output)
    assert (output / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="there already"):
        export_checkpoint(path, tmp_path / "file")
    export_checkpoint(path, output, replace=True)
    assert not (output / "notes.txt").exists() and load(output)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "hf", "step-5"]


PEAK_OF_AN_EXPORT = """
import re, sys
from pathlib import Path
from flame.export.hf import export_checkpoint

def peak():  # of this program: getrusage begins with its parent's
    return 1024 * int(re.search(r"VmHWM:\\s+([0-9]+)", Path("/proc/self/status").read_text())[1])

before = peak()
export_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), max_shard_size="68MB", fast_open=True)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the system does not tell")
def test_a_process_grows_by_a_file_and_not_by_the_model(tmp_path: Path, world: World) -> None:
    layers = nn.ModuleDict({f"layer{i}": nn.Linear(2048, 2048, bias=False) for i in range(16)})
    path = save(tmp_path, layers, None, 5, world)
    words = [sys.executable, "-c", PEAK_OF_AN_EXPORT, str(path), str(tmp_path / "hf")]
    grown = int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    files = [file.stat().st_size for file in (tmp_path / "hf").glob("*.safetensors")]
    assert len(files) == 4 and grown < max(files) + 150_000_000 < sum(files)


def test_a_disk_without_room_is_told_with_the_bytes_needed(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    path = checkpoint_of(tmp_path, model, world)
    needed = sum(tensor.nbytes for tensor in named_tensors(model).values())
    monkeypatch.setattr("flame.export.hf.free_bytes", lambda _: needed // 2)
    with pytest.raises(DiskFullError, match=rf"{needed // 2:,} bytes free; expected at least {needed:,} bytes"):
        export_checkpoint(path, tmp_path / "hf")
    assert export_checkpoint(path, tmp_path / "half", dtype="bfloat16").is_dir(), "it has room for that"
    assert not list(tmp_path.glob("hf*"))


def test_a_damaged_checkpoint_or_a_full_disk_leaves_nothing(tmp_path: Path, world: World) -> None:
    path = checkpoint_of(tmp_path, tiny_llama(), world)
    output = tmp_path / "hf"
    with file_size_limit(4_000), pytest.raises(DiskFullError, match=r"model.safetensors; .* at least [0-9,]+ bytes"):
        export_checkpoint(path, output, fast_open=True)
    shard_file = path / "__0_0.distcp"
    data = bytearray(shard_file.read_bytes())
    data[len(data) // 2] ^= 1
    shard_file.write_bytes(data)
    with pytest.raises(CheckpointError, match="other bytes than were written"):
        export_checkpoint(path, output)
    (path / "complete.json").unlink()
    with pytest.raises(CheckpointError, match="never completed"):
        export_checkpoint(path, output)
    with pytest.raises(CheckpointError, match="step-5"):
        export_checkpoint(tmp_path, output)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-5"]


def test_numbers_that_do_not_fit_are_refused(tmp_path: Path, world: World) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[3, 4] = 1e5
    path = save(tmp_path, model, None, 5, world, hf_files=build_hf_files(model, None, eos_id=3))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight holds numbers too large for float16.*100000"):
        export_checkpoint(path, tmp_path / "hf", dtype="float16")
    export_checkpoint(path, tmp_path / "hf", dtype="bfloat16", check=True)


def test_the_check_finds_a_changed_bit_a_lost_key_and_a_disagreement(tmp_path: Path, world: World) -> None:
    path = checkpoint_of(tmp_path, tiny_llama(), world)
    output = export_checkpoint(path, tmp_path / "hf")
    assert check_export(output, StoredModel(path)) == len(named_tensors(tiny_llama()))
    weights = output / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="is not the checkpoint's"):
        check_export(output, StoredModel(path))
    weights.write_bytes(whole.replace(b"lm_head.weight", b"lm_tail.weight"))
    with pytest.raises(CheckpointError, match=r"(?s)not load cleanly.*lm_head"):
        check_export(output, StoredModel(path))
    weights.write_bytes(whole)
    generation = json.loads((output / "generation_config.json").read_text())
    (output / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": 4}))
    with pytest.raises(CheckpointError, match="disagree about eos_token_id"):
        check_export(output, StoredModel(path))


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5mb", 1_500_000), ("200 KB", 200_000), ("7", 7)])
def test_sizes(text: str, size: int) -> None:
    assert parse_shard_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1GB", "5 parsecs", "GB", "1e9"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="max_shard_size"):
        parse_shard_size(text)
