"""`verify` of corpora whose checksums are right and whose content is not: ends, ids, and tokens that mark documents."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from flame.shards.fingerprint import tokenizer_fingerprint
from flame.shards.format import ends_path, tokens_path
from flame.shards.manifest import Manifest, SplitInfo, read_manifest, write_manifest
from flame.shards.writer import SplitWriter
from tests.corpora import make_corpus
from tests.damage import findings, path_of, poke, reseal, sealed_corpus


@pytest.fixture
def corpus(tmp_path: Path, tiny_tokenizer: Path) -> Path:
    return sealed_corpus(tmp_path / "corpus", tiny_tokenizer)


@pytest.mark.usefixtures("shard_chunks")
def test_a_document_without_eos_or_with_one_inside(corpus: Path, eos_id: int) -> None:
    path = path_of(corpus, tokens_path)
    ends = np.load(path_of(corpus, ends_path)).astype(int).tolist()
    for document in (3, 20):
        poke(path, ends[document] - 1, 9)
    poke(path, ends[7] - 2, eos_id)
    poke(path, ends[-1] - 3, eos_id)
    reseal(corpus)
    assert findings(corpus) == [
        f"train/{path.name}: 2 documents (the shard's number 3 first) without the EOS {eos_id} at the end "
        f"[bytes {128 + 4 * (ends[3] - 1)}:{128 + 4 * ends[3]}]",
        f"train/{path.name}: 2 documents (the shard's number 7 first) with the EOS {eos_id} before the end "
        f"[bytes {128 + 4 * (ends[7] - 2)}:{128 + 4 * (ends[7] - 1)}]",
    ]


@pytest.mark.usefixtures("shard_chunks")
def test_ends_that_do_not_rise(corpus: Path) -> None:
    path = path_of(corpus, ends_path)
    ends = np.load(path).tolist()
    poke(path, 8, ends[7], "<u8")
    poke(path, 12, 1, "<u8")
    poke(path, len(ends) - 1, ends[-1] + 1, "<u8")
    reseal(corpus)
    assert findings(corpus) == [
        f"train/{path.name}: 2 documents (the shard's number 8 first) end no later than the one before [bytes 192:200]",
        f"train/{path.name}: the last document ends at {ends[-1] + 1}, and the shard has {ends[-1]} tokens "
        f"[bytes {128 + 8 * (len(ends) - 1)}:{128 + 8 * len(ends)}]",
    ]
    poke(path, 0, 0, "<u8")
    reseal(corpus)
    assert "3 documents (the shard's number 0 first) end no later" in findings(corpus)[0]


def test_ids_beyond_the_vocabulary_and_a_wrong_largest_id(corpus: Path) -> None:
    path = path_of(corpus, tokens_path)
    poke(path, 5, 600)
    poke(path, 7, 601)
    reseal(corpus)
    assert findings(corpus) == [
        f"train/{path.name}: 2 tokens (the shard's number 5 first) that the tokenizer does not have, "
        "the largest token being 601 [bytes 148:152]"
    ]
    manifest = read_manifest(corpus)
    split = manifest.splits["train"]
    shards = tuple(dataclasses.replace(shard, max_token_id=400) for shard in split.shards)
    write_manifest(corpus, dataclasses.replace(manifest, splits={**manifest.splits, "train": SplitInfo.of(shards)}))
    assert f"train/{path.name}: its largest token is 601, and the manifest says 400 [bytes 156:160]" in findings(corpus)


def with_bos(folder: Path, tokenizer: Path, bos_id: int, eos_id: int, *, special_text: str = "plain") -> Path:
    """A corpus of 30 documents that begin with BOS; document 4 lacks it, and document 6 has EOS inside."""
    lists = [[bos_id] * (number != 4) + [9, 10, 11] + [eos_id] * (number == 6) + [12, eos_id] for number in range(30)]
    writer = SplitWriter(folder, "train", task=0, shard_tokens=100, docs_schema=None)
    for tokens in lists:
        writer.append(np.array(tokens, np.uint32), np.array([len(tokens)]), num_bytes=np.array([1]))
    splits = {"train": SplitInfo.of(tuple(writer.finish()))}
    shutil.copytree(tokenizer, folder / "tokenizer")
    policies = {"bos_id": bos_id, "eos_id": eos_id, "bos": "always", "special_text": special_text}
    content = (tokenizer / "tokenizer.json").read_bytes()
    info = dataclasses.replace(
        read_manifest(make_corpus(folder.parent / f"{folder.name}-x", [[1]])).tokenizer,
        fingerprint=tokenizer_fingerprint(content, **policies),
        **policies,
    )
    write_manifest(folder, Manifest(tokenizer=info, splits=splits))
    return folder


@pytest.mark.usefixtures("shard_chunks")
@pytest.mark.parametrize("same", [False, True], ids=["another", "the same"])
def test_bos_at_the_start_of_each_document(tmp_path: Path, tiny_tokenizer: Path, eos_id: int, same: bool) -> None:
    bos_id = eos_id if same else 20
    corpus = with_bos(tmp_path / "c", tiny_tokenizer, bos_id, eos_id)
    file = "train/shard-00000-000.tokens.npy"
    assert findings(corpus) == [
        f"{file}: 1 document (the shard's number 6) with the EOS {eos_id} before the end [bytes 284:288]",
        f"{file}: 1 document (the shard's number 4) without the BOS {bos_id} at the start [bytes 224:228]",
    ]


def test_eos_inside_is_right_where_the_text_can_say_it(tmp_path: Path, tiny_tokenizer: Path, eos_id: int) -> None:
    parsed = with_bos(tmp_path / "parsed", tiny_tokenizer, 20, eos_id, special_text="parsed")
    assert [line for line in findings(parsed) if "EOS" in line] == []
    newline = Tokenizer.from_file(str(tiny_tokenizer / "tokenizer.json")).encode("\n").ids
    assert len(newline) == 1
    ordinary = with_bos(tmp_path / "ordinary", tiny_tokenizer, 20, newline[0])
    assert [line for line in findings(ordinary) if "EOS" in line] == []
