"""The run folder: what may start in it, what a resume takes back, and that each start leaves its line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flame.errors import CheckpointError, TrainingError
from flame.sampling.history import Segment
from flame.sampling.mixture_file import read_mixture
from flame.sampling.sources import mixture_of_corpora
from flame.train.identity import DataIdentity, compare_model_config, settle_data_identity
from flame.train.initial import read_config
from flame.train.run import (
    abandon_metrics,
    append_segment,
    changed_options,
    check_shared_folder,
    check_start,
    keep_mixture,
    read_status,
    write_config,
    write_status,
)
from tests.corpora import make_corpus
from tests.tiny_states import one_rank

CONFIG = {"training.steps": 100, "optimizer.lr": 1e-3, "metrics.log_freq": 1, "job.description": None}
CONFIG_TOML = "[training]\nsteps = 100\n[optimizer]\nlr = 0.001\n[metrics]\nlog_freq = 1\n"
SEGMENT = Segment(
    step=0,
    consumed_samples=0,
    world_size=2,
    dp_size=2,
    micro_batch=4,
    accumulation=1,
    seq_len=128,
    window_len=64,
    samples_per_step=16,
    mixture_fingerprint="sha256:m",
    data_segment=0,
    data_seed=42,
)
ARGV = ("flame-train", "--training.steps=100")


def log_steps(run: Path, steps: range) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"step": step}) + "\n" for step in steps)


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def started(run: Path, state: Any = "running") -> Path:
    write_config(run, CONFIG_TOML)
    log_steps(run, range(1, 5))
    write_status(run, state, step=4)
    return run


def test_an_empty_folder_takes_any_run(tmp_path: Path) -> None:
    check_start(tmp_path, CONFIG, resuming=False)
    check_start(tmp_path / "absent", CONFIG, resuming=False)
    write_config(tmp_path, CONFIG_TOML)  # it failed before its first step
    check_start(tmp_path, {**CONFIG, "training.steps": 7}, resuming=False)


def test_the_same_run_starts_over_if_it_died_before_a_checkpoint(tmp_path: Path) -> None:
    started(tmp_path)
    check_start(tmp_path, CONFIG, resuming=False)
    check_start(tmp_path, {**CONFIG, "metrics.log_freq": 5, "job.description": "again"}, resuming=False)


def test_another_configuration_is_refused_unless_it_resumes(tmp_path: Path) -> None:
    started(tmp_path)
    other = {**CONFIG, "optimizer.lr": 2e-3, "training.seed": 1}
    with pytest.raises(TrainingError, match=r"other values of optimizer\.lr, training\.seed") as caught:
        check_start(tmp_path, other, resuming=False)
    assert caught.value.exit_code == 1 and "job.dump_folder" in str(caught.value)
    check_start(tmp_path, other, resuming=True)


def test_a_finished_run_is_not_run_over(tmp_path: Path) -> None:
    started(tmp_path, "finished")
    with pytest.raises(TrainingError, match="finished run"):
        check_start(tmp_path, CONFIG, resuming=False)


def test_changed_options_are_old_and_new(tmp_path: Path) -> None:
    write_config(tmp_path, CONFIG_TOML + '[checkpoint]\nfolder = "checkpoint"\n[model]\nconverters = ["float8"]\n')
    path = tmp_path / "config.toml"
    same = {**CONFIG, "checkpoint.folder": Path("checkpoint"), "model.converters": ("float8",)}
    assert changed_options(path, same) == {}
    assert changed_options(path, {**same, "optimizer.lr": 3e-4, "training.varlen": True}) == {
        "optimizer.lr": (1e-3, 3e-4),
        "training.varlen": (None, True),
    }
    assert changed_options(tmp_path / "absent.toml", CONFIG) == {}


def test_a_resume_takes_back_the_later_lines(tmp_path: Path) -> None:
    log_steps(tmp_path, range(1, 71))
    assert abandon_metrics(tmp_path, 50) == 20
    log_steps(tmp_path, range(51, 101))
    assert steps_of(tmp_path / "metrics.jsonl") == list(range(1, 101)), "each step once"
    assert steps_of(tmp_path / "metrics.abandoned.jsonl") == list(range(51, 71))
    assert abandon_metrics(tmp_path, 90) == 10
    assert steps_of(tmp_path / "metrics.abandoned.jsonl") == [*range(51, 71), *range(91, 101)]


def test_nothing_to_take_back_changes_nothing(tmp_path: Path) -> None:
    assert abandon_metrics(tmp_path, 0) == 0
    log_steps(tmp_path, range(1, 5))
    before = (tmp_path / "metrics.jsonl").stat().st_mtime_ns
    assert abandon_metrics(tmp_path, 4) == 0
    assert (tmp_path / "metrics.jsonl").stat().st_mtime_ns == before
    assert not (tmp_path / "metrics.abandoned.jsonl").exists()


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3}', "\x00\x00", "[1]", '"step"'])
def test_a_torn_last_line_does_not_join_the_next(tmp_path: Path, torn: str) -> None:
    log_steps(tmp_path, range(1, 3))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(torn)
    abandon_metrics(tmp_path, 3)
    log_steps(tmp_path, range(4, 6))
    assert steps_of(tmp_path / "metrics.jsonl") in ([1, 2, 4, 5], [1, 2, 3, 4, 5])


def test_a_run_keeps_its_id_and_numbers_its_starts(tmp_path: Path) -> None:
    first = append_segment(tmp_path, SEGMENT, ARGV)
    with open(tmp_path / "segments.jsonl", "a") as file:
        file.write('{"torn')
    second = append_segment(tmp_path, SEGMENT, ARGV)
    assert (first.number, second.number) == (0, 1) and first.run_id == second.run_id
    lines = [json.loads(line) for line in (tmp_path / "segments.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert lines[1]["argv"] == ["flame-train", "--training.steps=100"]
    assert lines[1]["versions"]["torch"] and lines[1]["samples_per_step"] == 16
    assert {"time", "step", "consumed_samples", "world_size", "dp_size", "micro_batch", "accumulation"} < set(lines[0])
    assert {"seq_len", "window_len", "mixture_fingerprint"} < set(lines[0])
    (tmp_path / "other").mkdir()
    assert append_segment(tmp_path / "other", SEGMENT, ARGV).run_id != first.run_id


def test_status_is_the_contract(tmp_path: Path) -> None:
    assert read_status(tmp_path) == {}
    write_status(tmp_path, "preempted", step=7, checkpoint=tmp_path / "checkpoint" / "step-7", reason="SIGTERM")
    status = read_status(tmp_path)
    assert list(status) == ["state", "step", "checkpoint", "reason", "time"]
    assert status["checkpoint"] == "checkpoint/step-7" and status["state"] == "preempted"


def test_a_status_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "status.json").mkdir()
    write_status(tmp_path, "failed", step=7, reason="the real reason")


def test_the_mixture_is_kept_with_where_its_corpora_lie(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for number in range(2):
        make_corpus(tmp_path / f"corpus{number}", [[1, 2, 3]] * 9)
        mixture = mixture_of_corpora([tmp_path / f"corpus{number}"], None, 3)
        path = keep_mixture(run, mixture)
        assert path.name == f"mixture-{mixture.fingerprint}.json"
        assert read_mixture(path).sources[0].corpus.resolve() == (tmp_path / f"corpus{number}").resolve()
    assert len(list(run.iterdir())) == 1, "the corpora are the same, wherever they lie"


def test_the_shared_folder_check_leaves_nothing(tmp_path: Path) -> None:
    with one_rank() as world:
        check_shared_folder(tmp_path, world)
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError):
            check_shared_folder(tmp_path / "file", world)


IDENTITY = DataIdentity(
    mixture_fingerprint="sha256:m",
    corpora={"web": "sha256:w", "code": "sha256:c"},
    tokenizer_fingerprint="sha256:t",
    data_seed=42,
    window_len=16,
)


def changed(**changes: Any) -> DataIdentity:
    return DataIdentity(**{**vars(IDENTITY), **changes})


@pytest.mark.parametrize(
    ("current", "named"),
    [
        (changed(window_len=32), "window_len"),
        (changed(data_seed=1, mixture_fingerprint="sha256:n"), "data_seed"),
        (changed(tokenizer_fingerprint="sha256:u", mixture_fingerprint="sha256:n"), "tokenizer"),
        (changed(corpora={"web": "sha256:x", "code": "sha256:c"}, mixture_fingerprint="sha256:n"), "'web'"),
        (changed(corpora={"web": "sha256:w"}, mixture_fingerprint="sha256:n"), "'code'.*no such source"),
        (changed(corpora={**IDENTITY.corpora, "math": "sha256:y"}, mixture_fingerprint="sha256:n"), "'math'"),
        (changed(mixture_fingerprint="sha256:n"), "weights"),
    ],
)
def test_other_data_is_refused_by_name(current: DataIdentity, named: str) -> None:
    with pytest.raises(CheckpointError, match=named) as caught:
        settle_data_identity(IDENTITY, current, where=Path("exp/a/checkpoint/step-5"))
    tokenizer_changed = current.tokenizer_fingerprint != IDENTITY.tokenizer_fingerprint
    assert "step-5" in str(caught.value) and ("allow_data_change" in str(caught.value)) != tokenizer_changed
    if tokenizer_changed:
        with pytest.raises(CheckpointError, match="tokenizer"):
            settle_data_identity(IDENTITY, current, allow_change=True)
    else:
        assert settle_data_identity(IDENTITY, current, allow_change=True) == replace(current, data_segment=1)


def test_the_same_data_is_accepted() -> None:
    settle_data_identity(IDENTITY, IDENTITY)
    settle_data_identity(None, IDENTITY)
    settle_data_identity(IDENTITY, changed(corpora={"internet": "sha256:w", "python": "sha256:c"}))
    longer = changed(mixture_fingerprint="sha256:n", corpora={**IDENTITY.corpora, "math": "sha256:y"})
    settle_data_identity(IDENTITY, longer, extends=True)
    with pytest.raises(CheckpointError, match="window_len"):
        settle_data_identity(IDENTITY, changed(window_len=8), extends=True)


def test_a_data_segment_goes_on_until_the_data_change() -> None:
    second = changed(data_segment=1)
    for allow in (False, True):
        assert settle_data_identity(second, IDENTITY, allow_change=allow) == second
    third = settle_data_identity(second, changed(mixture_fingerprint="sha256:n"), allow_change=True)
    assert third.data_segment == 2
    seeds = {identity.segment_seed for identity in (IDENTITY, second, third)}
    assert IDENTITY.segment_seed == 42 and len(seeds) == 3 and all(0 <= seed < 2**63 for seed in seeds)
    assert DataIdentity.from_json(third.to_json()) == third


def test_another_model_is_refused_by_key(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    saved = {"model_type": "llama", "rope_theta": 1e4, "dtype": "float32", "fuse_norm": True, "gone": 1}
    assert read_config(tmp_path / "hf") is None
    (tmp_path / "hf" / "config.json").write_text(json.dumps(saved))
    read = read_config(tmp_path / "hf")
    compare_model_config(read, {**saved, "dtype": "bfloat16", "fuse_norm": False, "new_default": 3, "eos_token_id": 2})
    compare_model_config(None, saved)
    with pytest.raises(CheckpointError, match=r"got rope_theta 500000\.0; expected rope_theta 10000\.0"):
        compare_model_config(read, {**saved, "rope_theta": 5e5})
