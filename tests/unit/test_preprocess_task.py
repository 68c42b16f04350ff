"""From documents to tokens: the ends of a document, blocks, held-out texts, the reference engine."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from flame.errors import TokenizerError
from flame.preprocess.blocks import BlockShuffler, Tokenized, interleave
from flame.preprocess.engines import ENGINES
from flame.preprocess.holdout import HASH_TYPE, first_copies, held_out, text_hashes
from flame.preprocess.rejects import MAX_SAMPLES, Rejects
from flame.preprocess.texts import make_documents, tokenizer_batches
from flame.preprocess.tokenize import add_ends
from flame.shards.writer import SplitWriter
from tests.tokenizers import EOS

IDS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), max_size=8)


def flat(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([i for ids in lists for i in ids], np.uint32), np.array([len(ids) for ids in lists], np.int64)


def unflat(tokens: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])] if len(lengths) else []


@given(IDS, st.sampled_from([None, 4]), st.sampled_from([4, 5]))
def test_every_document_ends_with_eos_and_none_is_doubled(lists: list[list[int]], bos: int | None, eos: int) -> None:
    tokens, lengths = add_ends(*flat(lists), bos_id=bos, eos_id=eos)
    expected = []
    for ids in lists:
        begun = ids if bos is None or ids[0] == bos else [bos, *ids]
        expected.append(begun if ids[-1] == eos else [*begun, eos])
    assert unflat(tokens, lengths) == expected
    assert tokens.dtype == np.uint32


@given(st.lists(st.tuples(st.integers(1, 90), st.booleans()), max_size=20), st.randoms(use_true_random=False))
def test_take_gathers_long_and_short_documents(shape: list[tuple[int, bool]], random: object) -> None:
    lists = [[i * 100 + j for j in range(length)] for i, (length, _) in enumerate(shape)]
    tokens, lengths = flat(lists)
    documents = Tokenized(
        tokens=tokens, lengths=lengths, num_bytes=lengths * 3, docs=pa.table({"i": range(len(lists))})
    )
    chosen = [i for i, (_, keep) in enumerate(shape) if keep]
    random.shuffle(chosen)  # type: ignore[attr-defined]
    taken = documents.take(np.array(chosen, np.int64))
    assert unflat(taken.tokens, taken.lengths) == [lists[i] for i in chosen]
    assert taken.docs.column("i").to_pylist() == chosen
    assert taken.num_bytes.tolist() == [3 * len(lists[i]) for i in chosen]


def shuffled(
    folder: Path, lists: list[list[int]], batches: list[int], *, block_tokens: int, key: str
) -> list[list[int]]:
    writer = SplitWriter(folder, "train", task=0, shard_tokens=2**28, docs_schema=None)
    shuffler = BlockShuffler(writer, block_tokens=block_tokens, key=key)
    tokens, lengths = flat(lists)
    whole = Tokenized(tokens=tokens, lengths=lengths, num_bytes=lengths, docs=None)
    edges = [0, *sorted(batches), len(lists)]
    for start, stop in itertools.pairwise(edges):
        shuffler.append(whole.slice(start, stop))
    shuffler.flush()
    (shard,) = writer.finish()
    found = np.load(folder / "train" / f"{shard.name}.tokens.npy")
    ends = np.load(folder / "train" / f"{shard.name}.ends.npy").astype(np.int64)
    return unflat(found, np.diff(ends, prepend=0))


def test_blocks_are_shuffled_alike_however_documents_are_batched(tmp_path: Path) -> None:
    lists = [[i] * (1 + i % 7) for i in range(200)]
    results = [
        shuffled(tmp_path / str(i), lists, batches, block_tokens=100, key="k")
        for i, batches in enumerate([[], [1], list(range(1, 200)), [50, 51, 180]])
    ]
    assert all(result == results[0] for result in results)
    assert results[0] != lists
    assert shuffled(tmp_path / "other", lists, [], block_tokens=100, key="other") != results[0]
    done = 0
    for block in blocks(lists, 100):
        assert sorted(results[0][done : done + len(block)]) == sorted(block), "documents stay in their block"
        done += len(block)
    assert done == 200


def blocks(lists: list[list[int]], block_tokens: int) -> list[list[list[int]]]:
    """Blocks that end at the first document end at or past `block_tokens`."""
    found: list[list[list[int]]] = [[]]
    for ids in lists:
        if sum(map(len, found[-1])) >= block_tokens:
            found.append([])
        found[-1].append(ids)
    return found


def test_interleave_takes_turns_and_hands_places_on() -> None:
    pieces = [["a0", "a1", "a2"], ["b0"], ["c0", "c1"], []]
    assert list(interleave(map(iter, pieces), 2)) == ["a0", "b0", "a1", "a2", "c0", "c1"]
    assert list(interleave([iter("ab"), iter("c")], 1)) == ["a", "b", "c"]


# ---- held out


def test_held_out_is_the_texts_own_hash() -> None:
    values = [f"text {i}" for i in range(2000)] + ["é" * 50]
    texts = pa.array(["before", *values], pa.large_string()).slice(1)
    expected = [xxhash.xxh3_64_intdigest(value.encode()) / 2**64 < 0.1 for value in values]
    assert held_out(texts, 0.1).tolist() == expected
    assert 150 < sum(expected) < 250
    assert not held_out(texts, 0.0).any()
    assert held_out(texts, 1 - 2**-53).all()


def test_first_copies_are_kept() -> None:
    texts = pa.array(["a", "b", "a", "c", "b", "a"], pa.large_string())
    hashes = pa.chunked_array([text_hashes(texts.slice(0, 2)), text_hashes(texts.slice(2))], HASH_TYPE)
    assert first_copies(hashes).tolist() == [True, True, False, True, False, False]
    assert first_copies(pa.chunked_array([], HASH_TYPE)).tolist() == []


# ---- batches and rejects


def test_batches_are_bounded_in_documents_and_bytes() -> None:
    texts = pa.array(["x" * size for size in (10, 10, 50, 5, 5, 5, 5, 100, 1)], pa.large_string())
    rejects = Rejects(on_error="fail")
    documents = make_documents(texts, np.arange(9, dtype=np.uint64), None, rejects, path="a", progress_bytes=0)
    assert list(tokenizer_batches(documents, 3, 25)) == [(0, 2), (2, 3), (3, 6), (6, 7), (7, 8), (8, 9)]
    assert list(tokenizer_batches(documents, 100, 10**6)) == [(0, 9)]
    assert list(tokenizer_batches(documents, 1, 1)) == [(i, i + 1) for i in range(9)]


def test_samples_are_capped_and_counts_are_not(tmp_path: Path) -> None:
    rejects = Rejects(on_error="skip")
    for row in range(MAX_SAMPLES + 5):
        rejects.malformed("bad", "bad", path="a", row=row, place=lambda: "here", sample=b"\xff" + b"x" * 5000)
    assert rejects.counts == {"bad": MAX_SAMPLES + 5}
    rejects.write_samples(tmp_path / "rejects" / "a.jsonl")
    samples = [json.loads(line) for line in (tmp_path / "rejects" / "a.jsonl").read_text().splitlines()]
    assert len(samples) == MAX_SAMPLES
    assert samples[0]["sample"].startswith("\\xffxxx")
    assert len(samples[0]["sample"]) < 250


# ---- the reference engine


def encode(content: bytes, texts: list[str], *, parse_special: bool = False) -> list[list[int]]:
    ids, lengths = ENGINES["hf"].load(content, parse_special)(pa.array(texts, pa.large_string()))
    assert ids.dtype == np.uint32
    return unflat(ids, lengths)


def test_text_like_a_special_token_is_plain_unless_asked(tiny_tokenizer: Path) -> None:
    content = (tiny_tokenizer / "tokenizer.json").read_bytes()
    reference = Tokenizer.from_str(content.decode())
    text = f"a {EOS} b"
    assert reference.token_to_id(EOS) == 0
    (plain,), (parsed,) = encode(content, [text]), encode(content, [text], parse_special=True)
    assert 0 not in plain
    assert 0 in parsed
    assert reference.decode(plain, skip_special_tokens=False) == text
    assert encode(content, []) == []


def test_truncation_padding_and_template_of_the_file_are_put_aside(tiny_tokenizer: Path) -> None:
    content = (tiny_tokenizer / "tokenizer.json").read_bytes()
    changed = Tokenizer.from_str(content.decode())
    changed.enable_truncation(3)
    changed.enable_padding(length=8)
    texts = ["the quick brown fox jumps over the lazy dog", "a"]
    assert len(changed.encode(texts[0]).ids) < 9
    assert encode(changed.to_str().encode(), texts) == encode(content, texts)


def test_a_file_that_tokenizers_refuses_is_told() -> None:
    with pytest.raises(TokenizerError, match="cannot load"):
        ENGINES["hf"].load(b'{"version": "1.0"}', False)
