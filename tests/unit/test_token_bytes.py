"""Bytes of text by token id: the ids of any text stand for its bytes, or the tokenizer is refused with the reason."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from flame.errors import TokenizerError
from flame.shards.manifest import TokenizerInfo
from flame.shards.token_bytes import token_bytes
from tests.tokenizers import EOS

REAL = ("gpt2", "qwen3", "mistral_v1")


def info(eos_id: int, bos_id: int | None = None) -> TokenizerInfo:
    return TokenizerInfo(fingerprint="", vocab_size=1, bos_id=bos_id, eos_id=eos_id, bos="never", special_text="plain")


def load(path: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


def counted(tokenizer: Tokenizer, lengths: np.ndarray, text: str) -> int:
    return int(lengths[tokenizer.encode(text, add_special_tokens=False).ids].sum())


@pytest.fixture(scope="module")
def tiny(tiny_tokenizer: Path) -> tuple[Tokenizer, np.ndarray]:
    tokenizer = load(tiny_tokenizer)
    return tokenizer, token_bytes(tokenizer, info(tokenizer.token_to_id(EOS)))


@pytest.fixture(scope="module", params=REAL)
def real(request: pytest.FixtureRequest, shared_data: Path) -> tuple[str, Tokenizer, np.ndarray]:
    tokenizer = load(shared_data / "tokenizers" / request.param)
    eos = {"gpt2": "<|endoftext|>", "qwen3": "<|endoftext|>", "mistral_v1": "</s>"}[request.param]
    return request.param, tokenizer, token_bytes(tokenizer, info(tokenizer.token_to_id(eos)))


def as_tokenized(name: str, text: str) -> str:
    """A text as a tokenizer of that name reads it."""
    if name == "qwen3":
        return unicodedata.normalize("NFC", text)
    return " " + text.replace("▁", " ") if name == "mistral_v1" and text else text


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_the_ids_of_any_text_stand_for_its_bytes(tiny: tuple[Tokenizer, np.ndarray], text: str) -> None:
    assert counted(*tiny, text) == len(text.encode())


# what Python's Unicode calls NFC may be newer than what a tokenizer does: assigned long ago, so the same in both
@given(text=st.text(st.sampled_from("ab  \n\t01.'’é▁<|>/sendoftx日本語한🏳️🌈\u0301\u0000\ue000")))
def test_the_ids_of_any_text_stand_for_its_bytes_with_real_tokenizers(
    real: tuple[str, Tokenizer, np.ndarray], text: str
) -> None:
    name, *table = real
    assert counted(*table, text) == len(as_tokenized(name, text).encode())


@pytest.mark.shared_data
def test_the_ids_of_real_documents_stand_for_their_bytes(
    real: tuple[str, Tokenizer, np.ndarray], shared_data: Path
) -> None:
    name, *table = real
    rows = pq.ParquetFile(shared_data / "web_sample" / "000_00000.parquet").read_row_group(0, columns=["text"])
    for text in rows["text"].slice(0, 200).to_pylist():
        assert counted(*table, text) == len(as_tokenized(name, text).encode())


def test_special_tokens_stand_for_no_bytes_and_added_ones_for_their_own(tiny_tokenizer: Path) -> None:
    tokenizer = load(tiny_tokenizer)
    tokenizer.add_special_tokens(["<pad>"])
    tokenizer.add_tokens(["<思考>"])
    eos = tokenizer.token_to_id(EOS)
    lengths = token_bytes(tokenizer, info(eos))
    assert len(lengths) == tokenizer.get_vocab_size()
    assert lengths[eos] == lengths[tokenizer.token_to_id("<pad>")] == 0
    assert lengths[tokenizer.token_to_id("<思考>")] == len("<思考>".encode())
    assert counted(tokenizer, lengths, f"<pad> x {EOS} <思考>") == len(f"<pad> x {EOS} <思考>".encode())
    letter = tokenizer.token_to_id("a")
    assert lengths[letter] == 1 and token_bytes(tokenizer, info(eos, bos_id=letter + 300))[letter + 300] == 0


def space_marked(**options: bool) -> Tokenizer:
    """A BPE whose spaces are written ▁, with a token for each byte where `byte_fallback` is on."""
    fallback = options["byte_fallback"]
    tokens = ["<unk>", "</s>", "▁", "a", "é", "▁a", *(f"<0x{byte:02X}>" for byte in range(256) if fallback)]
    model = models.BPE(
        {token: number for number, token in enumerate(tokens)}, [("▁", "a")], unk_token="<unk>", byte_fallback=fallback
    )
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.encode_special_tokens = True
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    return tokenizer


def test_a_space_before_a_text_is_counted_with_its_token() -> None:
    tokenizer = space_marked(byte_fallback=True)
    lengths = token_bytes(tokenizer, info(1))
    assert [lengths[tokenizer.token_to_id(token)] for token in ("▁", "é", "▁a", "<0x0A>", "</s>")] == [1, 2, 2, 1, 0]
    assert counted(tokenizer, lengths, "a\né語") == 1 + len("a\né語".encode())


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "</s>": 1, "the": 2, "##re": 3}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.encode_special_tokens = True
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def test_tokenizers_whose_bytes_cannot_be_told_are_refused(tiny_tokenizer: Path) -> None:
    with pytest.raises(TokenizerError, match=r"decoder .*WordPiece"):
        token_bytes(word_level(), info(1))
    with pytest.raises(TokenizerError, match="do not stand for all its bytes"):
        token_bytes(space_marked(byte_fallback=False), info(1))  # what it has no token for is <unk>

    tokenizer = load(tiny_tokenizer)
    with pytest.raises(TokenizerError, match="EOS is a token of texts"):
        token_bytes(tokenizer, info(tokenizer.token_to_id("Ċ")))  # a line feed ends documents
    tokenizer.normalizer = normalizers.Strip()
    with pytest.raises(TokenizerError, match="do not stand for all its bytes"):
        token_bytes(tokenizer, info(tokenizer.token_to_id(EOS)))

    tokenizer = load(tiny_tokenizer)
    tokenizer.add_tokens([AddedToken("<cut>", lstrip=True)])
    with pytest.raises(TokenizerError, match="spaces beside it"):
        token_bytes(tokenizer, info(tokenizer.token_to_id(EOS)))
