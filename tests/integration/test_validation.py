"""Validation of real runs: sets by name, bits per byte as the texts have bytes, nothing held out is trained on."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from flame.sampling.sampler import num_windows
from flame.shards.reader import Corpus
from flame.train import step
from flame.train.__main__ import main
from tests.builds import build_here, some_texts, texts_of, write_jsonl
from tests.corpora import make_corpus
from tests.ranks import train_in_ranks
from tests.runs import LLAMA, arguments, make_training_folder, random_documents, read_metrics

STILL = {"optimizer__lr": 0, "training__steps": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = make_training_folder(tmp_path_factory.mktemp("training"), tiny_tokenizer)
    documents = random_documents(30, seed=9)
    make_corpus(folder / "books", documents, vocab_size=LLAMA["vocab_size"], tokenizer=tiny_tokenizer)
    return folder


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A corpus of texts with a held-out split, and a model."""
    folder = tmp_path_factory.mktemp("real")
    texts = write_jsonl(folder / "texts.jsonl", some_texts(300))
    build_here(texts, folder / "web", tiny_tokenizer, val_fraction=0.1)
    (folder / "llama.json").write_text(json.dumps(LLAMA))
    return folder


def scores(run: Path) -> dict[str, float]:
    return {name: value for name, value in read_metrics(run)[-1].items() if name.startswith("validation/")}


def test_several_sets_are_the_same_to_the_last_bit_at_any_world_size_and_batch(folder: Path, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {**STILL, "validation__dataset": f"held={folder / 'web'}@val,{folder / 'books'}"}
    assert main(arguments(folder, tmp_path / "one", **chosen)) == 0
    assert main(arguments(folder, tmp_path / "batch", **chosen, training__batch_size=5)) == 0
    train_in_ranks(arguments(folder, tmp_path / "two", **chosen), ranks=2)
    one = scores(tmp_path / "one")
    assert set(one) == {f"validation/{name}/{score}" for name in ("held", "books") for score in ("loss", "ppl", "bpb")}
    assert scores(tmp_path / "batch") == one and scores(tmp_path / "two") == one
    assert one["validation/held/ppl"] > 1 and one["validation/held/bpb"] != one["validation/books/bpb"]
    # rows of several windows, the last one not full: other sums in fp32, of the same labels and bytes
    assert num_windows(Corpus.open(folder / "web").split("val").num_tokens, 128) % 4
    assert main(arguments(folder, tmp_path / "rows", **chosen, training__batch_size=1, training__seq_len=512)) == 0
    assert scores(tmp_path / "rows") == pytest.approx(one, rel=1e-6)


@pytest.mark.parametrize("varlen", [True, False])
def test_bits_per_byte_are_those_of_the_texts(real: Path, tmp_path: Path, varlen: bool) -> None:
    """The whole set is one window: all its bytes are labelled but those of first tokens, which nothing comes before."""
    split = Corpus.open(real / "web").split("val")
    length = split.num_tokens - 1
    options: dict[str, Any] = {
        "training__varlen": str(varlen).lower(),
        "training__data_probs": "1.0",
        "training__dataset": real / "web",
        "validation__dataset": f"{real / 'web'}@val",
    }
    options |= dict.fromkeys(["training__seq_len", "training__window_len", "training__context_len"], length)
    assert main(arguments(real, tmp_path / "run", **STILL, **options, training__batch_size=1)) == 0

    tokenizer = Tokenizer.from_file(str(real / "web/tokenizer/tokenizer.json"))
    texts = texts_of(real / "web", "val")
    first_tokens = [tokenizer.id_to_token(tokenizer.encode(text).ids[0]) for text in texts]
    unlabelled = first_tokens if varlen else first_tokens[:1]
    num_bytes = sum(len(text.encode()) for text in texts) - sum(map(len, unlabelled))
    num_labels = split.num_tokens - len(unlabelled)
    found = scores(tmp_path / "run")
    bits = found["validation/web/loss"] * num_labels / math.log(2)
    assert len(texts) > 5 and split.num_bytes == num_bytes + sum(map(len, unlabelled))
    assert found["validation/web/bpb"] == pytest.approx(bits / num_bytes, rel=1e-12)


def test_a_tokenizer_that_counts_no_bytes_gives_null_and_the_reason(
    tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line_feed = Tokenizer.from_file(str(tiny_tokenizer / "tokenizer.json")).token_to_id("Ċ")
    for name, seed in (("web", 1), ("code", 2)):
        make_corpus(
            tmp_path / name,
            random_documents(60, seed=seed),
            val=random_documents(20, seed=seed + 5),
            vocab_size=LLAMA["vocab_size"],
            eos_id=line_feed,
            tokenizer=tiny_tokenizer,
        )
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    argv = arguments(tmp_path, tmp_path / "run", **STILL, validation__dataset=tmp_path / "web")
    assert main(argv) == 0
    found = scores(tmp_path / "run")
    assert found["validation/web/bpb"] is None and found["validation/web/loss"] > 0
    told = capsys.readouterr().err
    assert "bpb is null" in told and "EOS is a token of texts, too" in told


def test_a_set_shorter_than_a_window_is_refused_by_name(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = arguments(folder, tmp_path / "run", validation__dataset=f"tiny={folder / 'web'}@val")
    longer = [f"--training.{name}=2048" for name in ("seq_len", "window_len")]
    assert main([*argv, *longer]) == 1
    told = capsys.readouterr().err
    assert "validation set 'tiny' is too small for one window" in told and "training.window_len" in told


def test_no_held_out_document_is_trained_on_over_epochs_and_resumes(
    tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each document says its own name over and over; what the model is given says which ones it has seen."""
    texts = write_jsonl(tmp_path / "texts.jsonl", [f" m{number:04d}" * 20 for number in range(150)])
    build_here(texts, tmp_path / "web", tiny_tokenizer, val_fraction=0.2)
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    tokenizer = Tokenizer.from_file(str(tmp_path / "web/tokenizer/tokenizer.json"))
    seen: dict[bool, set[str]] = {True: set(), False: set()}
    forward = step.CausalLMLoss.forward

    def noted(module: Any, input_ids: Any, *others: Any) -> Any:
        windows = tokenizer.decode_batch(input_ids.reshape(-1, 128).tolist())  # names that a window cuts are left out
        seen[module.training].update(name for window in windows for name in re.findall(r"m\d{4}", window))
        return forward(module, input_ids, *others)

    monkeypatch.setattr(step.CausalLMLoss, "forward", noted)
    options: dict[str, Any] = {
        "training__dataset": tmp_path / "web",
        "training__data_probs": "1.0",
        "training__batch_size": 4,
        "training__seq_len": 256,
        "validation__dataset": tmp_path / "web",
        "validation__freq": 12,
    }
    steps_an_epoch = Corpus.open(tmp_path / "web").split("train").num_tokens // (4 * 256)
    assert 8 < steps_an_epoch < 24
    for steps in (12, 30, 50):  # three starts, more than two epochs
        assert main(arguments(tmp_path, tmp_path / "run", **options, training__steps=steps)) == 0
    assert read_metrics(tmp_path / "run")[-1]["step"] == 50 > 2 * steps_an_epoch
    held_out = {text.split()[0] for text in texts_of(tmp_path / "web", "val")}
    trained_on = {text.split()[0] for text in texts_of(tmp_path / "web")}
    assert len(held_out) > 10 and seen[True] == trained_on
    assert seen[True].isdisjoint(held_out) and seen[False] == held_out
