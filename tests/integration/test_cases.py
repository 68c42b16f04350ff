"""Whole ways through the program for kinds of input that broke others: each by the command that a user would type."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from flame.cli.mix import main as flame_mix
from flame.cli.preprocess import main as flame_preprocess
from flame.errors import CorpusError, FlameError
from flame.preprocess.convert import convert
from flame.preprocess.convert_config import ConvertOptions
from flame.preprocess.engines import ENGINES
from flame.preprocess.executors import EXECUTORS
from flame.sampling.packing import pack
from flame.shards.manifest import read_manifest
from flame.shards.reader import Corpus
from flame.train import loop
from flame.train import step as training_step
from flame.train.__main__ import main as flame_train
from flame.train.loader import to_device
from flame.train.model import build_model
from flame.train.model_config import load_model_config
from flame.train.parallelize import reshard
from tests.builds import (
    InlineExecutor,
    build_here,
    command,
    documents_of,
    files_of,
    run_build,
    run_command,
    same_corpus,
    some_texts,
    texts_of,
    write_jsonl,
    write_parquet,
)
from tests.corpora import link_shards, make_corpus
from tests.processes import read_only
from tests.runs import FLAME_TRAIN, LLAMA, VOCABULARY, arguments, random_documents, rank_environment, read_metrics
from tests.tokenizers import write_tiny_tokenizer

# ---- text and tokenizers


def test_text_like_a_special_token_comes_back_from_every_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = write_tiny_tokenizer(tmp_path / "tok", eos="</s>", bos="<s>")
    texts = ["a </s> b", "</s>", "ends </s>", "<s> begins", "</s></s>", "< /s>"]
    write_jsonl(tmp_path / "a.jsonl", texts)
    build_here(tmp_path / "a.jsonl", tmp_path / "out", tokenizer, engine="hf", no_shuffle=True)
    eos = read_manifest(tmp_path / "out").tokenizer.eos_id
    expected = documents_of(tmp_path / "out")
    assert [ids.count(eos) for ids in expected] == [1] * len(texts)
    capsys.readouterr()
    numbers = [word for number in range(len(texts)) for word in ("--document", str(number))]
    assert flame_preprocess(["decode", str(tmp_path / "out"), *numbers, "--json"]) == 0
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == texts
    # Whichever engine a build takes, the ids are those, and so is what is decoded.
    content = (tokenizer / "tokenizer.json").read_bytes()
    installed = [engine for engine in ENGINES.values() if engine.installed]
    for engine in installed:
        ids, lengths = engine.load(content, False)(pa.array(texts, pa.large_string()))
        assert [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] == [ids[:-1] for ids in expected]
    assert len(installed) > 1


def test_ids_around_65536_are_exact_in_four_bytes(tmp_path: Path) -> None:
    vocabulary = {f"w{number}": number for number in range(65_530)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens([f"extra{number}" for number in range(19)])
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = ["w1", "w65529", *(f"extra{number}" for number in range(19))]
    write_jsonl(tmp_path / "a.jsonl", [" ".join(words), "w65529", "extra18"])
    manifest = build_here(
        tmp_path / "a.jsonl", tmp_path / "out", tmp_path / "tokenizer.json", eos_token="</s>", no_shuffle=True
    )
    assert documents_of(tmp_path / "out") == [[1, *range(65_529, 65_550)], [65_529, 65_549], [65_548, 65_549]]
    (shard,) = (tmp_path / "out/train").glob("*.tokens.npy")
    assert shard.stat().st_size == 128 + 4 * manifest.splits["train"].num_tokens
    assert np.load(shard, mmap_mode="r").max() == manifest.splits["train"].max_token_id == 65_549


def test_random_documents_are_whole_and_end_in_eos(tmp_path: Path, tiny_tokenizer: Path) -> None:
    rng = np.random.default_rng(4)
    points = [0x61, 0x20, 0x0A, 0xE9, 0x301, 0x65E5, 0x1F600, 0x200D, 0x5D0, 0xFFFD]
    texts = ["a", "é", *("".join(map(chr, rng.choice(points, rng.integers(1, 40)))) for _ in range(300))]
    texts = [text for text in texts if text.strip()]
    write_jsonl(tmp_path / "a.jsonl", texts)
    build_here(tmp_path / "a.jsonl", tmp_path / "out", tiny_tokenizer, no_shuffle=True, shard_tokens=500)
    split = Corpus.open(tmp_path / "out").split("train")
    tokens = split.read(0, split.num_tokens)
    ends = split.ends_between(0, split.num_tokens)
    on_disk = sum((path.stat().st_size - 128) // 4 for path in (tmp_path / "out/train").glob("*.tokens.npy"))
    assert len(ends) == len(texts) and int(ends[-1]) == split.num_tokens == on_disk
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer / "tokenizer.json"))
    slices = np.split(tokens, ends[:-1])
    assert [ids[-1] for ids in slices] == [0] * len(texts) and min(map(len, slices)) == 2
    assert [tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) for ids in slices] == texts


@settings(max_examples=25)
@given(
    values=st.lists(
        st.none() | st.text(max_size=12) | st.sampled_from(["", " ", "\u3000", "same", "same"]), max_size=40
    ),
    ending=st.sampled_from(["jsonl", "parquet"]),
    options=st.fixed_dictionaries(
        {
            "no_shuffle": st.booleans(),
            "shard_tokens": st.integers(1, 300),
            "shuffle_block_tokens": st.integers(1, 300),
            "batch_size": st.integers(1, 9),
            "val_fraction": st.sampled_from([0.0, 0.3]),
        }
    ),
)
def test_any_texts_are_each_written_once_or_counted(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_tokenizer: Path,
    values: list[str | None],
    ending: str,
    options: dict[str, Any],
) -> None:
    folder = tmp_path_factory.mktemp("any")
    (write_jsonl if ending == "jsonl" else write_parquet)(folder / f"a.{ending}", values)
    kept = [value for value in values if value and not value.isspace()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)  # no power fails here
        if not kept:
            with pytest.raises(FlameError, match="no document"):
                build_here(folder / f"a.{ending}", folder / "out", tiny_tokenizer, **options)
            return
        manifest = build_here(folder / f"a.{ending}", folder / "out", tiny_tokenizer, **options)
    found = [texts_of(folder / "out", split) for split in manifest.splits]
    copies = manifest.rejects.get("val_duplicate", 0)
    assert found[0] == [text for text in kept if text in {*found[0]}] or not options["no_shuffle"]
    assert {*itertools.chain(*found)} == {*kept} and sum(map(len, found)) + copies == len(kept)
    assert sum(manifest.rejects.values()) + sum(map(len, found)) == len(values)


def test_texts_without_a_space_among_thousands_of_others_are_whole_and_so_are_their_neighbours(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    texts = some_texts(5000, longest=12)
    for place, long in ((10, "a" * 2_000_000), (2500, "-" * 500_000), (4990, "日本語" * 50_000)):
        texts.insert(place, long)
    write_parquet(tmp_path / "a.parquet", texts, rows_a_group=1000)
    result = run_build(tmp_path / "a.parquet", tmp_path / "out", tiny_tokenizer, engine="hf", no_shuffle="true")
    assert result.returncode == 0, result.stderr
    assert texts_of(tmp_path / "out") == texts


# ---- inputs


SPELLINGS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda data: data,
    "bom": lambda data: b"\xef\xbb\xbf" + data,
    "crlf": lambda data: data.replace(b"\n", b"\r\n"),
    "both": lambda data: b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n"),
    "no last newline": lambda data: data.removesuffix(b"\n"),
    "blank lines": lambda data: b"\n" + data.replace(b"\n", b"\n \r\n\n"),
}


def test_however_a_jsonl_is_spelled_its_shards_are_the_same_bytes(tmp_path: Path, tiny_tokenizer: Path) -> None:
    texts = ["kept\r\nas it is\r", "\ufeffa mark inside", *some_texts(200)]
    data = write_jsonl(tmp_path / "plain.jsonl", texts).read_bytes()
    shards = []
    for name, spelled in SPELLINGS.items():
        (tmp_path / f"{name}.jsonl").write_bytes(spelled(data))
        manifest = build_here(tmp_path / f"{name}.jsonl", tmp_path / name, tiny_tokenizer, val_fraction=0.1)
        assert manifest.rejects == {}
        shards.append(files_of(tmp_path / name))
    assert all(found == shards[0] for found in shards)
    assert sorted(texts_of(tmp_path / "plain") + texts_of(tmp_path / "plain", "val")) == sorted(texts)


def test_thousands_of_files_of_one_document_need_few_handles(tmp_path: Path, tiny_tokenizer: Path) -> None:
    texts = some_texts(1500, longest=8)
    for number, text in enumerate(texts):
        write_jsonl(tmp_path / f"raw/{number}.jsonl", [text])
    words = command(tmp_path / "raw", tmp_path / "out", tiny_tokenizer, engine="hf", no_shuffle="true")
    result = run_command(["bash", "-c", 'ulimit -n 48 && exec "$@"', "build", *words])
    assert result.returncode == 0, result.stderr
    assert texts_of(tmp_path / "out") == texts


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXECUTORS, "local", InlineExecutor)  # type: ignore[arg-type]


NUM_TEXTS = 2500  # more than one block of zstandard


def damaged_inputs(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """Files with their damage, where it is told to be, and the reason that it is counted by."""
    texts = some_texts(NUM_TEXTS, longest=150)
    whole = write_jsonl(folder / "whole.jsonl", texts).read_bytes()
    lines = whole.splitlines(keepends=True)
    packed = {".gz": gzip.compress(whole), ".zst": zstandard.compress(whole)}
    for suffix, data in packed.items():
        path = folder / f"cut.jsonl{suffix}"
        path.write_bytes(data[: len(data) * 6 // 10])
        yield path, f"cut.jsonl{suffix}, line ", "truncated"
    for name, line, reason in (
        ("two", lines[0].rstrip() + b" " + lines[1], "malformed_json"),
        ("half", lines[0][:20] + b"\n", "malformed_json"),
        ("bytes", b'{"text": "\xff\xfe"}\n', "invalid_utf8"),
    ):
        path = folder / f"{name}.jsonl"
        path.write_bytes(b"".join([*lines[:99], line, *lines[99:]]))
        yield path, f"{name}.jsonl, line 100", reason


@pytest.mark.usefixtures("in_this_process")
def test_damaged_input_is_told_or_counted_and_never_passed_over(
    tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (path, where, reason) in enumerate(damaged_inputs(tmp_path)):
        words = ["build", f"--dataset={path}", f"--tokenizer={tiny_tokenizer}", "--engine=hf", "--num_workers=1"]
        failed, skipped = tmp_path / f"failed-{number}", tmp_path / f"skipped-{number}"
        capsys.readouterr()
        assert flame_preprocess([*words, f"--output={failed}"]) == 1
        told = capsys.readouterr()
        assert where in told.err and "--on_error skip" in told.err and "Traceback" not in told.err
        assert not (failed / "manifest.json").exists()
        assert flame_preprocess([*words, f"--output={skipped}", "--on_error=skip"]) == 0
        assert f"1 {reason}" in capsys.readouterr().out
        manifest = read_manifest(skipped)
        assert manifest.rejects == {reason: 1}
        assert 0 < manifest.splits["train"].num_documents <= NUM_TEXTS
        assert (manifest.splits["train"].num_documents < NUM_TEXTS) == (reason == "truncated")


def test_the_order_that_files_were_made_in_and_the_number_of_workers_change_no_byte(
    tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"part-{number}.jsonl" for number in range(1, 12)] + ["sub/part-2.jsonl"]
    for folder, order, workers in (("one", names, 1), ("two", names[::-1], 8)):
        for name in order:
            write_jsonl(tmp_path / folder / "raw" / name, some_texts(150, seed=names.index(name)))
        monkeypatch.chdir(tmp_path / folder)
        result = run_build("raw", Path("out"), tiny_tokenizer, num_workers=workers, engine="hf", shard_tokens=3000)
        assert result.returncode == 0, result.stderr
        assert "12 files" in result.stderr
    assert same_corpus(tmp_path / "one/out", tmp_path / "two/out")


def test_two_ranks_train_on_thousands_of_shards_that_nothing_can_be_written_beside(
    folder: Path, tmp_path: Path, tiny_tokenizer: Path
) -> None:
    """With as few descriptors as 256 a process."""
    corpora = tmp_path / "corpora"
    link_shards(corpora / "web", 2000, vocab_size=VOCABULARY, tokenizer=tiny_tokenizer)
    options: dict[str, Any] = {
        "training__dataset": corpora / "web",
        "training__data_probs": "1.0",
        "training__steps": 3,
    }
    argv = arguments(folder, tmp_path / "run", **options, training__batch_size=8, checkpoint__export_hf="true")
    with read_only(corpora):
        limited = ["bash", "-c", 'ulimit -n 256 && exec "$@"', "train", sys.executable, "-m", *FLAME_TRAIN, *argv]
        result = subprocess.run(limited, env=rank_environment(2, None), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3]


def test_a_conversion_into_a_folder_of_another_is_refused(tmp_path: Path, tiny_tokenizer: Path) -> None:
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"input_ids": [[70 + number, 71] for number in range(60)]})
    for name, shards in (("two", 2), ("one", 1)):
        data.save_to_disk(str(tmp_path / name), num_shards=shards)

    def run(source: str, tokenizer: Path) -> int:
        chosen = {"from_": "flame-v0", "input": tmp_path / source, "output": tmp_path / "out", "num_workers": 1}
        return convert(ConvertOptions(tokenizer=tokenizer, **chosen))  # type: ignore[arg-type]

    assert run("two", tiny_tokenizer) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    other = write_tiny_tokenizer(tmp_path / "other", vocab_size=300)
    with pytest.raises(CorpusError, match="tokenizer was"):
        run("two", other)
    with pytest.raises(CorpusError, match="no longer an input"):
        run("one", tiny_tokenizer)
    (tmp_path / "two/data-00001-of-00002.arrow").touch()
    with pytest.raises(CorpusError, match="mtime_ns was"):
        run("two", tiny_tokenizer)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


# ---- training


SHORT: dict[str, Any] = {"training__batch_size": 1, "checkpoint__interval": 2, "training__steps": 4}


def test_a_source_that_is_added_or_weighed_anew_is_refused_between_stop_and_resume(
    folder: Path, tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_corpus(tmp_path / "new", random_documents(99, seed=7), vocab_size=VOCABULARY, tokenizer=tiny_tokenizer)
    sources = {"web": folder / "web", "code": folder / "code", "new": tmp_path / "new"}

    def mixture(name: str, **weights: float) -> dict[str, Any]:
        words = [f"--source={source}={sources[source]}:{weight}" for source, weight in weights.items()]
        assert flame_mix(["create", *words, f"--output={tmp_path / name}"]) == 0
        return {"training__dataset": tmp_path / name, "training__data_probs": "null"}

    def started(chosen: dict[str, Any], **more: Any) -> int:
        words = arguments(folder, tmp_path / "run", **(SHORT | chosen | more))
        return flame_train([word for word in words if word != "--training.data_probs=null"])

    assert started(mixture("mix.json", web=0.7, code=0.3)) == 0
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    for name, weights in (
        ("added.json", {"web": 0.7, "code": 0.2, "new": 0.1}),
        ("weighed.json", {"web": 0.6, "code": 0.4}),
        ("dropped.json", {"web": 1.0}),
        ("turned.json", {"code": 0.3, "web": 0.7}),
    ):
        capsys.readouterr()
        assert started(mixture(name, **weights), training__steps=6) == 1, name
        told = capsys.readouterr().err
        assert "cannot be resumed" in told and "is not the run's" in told and "Traceback" not in told
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    assert started(mixture("again.json", web=7, code=3), training__steps=6) == 0, (
        "the same proportions are the same data"
    )


def test_documents_of_one_token_leave_no_label_and_such_steps_are_skipped_and_counted(
    folder: Path, tmp_path: Path, tiny_tokenizer: Path
) -> None:
    make_corpus(tmp_path / "ends", [[]] * 2000, vocab_size=VOCABULARY, tokenizer=tiny_tokenizer)
    data = {"training__dataset": tmp_path / "ends", "training__data_probs": 1}
    assert flame_train(arguments(folder, tmp_path / "run", **(SHORT | data))) == 0
    lines = read_metrics(tmp_path / "run")
    assert [line["optimizer/skipped_step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["loss_metrics/global_avg_loss"] is None for line in lines)


def test_a_forward_in_training_is_the_exported_models_on_each_sequence_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    finish = loop.finish

    def look(prepared: Any, *rest: Any) -> None:
        batch = pack(prepared.sampler, prepared.data.splits, np.arange(4), prepared.geometry)
        micro = to_device(batch, torch.device("cpu"))
        names = ("input_ids", "labels", "positions", "cu_seqlens", "max_seqlen")
        with torch.no_grad():
            loss, *_ = prepared.module(**{name: getattr(micro, name) for name in names})
        reshard(prepared.module)
        seen.update(batch=batch, loss=float(loss))
        finish(prepared, *rest)

    monkeypatch.setattr(loop, "finish", look)
    rows = {"training__batch_size": 2, "training__seq_len": 256, "training__context_len": 48}
    assert flame_train(arguments(folder, tmp_path / "run", **(SHORT | rows), checkpoint__export_hf="true")) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run/hf", dtype=torch.float32)
    batch, total = seen["batch"], 0.0
    cuts = batch.cu_seqlens.tolist()
    assert {128, 256, 384, 512} < set(cuts) and max(np.diff(cuts)) == 48
    for start, stop in itertools.pairwise(cuts):
        assert batch.positions[0, start:stop].tolist() == list(range(stop - start))
        ids = torch.from_numpy(batch.input_ids[0, start:stop]).long()
        labels = torch.from_numpy(batch.labels[0, start:stop]).long()
        with torch.no_grad():
            logits = exported(ids[None]).logits[0]
        if (labels != -100).any():
            total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
    assert seen["loss"] == pytest.approx(total, rel=1e-5)


# ---- schedules


def closed_form(step: int, *, steps: int, warmup: int, decay: float | None, lr: float, lowest: float = 0.1) -> float:
    """The learning rate of a 1-based step, written anew: up, flat, by a line to `lowest` one step after the end."""
    if step <= warmup:
        return lr * step / warmup
    length = max(steps - warmup, 0) if decay is None else min(round(steps * decay), max(steps - warmup, 0))
    into = step - (steps + 1 - length)
    return lr if into <= 0 else lr * (lowest + (1 - lowest) * (1 - into / length))


def scheduled(warmup: int, decay: float | None, steps: int, lr: float, weight_decay: float) -> dict[str, Any]:
    return {
        "lr_scheduler__warmup_steps": warmup,
        "lr_scheduler__decay_type": "linear",
        "lr_scheduler__lr_min": 0.1,
        **({} if decay is None else {"lr_scheduler__decay_ratio": decay}),
        "training__steps": steps,
        "optimizer__lr": lr,
        "optimizer__weight_decay": weight_decay,
    }


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param([(0, 0, None, 5, 1e-3, 0.1)], id="no warm-up"),
        pytest.param([(0, 1, None, 1, 1e-3, 0.1)], id="one step"),
        pytest.param([(0, 5, None, 5, 1e-3, 0.1)], id="warm-up to the end"),
        pytest.param([(0, 9, None, 4, 1e-3, 0.1), (3, 9, None, 12, 1e-3, 0.1)], id="extended in a warm-up"),
        pytest.param([(0, 1, 0.0, 4, 1e-3, 0.1), (4, 1, 0.0, 6, 1e-3, 0.1)], id="extended, without decay"),
        pytest.param(
            [(first, 2, 0.4, 7, 1e-3, 0.1) for first in (0, 1, 3, 6)],
            id="resumed in each phase",
        ),
        pytest.param(
            [(0, 2, 0.5, 8, 1e-3, 0.1), (1, 2, 0.5, 8, 2e-3, 0.0), (6, 4, 0.25, 12, 5e-4, 0.3)],
            id="rate and weight decay changed",
        ),
    ],
)
def test_the_learning_rate_is_the_closed_form_at_every_step_whatever_was_changed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: list[tuple[Any, ...]]
) -> None:
    used: list[tuple[float, dict[str, float]]] = []
    apply = training_step.apply_hyperparameters

    def noted(optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        apply(optimizer, *rest)
        groups = optimizer.param_groups
        used.append((groups[0]["lr"], {group["name"]: group["weight_decay"] for group in groups}))

    monkeypatch.setattr(training_step, "apply_hyperparameters", noted)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # no power cut comes here
    run, expected, steps_used = tmp_path / "run", [], []
    for number, (first, warmup, decay, steps, lr, weight_decay) in enumerate(starts):
        chosen = scheduled(warmup, decay, steps, lr, weight_decay) | {"checkpoint__interval": 1}
        chosen["checkpoint__keep_latest_k"] = 99
        if number:
            chosen["checkpoint__load_step"] = first
        assert flame_train(arguments(folder, run, **(SHORT | chosen))) == 0
        part = range(first + 1, steps + 1)
        expected = expected[:first] + [
            closed_form(step, steps=steps, warmup=warmup, decay=decay, lr=lr) for step in part
        ]
        steps_used += [(expected[step - 1], {"decayed": weight_decay, "not_decayed": 0.0}) for step in part]
    assert [line["optimizer/lr"] for line in read_metrics(run)] == pytest.approx(expected)
    assert [lr for lr, _ in used] == pytest.approx([lr for lr, _ in steps_used])
    assert [decays for _, decays in used] == [decays for _, decays in steps_used]


def test_where_padding_is_eos_a_real_eos_is_learned_as_any_token(tmp_path: Path) -> None:
    source = tmp_path / "llama.json"
    source.write_text(json.dumps({**LLAMA, "pad_token_id": 0, "eos_token_id": 0}))
    config = load_model_config(str(source), vocab_size=VOCABULARY, eos_id=0)
    module = build_model(config, seed=1, rank=0, device=torch.device("cpu"), dtype=torch.float32, varlen=True)
    ids, labels = [5, 6, 0, 7, 0, 8], [6, 0, -100, 0, -100, -100]  # two documents, and the start of a third
    batch = [torch.tensor(part, dtype=torch.int32) for part in ([ids], [labels], [[0, 1, 2, 0, 1, 0]], [0, 3, 5, 6])]
    loss, num_labels, *_ = module(*batch, 3)
    alone = [module.model(input_ids=torch.tensor([part])).logits[0] for part in ([5, 6], [7])]
    told = torch.nn.functional.cross_entropy(torch.cat(alone), torch.tensor([6, 0, 0]), reduction="sum")
    assert int(num_labels) == 3
    torch.testing.assert_close(loss, told)
    loss.backward()
    assert module.model.lm_head.weight.grad[0].norm() > 0 and module.model.config.pad_token_id is None
