"""Token files against the systems themselves: what megatron-core and datatrove wrote is read, and they read ours."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.preprocess.sources.datatrove import LAYOUT as DATATROVE
from flame.preprocess.sources.megatron import LAYOUT as MEGATRON
from tests.builds import build_here, documents_of, run_command, some_texts, write_parquet
from tests.indexed import leave, run
from tests.megatron_peer import Megatron
from tests.tokenizers import EOS, write_tiny_tokenizer

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron.core") is None,
    reason="megatron-core is not installed (pip install megatron-core)",
)
needs_datatrove = pytest.mark.skipif(
    importlib.util.find_spec("datatrove") is None, reason="datatrove is not installed (pip install datatrove)"
)
SEQ_LEN = 24


@pytest.fixture(scope="module")
def megatron() -> Iterator[Megatron]:
    with Megatron() as process:
        yield process


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, a tokenizer, and the corpus of both."""
    folder = tmp_path_factory.mktemp("peers")
    write_tiny_tokenizer(folder / "tok")
    write_parquet(folder / "raw/a.parquet", some_texts(300), rows_a_group=300)
    build_here(folder / "raw", folder / "web", folder / "tok", no_shuffle=True, shard_tokens=4000)
    return folder


def come(form: str, place: Path, output: Path, tok: Path) -> list[list[int]]:
    run(form, place, output, tok)
    return documents_of(output)


# ---- megatron-core

sequences = st.lists(st.integers(0, 2**15 - 1), min_size=1, max_size=20)


