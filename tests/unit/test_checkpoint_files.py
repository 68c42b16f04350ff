"""Which checkpoints are whole, which one is taken, which are put away: no torch, only folders."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flame.errors import CheckpointError
from flame.files import write_json
from flame.train.checkpoint_files import (
    Complete,
    abandon_later,
    checkpoint_steps,
    choose_checkpoint,
    find_damage,
    make_room,
    open_checkpoint,
    read_complete,
    record_of_file,
    retain_latest,
    step_folder,
)
from flame.train.identity import DataIdentity
from flame.train.log import log

IDENTITY = DataIdentity(
    mixture_fingerprint="sha256:m",
    corpora={"web": "sha256:w"},
    tokenizer_fingerprint="sha256:t",
    data_seed=42,
    window_len=16,
)


@pytest.fixture
def warnings_logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    before = log.propagate
    log.propagate = True
    with caplog.at_level(logging.WARNING, logger="flame"):
        yield caplog
    log.propagate = before


def make_checkpoint(folder: Path, step: int) -> Path:
    path = step_folder(folder, step)
    (path / "hf").mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(bytes(range(256)) * 4)
    (path / ".metadata").write_bytes(b"index")
    (path / "hf" / "config.json").write_text("{}")
    names = ["__0_0.distcp", ".metadata", "hf/config.json"]
    complete = Complete(
        step=step,
        consumed_samples=step * 8,
        has_optimizer=True,
        identity=IDENTITY,
        files={name: record_of_file(path / name) for name in names},
    )
    write_json(path / "complete.json", complete.to_json())
    return path


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a shard is gone": lambda path: (path / "__0_0.distcp").unlink(),
    "the index is gone": lambda path: (path / ".metadata").unlink(),
    "an export file is gone": lambda path: (path / "hf" / "config.json").unlink(),
    "a shard is cut": lambda path: (path / "__0_0.distcp").write_bytes(b"short"),
    "complete.json is gone": lambda path: (path / "complete.json").unlink(),
    "complete.json is cut": lambda path: (path / "complete.json").write_text('{"format_version": 1, "st'),
    "complete.json lacks a field": lambda path: (path / "complete.json").write_text('{"format_version": 1}'),
    "complete.json is a list": lambda path: (path / "complete.json").write_text("[]"),
    "another version wrote it": lambda path: (path / "complete.json").write_text('{"format_version": 2}'),
}


def test_complete_says_what_the_checkpoint_is(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 7)
    value = json.loads((path / "complete.json").read_text())
    assert value["format_version"] == 1
    assert (value["step"], value["consumed_samples"], value["window_len"], value["data_seed"]) == (7, 56, 16, 42)
    assert value["fingerprints"] == {"mixture": "sha256:m", "corpora": {"web": "sha256:w"}, "tokenizer": "sha256:t"}
    assert value["files"][".metadata"] == {"size": 5, "xxh3": "801d9f0bdea1c760ce2022399b066389"}
    assert read_complete(path).identity == IDENTITY


def test_the_latest_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    for step in (9, 10, 100):  # rising as numbers, not as text
        make_checkpoint(tmp_path, step)
    choice = choose_checkpoint(tmp_path)
    assert choice is not None and (choice.step, choice.path.name) == (100, "step-100")


def test_an_empty_or_absent_folder_has_none(tmp_path: Path) -> None:
    assert choose_checkpoint(tmp_path) is None
    assert choose_checkpoint(tmp_path / "absent") is None


def test_what_is_not_named_like_a_step_is_no_checkpoint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 5)
    for name in ("step-6.tmp", "step-07", "step--8", "step-9x", "abandoned-x"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-11").write_text("a file")
    assert checkpoint_steps(tmp_path) == [5]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("fast_open", [False, True])
def test_a_damaged_latest_is_named_and_the_one_before_taken(
    tmp_path: Path, damage: str, fast_open: bool, warnings_logged: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path, 50)
    DAMAGES[damage](make_checkpoint(tmp_path, 100))
    choice = choose_checkpoint(tmp_path, fast_open=fast_open)
    assert choice is not None and choice.step == 50
    assert "step-100 is damaged" in warnings_logged.text


def test_changed_bytes_are_found_by_checksum_only(tmp_path: Path, warnings_logged: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, 50)
    flip_a_bit(make_checkpoint(tmp_path, 100) / "__0_0.distcp")
    careful, trusting = choose_checkpoint(tmp_path), choose_checkpoint(tmp_path, fast_open=True)
    assert careful is not None and careful.step == 50
    assert trusting is not None and trusting.step == 100
    assert "__0_0.distcp has other bytes" in warnings_logged.text


def test_a_renamed_checkpoint_is_damage(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 50).rename(tmp_path / "step-60")
    assert find_damage(tmp_path / "step-60", check_bytes=False) == "complete.json says step 50"


@pytest.mark.parametrize("damage", DAMAGES)
def test_never_a_silent_step_0(tmp_path: Path, damage: str) -> None:
    for step in (50, 100):
        DAMAGES[damage](make_checkpoint(tmp_path, step))
    with pytest.raises(CheckpointError, match=r"every checkpoint of this run is damaged.*step-50, step-100"):
        choose_checkpoint(tmp_path)


def test_a_named_step_is_taken_or_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 50)
    DAMAGES["a shard is gone"](make_checkpoint(tmp_path, 100))
    choice = choose_checkpoint(tmp_path, load_step=50)
    assert choice is not None and choice.step == 50
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 70 .*got step-50, step-100"):
        choose_checkpoint(tmp_path, load_step=70)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is absent"):
        choose_checkpoint(tmp_path, load_step=100)
    with pytest.raises(CheckpointError, match="got no checkpoints"):
        choose_checkpoint(tmp_path / "absent", load_step=0)


@given(whole=st.lists(st.tuples(st.integers(0, 200), st.sampled_from([None, *DAMAGES])), max_size=4))
def test_the_choice_is_the_last_whole_one(
    tmp_path_factory: pytest.TempPathFactory, whole: list[tuple[int, str | None]]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    damages = dict(whole)
    for step, damage in damages.items():
        path = make_checkpoint(folder, step)
        if damage is not None:
            DAMAGES[damage](path)
    good = [step for step, damage in damages.items() if damage is None]
    if damages and not good:
        with pytest.raises(CheckpointError):
            choose_checkpoint(folder)
        return
    choice = choose_checkpoint(folder)
    assert (choice.step if choice else None) == (max(good) if good else None)


def test_open_checkpoint_points_at_the_steps_of_a_folder_above(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "run" / "checkpoint", 50)
    assert open_checkpoint(path, fast_open=False).step == 50
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint"):
        with pytest.raises(CheckpointError, match="step-50"):
            open_checkpoint(folder, fast_open=True)


def test_later_checkpoints_are_moved_not_deleted(tmp_path: Path) -> None:
    for step in (50, 100, 150):
        make_checkpoint(tmp_path, step)
    moved = abandon_later(tmp_path, 50)
    assert checkpoint_steps(tmp_path) == [50]
    assert [path.name for path in moved] == ["step-100", "step-150"]
    assert all(path.parent.name.startswith("abandoned-") for path in moved)
    assert all(find_damage(path, check_bytes=True) is None for path in moved)
    assert abandon_later(tmp_path, 50) == []


def test_two_retreats_within_one_second_keep_both(tmp_path: Path) -> None:
    for _ in range(3):
        make_checkpoint(tmp_path, 100)
        abandon_later(tmp_path, 0)
    assert len(list(tmp_path.glob("abandoned-*/step-100"))) == 3


def test_making_room_deletes_leftovers_and_moves_a_damaged_namesake(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 50)
    DAMAGES["a shard is gone"](make_checkpoint(tmp_path, 100))
    (tmp_path / "step-100.tmp").mkdir()
    (tmp_path / "step-70.tmp").mkdir()
    (tmp_path / "notes.tmp").mkdir()
    make_room(tmp_path, 100)
    assert checkpoint_steps(tmp_path) == [50]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")) == ["notes.tmp"]
    assert len(list(tmp_path.glob("abandoned-*/step-100"))) == 1


def test_retention_keeps_the_latest_whole_ones(tmp_path: Path) -> None:
    for step in (0, 50, 100, 150, 200):
        make_checkpoint(tmp_path, step)
    DAMAGES["a shard is gone"](tmp_path / "step-200")
    deleted = retain_latest(tmp_path, 2)
    assert [path.name for path in deleted] == ["step-50"]
    assert checkpoint_steps(tmp_path) == [0, 100, 150, 200], "the seed, two whole ones, and the damaged one stay"
    assert not list(tmp_path.glob("*.tmp"))


def test_retention_touches_nothing_that_is_not_ours(tmp_path: Path) -> None:
    for step in (50, 100):
        make_checkpoint(tmp_path, step)
    (tmp_path / "step-10").mkdir()
    (tmp_path / "step-10" / "weights.bin").write_bytes(b"somebody's")
    (tmp_path / "step-20").symlink_to(tmp_path / "step-50")
    assert [path.name for path in retain_latest(tmp_path, 1)] == ["step-50"]
    assert (tmp_path / "step-10" / "weights.bin").exists() and (tmp_path / "step-20").is_symlink()
    assert retain_latest(tmp_path, None) == []
