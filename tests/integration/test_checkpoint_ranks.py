"""Checkpoints between 1, 2 and 3 ranks: the same tensors to the last bit, and one rank's failure is everybody's."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flame.errors import FlameError
from flame.train.checkpoint import load_checkpoint
from flame.train.checkpoint_files import choose_checkpoint, find_damage, open_checkpoint
from flame.train.checkpoint_tensors import StoredModel
from flame.train.checkpoint_writer import _HashingStream
from flame.train.distributed import World
from tests.ranks import on_ranks
from tests.tiny_states import OddShapes, adamw, differences, one_rank, save, shard, tiny_llama, update, whole_state

MODELS: dict[str, Callable[..., Any]] = {"llama": tiny_llama, "odd": OddShapes}


def load_check_and_go_on(world: World, folder: Path) -> None:
    """Load step 3 of every model, compare with what was saved, take a step, save step 4 and what it must be."""
    for name, build in MODELS.items():
        model = shard(build(seed=1), world)
        optimizer = adamw(model)
        load_checkpoint(
            open_checkpoint(folder / name / "step-3", fast_open=False), model=model, optimizer=optimizer, world=world
        )
        assert not differences(torch.load(folder / f"{name}-3.pt"), whole_state(model, optimizer))
        update(model, optimizer, seed=7)
        save(folder / name, model, optimizer, 4, world)
        state = whole_state(model, optimizer)
        if world.is_main:
            torch.save(state, folder / f"{name}-4.pt")


def test_any_number_of_ranks_reads_any_others(tmp_path: Path) -> None:
    with one_rank() as world:
        for name, build in MODELS.items():
            model = shard(build(), world)
            optimizer = adamw(model)
            for seed in range(3):
                update(model, optimizer, seed=seed)
            save(tmp_path / name, model, optimizer, 3, world)
            torch.save(whole_state(model, optimizer), tmp_path / f"{name}-3.pt")
    on_ranks(3, load_check_and_go_on, tmp_path)
    with one_rank() as world:
        for name, build in MODELS.items():
            path = tmp_path / name / "step-4"
            expected = torch.load(tmp_path / f"{name}-4.pt")
            model = shard(build(seed=1), world)
            optimizer = adamw(model)
            load_checkpoint(open_checkpoint(path, fast_open=False), model=model, optimizer=optimizer, world=world)
            assert not differences(expected, whole_state(model, optimizer))
            stored = StoredModel(path)
            read = {f"model.{key}": stored.read(key) for key in stored.tensors}
            assert not differences({key: expected[key] for key in read}, read), "also without a process group"


def fail_on_one_rank(world: World, folder: Path) -> None:
    model = shard(tiny_llama(), world)
    optimizer = adamw(model)
    update(model, optimizer, seed=0)
    save(folder, model, optimizer, 1, world)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    write = _HashingStream.write
    for broken in range(world.size):
        if world.rank == broken:
            _HashingStream.write = full  # type: ignore[method-assign]
        try:
            save(folder, model, optimizer, 2, world)
        except FlameError as error:
            assert "no space left on the device" in str(error), error
            assert world.rank == broken or f"rank {broken}" in str(error), error
        else:
            raise AssertionError("a checkpoint was published although a rank could not write its part")
        _HashingStream.write = write  # type: ignore[method-assign]
        assert not (folder / "step-2").exists()
    save(folder, model, optimizer, 3, world)


def test_a_full_disk_on_one_rank_stops_all_and_harms_nothing(tmp_path: Path) -> None:
    on_ranks(2, fail_on_one_rank, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3"]
    assert find_damage(tmp_path / "step-1", check_bytes=True) is None
    choice = choose_checkpoint(tmp_path)
    assert choice is not None and choice.step == 3
    assert {"__0_0.distcp", "__1_0.distcp"} < set(choice.complete.files)
