"""Saving and loading in one process: what comes back is what was there, to the last bit, or an error by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flame.errors import CheckpointError, FlameError
from flame.train.checkpoint import load_checkpoint
from flame.train.checkpoint_files import checkpoint_steps, choose_checkpoint, find_damage, open_checkpoint
from flame.train.checkpoint_tensors import StoredModel
from flame.train.distributed import World
from flame.train.train_state import DataSegment, TrainState
from tests.tiny_states import (
    OddShapes,
    adamw,
    differences,
    file_size_limit,
    one_rank,
    save,
    shard,
    tiny_llama,
    update,
    whole_state,
)

OPTIMIZERS = {
    "adamw": lambda model: adamw(model),
    "adamw, fused": lambda model: adamw(model, fused=True),
    "adamw, for-loop": lambda model: adamw(model, foreach=False),
    "sgd with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank() as world:
        yield world


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_run_comes_back_to_the_last_bit(tmp_path: Path, world: World, kind: str, tied: bool) -> None:
    model = shard(tiny_llama(tied=tied), world)
    optimizer = OPTIMIZERS[kind](model)
    for seed in range(3):
        update(model, optimizer, seed=seed)
    saved = whole_state(model, optimizer)
    path = save(tmp_path, model, optimizer, 3, world)
    assert not differences(saved, whole_state(model, optimizer)), "saving changes nothing"

    other = shard(tiny_llama(tied=tied, seed=1), world)
    others = OPTIMIZERS[kind](other)
    state = load_checkpoint(open_checkpoint(path, fast_open=False), model=other, optimizer=others, world=world)
    assert state == TrainState(step=3, consumed_samples=24, consumed_tokens=384, elapsed_seconds=0.1 * 3)
    assert not differences(saved, whole_state(other, others))
    update(model, optimizer, seed=9)
    update(other, others, seed=9)
    assert not differences(whole_state(model, optimizer), whole_state(other, others)), "and they go on alike"


def test_loading_replaces_moments_and_keeps_hyperparameters(tmp_path: Path, world: World) -> None:
    model = shard(tiny_llama(), world)
    optimizer = adamw(model)
    update(model, optimizer, seed=0)
    saved = whole_state(model, optimizer)
    path = save(tmp_path, model, optimizer, 1, world)
    optimizer.param_groups[0].update(lr=0.5, betas=(0.1, 0.2), weight_decay=0.0)
    for seed in range(2):
        update(model, optimizer, seed=seed)
    load_checkpoint(open_checkpoint(path, fast_open=True), model=model, optimizer=optimizer, world=world)
    assert not differences(saved, whole_state(model, optimizer))
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.param_groups[0]["betas"] == (0.1, 0.2)


def test_extreme_values_and_odd_shapes_survive(tmp_path: Path, world: World) -> None:
    model = OddShapes()
    with torch.no_grad():
        model.seven[0] = torch.tensor([float("nan"), -0.0, float("-inf")])
        model.seven[1] = torch.tensor([1e-45, 3.4e38, -1e-45])
    saved = whole_state(model, None)
    path = save(tmp_path, model, None, 0, world)
    other = OddShapes(seed=1)
    load_checkpoint(open_checkpoint(path, fast_open=True), model=other, optimizer=None, world=world)
    assert not differences(saved, whole_state(other, None))


def test_train_state_is_kept_whole(tmp_path: Path, world: World) -> None:
    segments = (
        DataSegment(number=0, mixture_fingerprint="sha256:a", data_seed=42, first_step=1),
        DataSegment(number=1, mixture_fingerprint="sha256:b", data_seed=2**63 - 1, first_step=5),
    )
    state = TrainState(
        step=7,
        consumed_samples=2**62 + 1,
        consumed_tokens=2**63 - 1,
        skipped_steps=2,
        elapsed_seconds=0.1 + 0.2,
        data_segments=segments,
    )
    model = OddShapes()
    path = save(tmp_path, model, None, 7, world, state=state)
    assert load_checkpoint(open_checkpoint(path, fast_open=True), model=model, optimizer=None, world=world) == state


def test_the_folder_is_complete_and_says_so(tmp_path: Path, world: World) -> None:
    model = tiny_llama(tied=True)
    path = save(tmp_path, model, None, 4, world, hf_files={"config.json": b"{}", "tokenizer.json": b"[]"})
    assert path == tmp_path / "step-4"
    files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert files == {".metadata", "__0_0.distcp", "config.toml", "hf/config.json", "hf/tokenizer.json", "complete.json"}
    records = json.loads((path / "complete.json").read_text())["files"]
    assert records.keys() == files - {"complete.json"}
    for name, record in records.items():
        data = (path / name).read_bytes()
        assert record == {"size": len(data), "xxh3": xxhash.xxh3_128(data).hexdigest()}, name
    names = list(StoredModel(path).tensors)
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names, "tied weights are kept once"


def test_keys_are_the_models_own(tmp_path: Path, world: World) -> None:
    model = tiny_llama()
    for number, block in enumerate(model.model.layers):
        model.model.layers[number] = torch.compile(block)  # a wrapper that puts its own word into the names
    assert set(model.state_dict()) != set(tiny_llama().state_dict())
    path = save(tmp_path, model, None, 0, world)
    assert set(StoredModel(path).tensors) == set(tiny_llama().state_dict())
    assert torch.equal(StoredModel(path).read("lm_head.weight"), tiny_llama().lm_head.weight)


def test_weights_gathered_for_a_forward_are_saved_all_the_same(tmp_path: Path, world: World) -> None:
    class Root(nn.Module):
        """As in the trainer: the inner model inside a module of its own, which is the root of the sharding."""

        def __init__(self) -> None:
            super().__init__()
            self.model = tiny_llama()

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(input_ids=ids).logits.sum()

    root = Root()
    shard(root, world)
    optimizer = adamw(root)
    update(root, optimizer, seed=0)
    before = whole_state(root.model, optimizer)
    with torch.no_grad():
        root(torch.zeros(1, 4, dtype=torch.long))
    assert not isinstance(root.model.lm_head.weight, DTensor), "a forward without a backward leaves it gathered"
    path = save(tmp_path, root.model, optimizer, 1, world)
    other = Root()
    others = adamw(shard(other, world))
    load_checkpoint(open_checkpoint(path, fast_open=True), model=other.model, optimizer=others, world=world)
    assert not differences(before, whole_state(other.model, others))


def test_layers_are_listed_in_order(tmp_path: Path, world: World) -> None:
    path = save(tmp_path, tiny_llama(num_hidden_layers=11), None, 0, world)
    layers = [int(name.split(".")[2]) for name in StoredModel(path).tensors if name.startswith("model.layers.")]
    assert layers == sorted(layers) and layers[-1] == 10


def test_a_whole_checkpoint_is_not_written_again(tmp_path: Path, world: World) -> None:
    model = OddShapes()
    path = save(tmp_path, model, None, 4, world)
    before = (path / "complete.json").stat().st_mtime_ns
    assert save(tmp_path, OddShapes(seed=1), None, 4, world) == path
    assert (path / "complete.json").stat().st_mtime_ns == before


def test_leftovers_are_cleared_and_a_damaged_namesake_is_moved(tmp_path: Path, world: World) -> None:
    (tmp_path / "step-4.tmp").mkdir()
    (tmp_path / "step-4.tmp" / "__7_0.distcp").write_bytes(b"old")
    damaged = save(tmp_path, OddShapes(), None, 5, world)
    (damaged / ".metadata").unlink()
    save(tmp_path, OddShapes(), None, 5, world)
    assert find_damage(tmp_path / "step-5", check_bytes=True) is None
    assert not list(tmp_path.glob("*.tmp")) and list(tmp_path.glob("abandoned-*/step-5"))


@pytest.mark.parametrize("limit_bytes", [100, 5_000, 20_000])
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path, world: World, limit_bytes: int) -> None:
    model = tiny_llama()
    optimizer = adamw(model)
    update(model, optimizer, seed=0)
    previous = save(tmp_path, model, optimizer, 1, world)
    weights_and_moments = sum(tensor.nbytes for tensor in whole_state(model, optimizer).values())
    with file_size_limit(limit_bytes), pytest.raises(FlameError, match="no space left on the device") as caught:
        save(tmp_path, model, optimizer, 2, world, hf_files={"tokenizer.json": bytes(200)})
    needed = re.search(r"at least ([\d,]+) bytes", str(caught.value))
    assert needed and (int(needed[1].replace(",", "")) > weights_and_moments or limit_bytes == 100), (
        "what this rank must write"
    )
    assert "step-2" in str(caught.value) and caught.value.exit_code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1"], "nothing half-written stays"
    choice = choose_checkpoint(tmp_path)
    assert choice is not None and choice.path == previous
    assert save(tmp_path, model, optimizer, 2, world).name == "step-2", "and it works when there is room"


def test_a_kill_before_the_seal_leaves_no_checkpoint(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, OddShapes(), None, 1, world)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flame.train.checkpoint.publish", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, OddShapes(), None, 2, world)
    assert checkpoint_steps(tmp_path) == [1]


def test_another_models_checkpoint_is_refused_by_name(tmp_path: Path, world: World) -> None:
    path = save(tmp_path, tiny_llama(), None, 0, world)
    choice = open_checkpoint(path, fast_open=True)
    cases = {
        "absent from it model.layers.2.self_attn": tiny_llama(num_hidden_layers=3),
        "unknown to the model model.layers.1": tiny_llama(num_hidden_layers=1),
        r"lm_head.weight \(40, 16\) instead of \(48, 16\)": tiny_llama(vocab_size=48),
        "unknown to the model lm_head.weight": tiny_llama(tied=True),
    }
    for message, other in cases.items():
        before = whole_state(other, None)
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(choice, model=other, optimizer=None, world=world)
        assert not differences(before, whole_state(other, None))


def test_weights_alone_are_no_run_but_a_seed_is(tmp_path: Path, world: World) -> None:
    model = tiny_llama()
    weights = open_checkpoint(save(tmp_path, model, None, 5, world), fast_open=True)
    with pytest.raises(CheckpointError, match="weights only"):
        load_checkpoint(weights, model=model, optimizer=adamw(model), world=world)
    seed = open_checkpoint(save(tmp_path, model, None, 0, world), fast_open=True)
    other = tiny_llama(seed=1)
    optimizer = adamw(other)
    assert load_checkpoint(seed, model=other, optimizer=optimizer, world=world).step == 0
    assert not differences(whole_state(model, None), whole_state(other, None))
    assert not optimizer.state


def test_damage_that_sizes_hide_is_an_error_and_not_weights(tmp_path: Path, world: World) -> None:
    path = save(tmp_path, OddShapes(), None, 1, world)
    for name in (".metadata", "__0_0.distcp"):
        data = (path / name).read_bytes()
        (path / name).write_bytes(bytes(len(data)))
        with pytest.raises(CheckpointError, match=r"cannot be read|Error"):
            load_checkpoint(open_checkpoint(path, fast_open=True), model=OddShapes(), optimizer=None, world=world)
        (path / name).write_bytes(data)
