"""The documents behind a sample: each part where it is, its text, and where the document came from."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from flame.cli.mix import main
from flame.sampling.mixture_file import write_mixture
from flame.sampling.sampler import Sampler
from flame.sampling.sources import mixture_of_corpora, open_mixture
from flame.sampling.trace import parts_of_window, trace_samples
from flame.shards.reader import Corpus
from tests.corpora import make_corpus
from tests.runs import PROJECT
from tests.tokenizers import EOS

TEXTS = [
    "the quick brown fox",
    "",
    "résumé naïve façade",
    "a corpus is a folder of shards, and a shard is a file of tokens",
    "日本語のテキスト",
    f"text that says {EOS} itself",
] * 6
WINDOW = 24


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer: Path) -> Tokenizer:
    loaded = Tokenizer.from_file(str(tiny_tokenizer / "tokenizer.json"))
    loaded.encode_special_tokens = True
    return loaded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path, tokenizer: Tokenizer) -> Path:
    """A mixture of two corpora, `kept` with provenance and `bare` without."""
    folder = tmp_path_factory.mktemp("trace")
    documents = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    eos_id = tokenizer.token_to_id(EOS)
    for name, lists in (("kept", documents), ("bare", documents[::-1])):
        make_corpus(
            folder / name,
            lists,
            eos_id=eos_id,
            shard_tokens=60,
            tokenizer=tiny_tokenizer,
            provenance=name == "kept",
        )
    write_mixture(folder / "mix.json", mixture_of_corpora([folder / "kept", folder / "bare"], [0.5, 0.5], 3))
    return folder


def test_parts_make_up_the_window_and_texts_are_those_of_their_tokens(folder: Path, tokenizer: Tokenizer) -> None:
    mixture = mixture_of_corpora([folder / "kept", folder / "bare"], [0.5, 0.5], 3)
    splits = open_mixture(mixture)
    sampler = Sampler(mixture, splits, WINDOW)
    eos_id = tokenizer.token_to_id(EOS)
    sources = set()
    for k in range(40):
        parts = list(trace_samples(mixture, WINDOW, [k]))
        located = sampler.locate(np.array([k]))
        source, offset = int(located.source[0]), int(located.offset[0])
        split = splits[source]
        sources.add(source)
        assert [part["start"] for part in parts] == [
            0,
            *(part["start"] + part["num_tokens"] for part in parts[:-1]),
        ]
        assert sum(part["num_tokens"] for part in parts) == WINDOW
        for part in parts:
            first, last = split.document_bounds(part["document"])
            begin = offset + part["start"]
            end = begin + part["num_tokens"]
            assert first <= begin < end <= last
            tokens = split.read(begin, end).tolist()
            assert part["text"] == tokenizer.decode(
                tokens[:-1] if tokens[-1] == eos_id else tokens, skip_special_tokens=False
            )
            if (begin, end) == (first, last):
                assert part["text"] == (TEXTS if source == 0 else TEXTS[::-1])[part["document"]]
    assert sources == {0, 1}


def test_bos_and_eos_are_left_out_where_they_are_the_documents_own(tmp_path: Path, tokenizer: Tokenizer) -> None:
    bos_id, eos_id = tokenizer.token_to_id("a"), tokenizer.token_to_id(EOS)
    ids = [bos_id, *tokenizer.encode("b c", add_special_tokens=False).ids, bos_id]
    corpus = Corpus.open(make_corpus(tmp_path / "corpus", [ids, ids], eos_id=eos_id))
    info = replace(corpus.manifest.tokenizer, bos="always", bos_id=bos_id)
    split = Corpus(corpus.path, replace(corpus.manifest, tokenizer=info)).split("train")
    last, length = len(ids), len(ids) + 1  # the second document begins at `length`

    def texts(start: int, stop: int) -> list[str]:
        return [part["text"] for part in parts_of_window(split, start, stop, tokenizer)]

    assert texts(0, 2 * length) == ["b ca", "b ca"]
    assert texts(last - 1, length + 1) == ["a", ""]  # its last token looks like BOS, the next one's first is BOS
    assert texts(last, length) == [""]


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_json_lines_name_where_a_document_came_from(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trace", str(folder / "mix.json"), "--window_len", str(WINDOW), "--json"]
    assert main([*words, "--sample", "7", "--sample", "2"]) == 0
    found = lines(capsys)
    assert [part["k"] for part in found] == sorted((part["k"] for part in found), reverse=True)
    assert {part["k"] for part in found} == {7, 2}
    for part in found:
        assert list(part)[:8] == ["k", "source", "document", "source_file", "row", "start", "num_tokens", "text"]
        if part["source"] == "kept":
            assert (part["source_file"], part["row"]) == ("train.jsonl", part["document"])
            assert "num_bytes" in part
        else:
            assert part["source_file"] is None and part["row"] is None
    assert main([*words, "--sample", "3", "--sample", "4", "--sample", "5", "--sample", "6"]) == 0
    assert {part["source"] for part in found + lines(capsys)} == {"kept", "bare"}


def test_stretches_of_samples_come_in_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trace", str(folder / "mix.json"), "--window_len", str(WINDOW), "--json"]
    assert main([*words, "--sample", "9:12", "--sample", "3", "--sample", ":2"]) == 0
    found = lines(capsys)
    assert list(dict.fromkeys(part["k"] for part in found)) == [9, 10, 11, 3, 0, 1]
    alone = []
    for k in (9, 10, 11, 3, 0, 1):
        assert main([*words, "--sample", str(k)]) == 0
        alone += lines(capsys)
    assert found == alone


def test_a_reader_who_leaves_ends_it_quietly(folder: Path) -> None:
    """A stretch that would take days is written as it is found, and ends when its reader has left."""
    words = ["trace", str(folder / "mix.json"), "--window_len", str(WINDOW), "--sample", f"0:{10**12}", "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "flame.cli.mix", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=PROJECT
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline())["k"] == 0
        process.stdout.close()
        assert process.wait(timeout=120) == 1
        assert process.stderr.read() == b""


def test_people_get_a_heading_and_the_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trace", str(folder / "mix.json"), "--window_len", str(WINDOW), "--sample", "11"]
    assert main([*words, "--json"]) == 0
    found = lines(capsys)
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.count("--- sample 11, ") == len(found)
    for part in found:
        assert f"{part['source']} document {part['document']}" in said and part["text"] in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs a mixture, --window_len and --sample"),
        (["{}"], "needs a mixture, --window_len and --sample"),
        (["{}", "--window_len", "8"], "needs a mixture, --window_len and --sample"),
        (["{}", "--window_len", "0", "--sample", "1"], "expected 1 or more"),
        (["{}", "--window_len", "8", "--sample", str(2**62)], "beyond the last sample"),
        (["{}", "--window_len", "8", "--sample", "4:"], "--sample has no end"),
        (["{}", "--window_len", "8", "--sample", "4:4"], "it holds no number"),
        (["{}", "--window_len", "8", "--sample", ""], "--sample cannot be ''"),
        (["{}", "--window_len", "8", "--sample", f"0:{2**62 + 1}"], "beyond the last sample"),
        (["{}", "--window_len", "8", "--sample", "-1"], "--sample cannot be '-1'"),
        (["no.json", "--window_len", "8", "--sample", "1"], "no such mixture manifest"),
    ],
)
def test_wrong_calls_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["trace", *(word.format(folder / "mix.json") for word in words)]) == 2
    assert message in capsys.readouterr().err