@needs_megatron
@given(
    documents=st.lists(st.lists(sequences, max_size=3), min_size=1, max_size=40),
    dtype=st.sampled_from(["uint16", "int32"]),
)
@settings(max_examples=30, deadline=None)
def test_what_megatron_writes_is_what_is_read(megatron: Megatron, documents: Any, dtype: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        megatron.write(Path(folder, "a"), documents, dtype)
        tokens, index = Path(folder, "a.bin"), Path(folder, "a.idx")
        MEGATRON.check(tokens, index)
        file = MEGATRON.open(tokens, index)
        assert file.num_documents == len(documents) and file.tokens.dtype == dtype
        starts = file.starts(0, len(documents))
        found = [file.tokens[a:b].tolist() for a, b in itertools.pairwise(starts)]
        assert found == [[token for sequence in document for token in sequence] for document in documents]


@needs_megatron
@pytest.mark.parametrize("dtype", ["auto", "int32"])
def test_megatron_reads_each_document_as_one_sequence(
    work: Path, tmp_path: Path, megatron: Megatron, dtype: str
) -> None:
    leave("megatron", work / "web", tmp_path / "out/web", dtype=dtype)
    expected = [[document] for document in documents_of(work / "web")]
    for mmap in (True, False):
        documents, found = megatron.read(tmp_path / "out/web", mmap=mmap)
        assert documents == expected
        assert found == {"auto": "uint16", "int32": "int32"}[dtype]


@needs_megatron
def test_megatron_files_without_eos_become_the_corpus_of_the_same_documents(
    work: Path, tmp_path: Path, megatron: Megatron
) -> None:
    documents = documents_of(work / "web")
    cut = [[ids[:3], ids[3:-1]] if len(ids) > 4 else [ids] for ids in documents]  # sentences; some have their EOS
    megatron.write(tmp_path / "in/web_text_document", cut, "uint16")
    assert come("megatron", tmp_path / "in", tmp_path / "back", work / "tok") == documents


# ---- datatrove


def tokenized(folder: Path, name: str, documents: list[list[int]], width: int, **options: Any) -> Path:
    """Write documents as datatrove's own tokenizer steps do; returns the token file."""
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    file = TokenizedFile(str(folder), name, token_size=width, save_final_metadata=True, **options)
    for document in documents:
        file.write(document, None)
    file.close()
    return folder / name


@needs_datatrove
@given(
    documents=st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=20), max_size=40),
    width=st.sampled_from([2, 4]),
    name=st.sampled_from([None, "gpt2"]),
)
@settings(max_examples=30, deadline=None)
def test_what_datatrove_writes_is_what_is_read(documents: list[list[int]], width: int, name: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tokens = tokenized(Path(folder), "a.ds", documents, width, tokenizer_name_or_path=name)
        index = DATATROVE.index_path(tokens)
        DATATROVE.check(tokens, index)
        file = DATATROVE.open(tokens, index)
        assert file.num_documents == len(documents)
        starts = file.starts(0, len(documents)) if documents else np.zeros(1, dtype=np.int64)
        assert [file.tokens[a:b].tolist() for a, b in itertools.pairwise(starts)] == documents


@needs_datatrove
@pytest.mark.parametrize("eos", [EOS, None])
def test_texts_that_datatrove_tokenized_shuffled_and_merged_come_as_a_build_has_them(
    work: Path, tmp_path: Path, eos: str | None
) -> None:
    from datatrove.data import Document
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.pipeline.tokens.merger import DocumentTokenizerMerger

    texts = some_texts(300)
    step = DocumentTokenizer(
        str(tmp_path / "parts"), str(work / "tok/tokenizer.json"), eos_token=eos, seed=1, max_tokens_per_file=2000
    )
    for rank in range(2):
        step.run([Document(text=text, id=str(n)) for n, text in enumerate(texts[rank::2])], rank=rank, world_size=2)
    DocumentTokenizerMerger(str(tmp_path / "parts"), str(tmp_path / "merged"), "web", seed=2, progress=False).run()
    assert len(list((tmp_path / "parts").glob("*.ds"))) > 2
    expected = sorted(documents_of(work / "web"))
    for folder in ("parts", "merged"):
        found = come("datatrove", tmp_path / folder, tmp_path / f"{folder}-corpus", work / "tok")
        assert found != expected and sorted(found) == expected


@needs_datatrove
@pytest.mark.parametrize("dtype", ["auto", "uint32"])
def test_datatrove_reads_the_same_tokens_and_positions(work: Path, tmp_path: Path, dtype: str) -> None:
    from datatrove.pipeline.tokens.merger import load_doc_ends
    from datatrove.utils.dataset import DatatroveFolderDataset

    leave("datatrove", work / "web", tmp_path / "out/web", dtype=dtype)
    documents = documents_of(work / "web")
    tokens = [token for document in documents for token in document]
    positions = [place for document in documents for place in range(len(document))]
    with open(tmp_path / "out/web.ds.index", "rb") as file:
        assert load_doc_ends(file).tolist() == np.cumsum([*map(len, documents)]).tolist()
    width = {"auto": 2, "uint32": 4}[dtype]
    data = DatatroveFolderDataset(str(tmp_path / "out"), SEQ_LEN, token_size=width, return_positions=True)
    assert len(data) == len(tokens) // (SEQ_LEN + 1)
    for number in range(len(data)):
        row = data[number]
        begin = number * (SEQ_LEN + 1)
        assert row["input_ids"].tolist() == tokens[begin : begin + SEQ_LEN + 1]
        # datatrove counts from the window's start where a document began before it
        first = next((i for i in range(1, SEQ_LEN + 1) if positions[begin + i] == 0), SEQ_LEN + 1)
        expected = [*range(first), *positions[begin + first : begin + SEQ_LEN + 1]]
        assert row["positions"].tolist() == expected


@needs_datatrove
def test_datatrove_merges_our_files_with_its_own(work: Path, tmp_path: Path) -> None:
    from datatrove.pipeline.tokens.merger import DocumentTokenizerMerger

    leave("datatrove", work / "web", tmp_path / "parts/00000_web")
    tokenized(tmp_path / "parts", "00001_own.ds", [[70, 0], [71, 72, 0]], 2)
    DocumentTokenizerMerger(
        str(tmp_path / "parts"), str(tmp_path / "merged"), "all", shuffle=False, progress=False
    ).run()
    found = come("datatrove", tmp_path / "merged", tmp_path / "back", work / "tok")
    assert found == [*documents_of(work / "web"), [70, 0], [71, 72, 0]]


# ---- the command


def test_the_command_goes_there_and_back(work: Path, tmp_path: Path) -> None:
    def command(*words: object) -> subprocess.CompletedProcess[str]:
        return run_command([sys.executable, "-m", "flame.cli.preprocess", *map(str, words)])

    there = ("convert", "--to", "megatron", "--corpus", work / "web", "--output", tmp_path / "out/web")
    result = command(*there)
    assert result.returncode == 0, result.stderr
    assert "300 documents" in result.stdout and "tokens of uint16" in result.stdout
    again = command(*there)
    assert again.returncode == 1 and "there already" in again.stderr and "Traceback" not in again.stderr
    tokenizer = ("--tokenizer", work / "tok", "--output", tmp_path / "back", "--num_workers", "2")
    result = command("convert", "--from", "megatron", "--input", tmp_path / "out/web", *tokenizer)
    assert result.returncode == 0, result.stderr
    assert sorted(documents_of(tmp_path / "back")) == sorted(documents_of(work / "web"))
    assert command("verify", tmp_path / "back").returncode == 0
    both = command("convert", "--from", "megatron", "--to", "datatrove", "--output", tmp_path / "x")
    assert both.returncode == 2 and "not both" in both.stderr
