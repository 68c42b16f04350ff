"""Beginning from weights that exist, and going on with other data: what is kept, what is new, what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

from flame.files import write_json
from flame.sampling.sampler import Sampler
from flame.sampling.sources import mixture_of_corpora, open_mixture
from flame.train.__main__ import main
from flame.train.checkpoint_files import read_complete
from flame.train.identity import segment_seed
from tests.corpora import make_corpus
from tests.ranks import train_in_ranks
from tests.runs import (
    VOCABULARY,
    arguments,
    losses_and_norms,
    random_documents,
    read_segments,
    refused,
    tensors_of,
)
from tests.tiny_states import differences

SHORT = {"training__steps": 4, "checkpoint__interval": 2, "training__batch_size": 1}


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps with its export, which other runs begin from."""
    run = tmp_path_factory.mktemp("runs") / "trained"
    assert main(arguments(folder, run, **SHORT, checkpoint__export_hf="true")) == 0
    return run


# ---- other data -----------------------------------------------------------------------------------------------------


def test_changed_data_begin_a_segment_of_their_own(
    folder: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    other: dict[str, Any] = {**SHORT, "training__data_probs": "0.2,0.8", "training__steps": 7}
    refused(capsys, arguments(folder, run, **other), 1, "the mixture", "allow_data_change")
    allowed = arguments(folder, run, **(other | {"training__steps": 6}), checkpoint__allow_data_change="true")
    assert main(allowed) == 0
    complete = read_complete(run / "checkpoint" / "step-6")
    assert complete.identity is not None and complete.identity.data_segment == 1
    assert complete.consumed_samples == 2, "counted from the start of the segment"

    # The same command goes on in the same segment, with the flag or without it.
    assert main(arguments(folder, run, **other)) == 0
    complete = read_complete(run / "checkpoint" / "step-7")
    assert complete.identity is not None and complete.identity.data_segment == 1
    assert complete.consumed_samples == 3
    lines = read_segments(run)
    seed = segment_seed(42, 1)
    assert [(line["step"], line["data_segment"], line["data_seed"]) for line in lines] == [
        (0, 0, 42),
        (4, 1, seed),
        (6, 1, seed),
    ]
    assert [line["consumed_samples"] for line in lines] == [0, 0, 2]

    # Back to the first data: a third segment, in an order of its own.
    first = arguments(folder, run, **(SHORT | {"training__steps": 8}), checkpoint__allow_data_change="true")
    assert main(first) == 0
    complete = read_complete(run / "checkpoint" / "step-8")
    assert complete.identity is not None and complete.identity.data_segment == 2
    assert segment_seed(42, 2) not in (42, seed)


def test_another_tokenizer_is_refused_even_then(
    folder: Path, trained: Path, tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Path(shutil.copytree(tiny_tokenizer, tmp_path / "tokenizer"))
    value = json.loads((tokenizer / "tokenizer.json").read_text())
    value["model"]["vocab"] = {token: VOCABULARY - 1 - n for token, n in value["model"]["vocab"].items()}
    write_json(tokenizer / "tokenizer.json", value)
    make_corpus(tmp_path / "other", random_documents(200, seed=5), vocab_size=VOCABULARY, tokenizer=tokenizer)
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    data = {"training__dataset": tmp_path / "other", "training__data_probs": 1}
    argv = arguments(folder, run, **(SHORT | data), checkpoint__allow_data_change="true")
    refused(capsys, argv, 1, "the tokenizer is not the run's")
    fresh = arguments(folder, tmp_path / "fresh", **(SHORT | data))
    for weights in (trained / "checkpoint" / "step-4", trained / "hf"):
        refused(capsys, [*fresh, f"--checkpoint.initial_load_path={weights}"], 1, "another tokenizer")


# ---- weights that exist ---------------------------------------------------------------------------------------------


def predecessor(folder: Path, trained: Path, *, nested: bool) -> Path:
    """Write a DCP folder as the predecessor's trainer and its converters did."""
    model = AutoModelForCausalLM.from_pretrained(trained / "hf", dtype=torch.float32)
    state = model.state_dict()
    steps = {"train_state": {"step": torch.tensor(7)}, "optimizer": {"lr": torch.tensor(0.1)}}
    dcp.save({"model": state, **steps} if nested else {**state, **steps}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("kind", ["checkpoint", "hugging_face", "predecessor", "bare_keys"])
def test_a_run_begins_from_weights(folder: Path, trained: Path, tmp_path: Path, kind: str) -> None:
    path = {
        "checkpoint": lambda: trained / "checkpoint" / "step-4",
        "hugging_face": lambda: trained / "hf",
        "predecessor": lambda: predecessor(tmp_path / "dcp", trained, nested=True),
        "bare_keys": lambda: predecessor(tmp_path / "dcp", trained, nested=False),
    }[kind]()
    run = tmp_path / "run"
    # With a learning rate of 0 the first checkpoint holds what the run began with.
    beginning: dict[str, Any] = {**SHORT, "checkpoint__initial_load_path": path, "training__seed": 7}
    assert main(arguments(folder, run, **(beginning | {"training__steps": 2}), optimizer__lr=0)) == 0
    begun_with = tensors_of(trained / "checkpoint" / "step-4", "model.")
    assert differences(tensors_of(run / "checkpoint" / "step-2", "model."), begun_with) == []
    assert read_complete(run / "checkpoint" / "step-2").consumed_samples == 2
    # On a resume the run's own checkpoint counts, not the weights that it began with.
    assert main(arguments(folder, run, **beginning)) == 0
    assert [step for step, _, _ in losses_and_norms(run)] == [1, 2, 3, 4]
    assert differences(tensors_of(run / "checkpoint" / "step-4", "model."), begun_with) != []


def test_a_whole_checkpoint_goes_on_elsewhere(folder: Path, trained: Path, tmp_path: Path) -> None:
    straight, branch = tmp_path / "straight", tmp_path / "branch"
    longer = SHORT | {"training__steps": 6, "lr_scheduler__decay_ratio": 0}
    assert main(arguments(folder, straight, **longer)) == 0
    step_4 = {"checkpoint__initial_load_path": straight / "checkpoint" / "step-4"}
    assert main(arguments(folder, branch, **longer, **step_4, checkpoint__initial_load_model_weights_only="false")) == 0
    assert losses_and_norms(branch) == losses_and_norms(straight)[4:]


def test_what_cannot_be_begun_from(
    folder: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def beginning(path: Path, **options: Any) -> list[str]:
        return arguments(folder, tmp_path / "run", **SHORT, checkpoint__initial_load_path=path, **options)

    refused(capsys, beginning(tmp_path / "absent"), 2, "initial_load_path", "absent")
    refused(capsys, beginning(trained), 1, "no weights")
    refused(capsys, beginning(folder / "web"), 1, "no weights", "manifest.json")
    whole = {"checkpoint__initial_load_model_weights_only": "false"}
    refused(capsys, beginning(trained / "hf", **whole), 1, "weights only")

    other = json.loads((folder / "llama.json").read_text()) | {"intermediate_size": 96}
    write_json(tmp_path / "wider.json", other)
    wider = {"model__config": tmp_path / "wider.json"}
    refused(capsys, beginning(trained / "hf", **wider), 1, "intermediate_size 96", "intermediate_size 64")
    weights = predecessor(tmp_path / "dcp", trained, nested=True)
    refused(capsys, beginning(weights, **wider), 1, "different shapes", "mlp")

    pickled = Path(shutil.copytree(trained / "hf", tmp_path / "pickled"))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    refused(capsys, beginning(pickled), 1, "are pickles", "pytorch_model.bin")
    damaged = Path(shutil.copytree(trained / "checkpoint" / "step-4", tmp_path / "damaged"))
    (damaged / ".metadata").unlink()
    refused(capsys, beginning(damaged), 1, ".metadata is absent")
    (part,) = weights.glob("*.distcp")
    os.truncate(part, part.stat().st_size // 2)
    refused(capsys, beginning(weights), 1, "cannot be read", str(weights))
    assert not list(tmp_path.glob("run/checkpoint/step-*"))


@pytest.mark.parametrize("content", ["", "{", "[]", "3"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_a_garbled_file_beside_the_weights_is_named(
    folder: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    source = Path(shutil.copytree(trained / "hf", tmp_path / "source"))
    (source / name).write_text(content)
    argv = arguments(folder, tmp_path / "run", **SHORT, checkpoint__initial_load_path=source)
    refused(capsys, argv, 1, "no JSON", str(source / name))


def test_foreign_numbers_are_taken_as_they_are_or_refused(
    folder: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = AutoModelForCausalLM.from_pretrained(trained / "hf", dtype=torch.float32).state_dict()
    whole = {name: tensor.to(torch.int8) for name, tensor in state.items()}
    dcp.save({"model": whole}, checkpoint_id=tmp_path / "int8", no_dist=True)
    run = tmp_path / "run"
    argv = arguments(folder, run, **SHORT, checkpoint__initial_load_path=tmp_path / "int8")
    refused(capsys, argv, 1, "number format", "int8")

    # A configuration that ties what the weights hold apart would drop one of the two.
    write_json(tmp_path / "tied.json", json.loads((folder / "llama.json").read_text()) | {"tie_word_embeddings": True})
    tied = {**SHORT, "training__steps": 2, "model__config": tmp_path / "tied.json"}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "apart", no_dist=True)
    argv = arguments(folder, run, **tied, checkpoint__initial_load_path=tmp_path / "apart")
    refused(capsys, argv, 1, "ties two tensors", "lm_head.weight")
    assert not list(run.glob("checkpoint/step-*"))
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    dcp.save({"model": state}, checkpoint_id=tmp_path / "twice", no_dist=True)
    assert main(arguments(folder, run, **tied, checkpoint__initial_load_path=tmp_path / "twice")) == 0


def test_generation_settings_stay_with_the_weights(folder: Path, trained: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(trained / "hf", tmp_path / "source"))
    settings = json.loads((source / "generation_config.json").read_text()) | {"temperature": 0.6, "do_sample": True}
    write_json(source / "generation_config.json", settings)
    begun = {"checkpoint__initial_load_path": source, "checkpoint__export_hf": "true", "training__steps": 2}
    assert main(arguments(folder, tmp_path / "run", **(SHORT | begun))) == 0
    exported = json.loads((tmp_path / "run" / "hf" / "generation_config.json").read_text())
    assert exported["temperature"] == 0.6 and exported["do_sample"] is True


def test_a_seed_made_by_one_rank_starts_two(folder: Path, trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    seeded = arguments(folder, run, **SHORT)
    assert main([*seeded, "--checkpoint.create_seed_checkpoint"]) == 0
    complete = read_complete(run / "checkpoint" / "step-0")
    assert not complete.has_optimizer and complete.identity is None
    train_in_ranks(arguments(folder, run, **(SHORT | {"training__steps": 2})), ranks=2)
    assert [step for step, _, _ in losses_and_norms(run)] == [1, 2]
    straight = losses_and_norms(trained)[0]
    # Two ranks see the first sample of one, and the next.
    assert losses_and_norms(run)[0][1] == pytest.approx(straight[1], rel=0.02)


def test_a_seed_is_made_before_the_run_begins(
    folder: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    refused(capsys, arguments(folder, run, **SHORT, checkpoint__create_seed_checkpoint="true"), 1, "has begun")


def test_segments_draw_in_different_orders(folder: Path) -> None:
    orders = []
    for number in range(3):
        mixture = mixture_of_corpora([folder / "web"], None, segment_seed(42, number))
        located = Sampler(mixture, open_mixture(mixture), 128).locate(np.arange(20))
        orders.append(tuple(located.window.tolist()))
    assert len(set(orders)) == 3
