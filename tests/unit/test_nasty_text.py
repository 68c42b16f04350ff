"""Text that breaks tokenizers, through every engine and tokenizer: the ids are the reference's, and a build ends."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from flame.errors import TokenizerError
from flame.preprocess import engine_check
from flame.preprocess.engine_check import Encoder
from flame.preprocess.engine_screen import make_screen, unequal
from flame.preprocess.engines import ENGINES, Encode
from tests.builds import build_here, documents_of, texts_of, write_jsonl
from tests.tokenizers import EOS

FAST = ("gigatoken", "fastokens")
REAL = ("gpt2", "qwen3", "mistral_v1")
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

EMOJI = [
    "👩‍👩‍👧‍👦",  # a family, joined by U+200D
    "👩🏽‍🚀🧑🏿‍🤝‍🧑🏻",  # joined, with tones of skin
    "👍🏻👍🏼👍🏽👍🏾👍🏿",
    "🇩🇪🇯🇵🇺🇸🇦",  # flags, and half a flag
    "🏴󠁧󠁢󠁥󠁮󠁧󠁿",  # a flag spelled with tags
    "1️⃣#️⃣*️⃣",  # keycaps
    "❤️❤︎☺️☺",  # as pictures and as text
    "😶‍🌫️🏳️‍🌈🏳️‍⚧️",
    "‍👩‍",  # joiners that join nothing
    "a👩‍b 👨‍  🏽",
]
MARKS = [
    "e\u0301 é e\u0301\u0323 e\u0323\u0301 ẹ́",
    "Z̸̢̛̤̪̓͑a̷̡͚̅l̶̼͝g̴̘̈́o̵͓͊",
    "a" + "\u0300\u0316" * 500,
    "\u0301 starts with a mark\u0301\u0301",
    "किं क्षि র‍্য ক্‍ ਪੰਜਾਬੀ தமிழ் ไทยกำ့ བོད་",
    "ᄒ" + "ᅡ" + "ᆫ" + " 한 각ᆨ ᄀᄀ ᅡᅡ",
    "שָׁלוֹם مُحَمَّد الْعَرَبِيَّة",
    "Å Å Å ﬁ ſ ẛ̣ Ω Ω K K",
    "İi̇ Iı ǅ ß ẞ ŉ",
]
SPACES = [
    "a\u00a0b\u2003c\u2009d\u202fe\u3000f\u1680g",
    "a\u200bb\u200cc\u2060d\ufeffe\u00adf",
    "a\x00b\x01c\x7fd\x85e\x0bf\x0cg\x1ch",
    "a\r\nb\n\rc\r\r\nd\u2028e\u2029f",
    "\u202eright to left\u202c \u2066isolated\u2069",
    "x" + " " * 4097 + "y" + "\n" * 4097 + "z" + "\t \t" * 1001,
    "\ufffd\ufffe\uffff\U0001ffff\U0010ffff",
]


def of_every_block() -> Iterator[str]:
    """Yield a text of each 16 code points in a row, of which Unicode's blocks are made: all that hold a letter or sign.

    Of the long rows of ideographs, syllables and private use one in 64.
    """
    for first in range(0, 0x110000, 16):
        letters = [chr(code) for code in range(first, first + 16) if not 0xD800 <= code < 0xE000]
        alike = {unicodedata.category(letter) for letter in letters} in ({"Lo"}, {"Co"}) and first > 0x3000
        assigned = any(unicodedata.category(letter) != "Cn" for letter in letters)
        if assigned and (not alike or first % 1024 == 0) and "".join(letters).strip():
            yield "".join(letters)
            yield "a " + " ".join(letters) + "b" + "b".join(letters) + " 1" + letters[-1]


def long_texts(size: int) -> list[str]:
    """Texts that have no end: no space, only one, only digits, only marks."""
    letters = np.random.default_rng(5).integers(0x61, 0x7B, size, dtype=np.uint8).tobytes().decode()
    return [
        letters,
        "a" * (size // 5),
        "-" * (size // 25),
        "日本" * (size // 30),
        "." + " " * (size // 5) + ".",
        "\n" * (size // 5) + "x",
        "1234567890" * (size // 50),
        "7" * (size // 25),
        "e" + "\u0301" * (size // 250),
    ]


def nasty_texts() -> list[str]:
    return [*of_every_block(), *EMOJI, *MARKS, *SPACES]


# ---- small tokenizers of every make


def small_tokenizer(make: str) -> bytes:
    """A tokenizer.json as GPT-2's, Qwen's or Mistral's is made, of some hundred tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=make == "spaces marked", unk_token=None))
    special = [EOS]
    if make == "spaces marked":
        special += ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    elif make == "composed":
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(pattern=Regex(QWEN), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    alphabet = [] if make == "spaces marked" else sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(["aaaa --- 1234 the naïve 日本語 fox e\u0301 \n\n  jumps over" * 9], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    return json.dumps(content).encode()


MAKES = ("bytes", "composed", "spaces marked")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return nasty_texts()


def the_ids_are_the_references(content: bytes, engine: str, texts: Sequence[str]) -> None:
    """What the engine takes otherwise holds a code point that its screen sends to the reference."""
    if not ENGINES[engine].installed:
        pytest.skip(f"{engine} is not installed")
    reference = ENGINES["hf"].load(content, False)
    try:
        fast = ENGINES[engine].load(content, False)
    except TokenizerError as error:
        pytest.skip(f"{engine} does not take this tokenizer: {error.what}")
    array = pa.array(texts, pa.large_string())
    differing = [texts[number] for number in different(fast, reference, array)]
    if differing:  # which is few: all code points of these, as a build does it with all there are
        screen = make_screen(fast, reference, sorted({ord(letter) for text in differing for letter in text}))
        assert screen.refusal is None
        encoder = Encoder(name=engine, reference=reference, fast=fast, screen=screen)
        assert different(encoder.encode, reference, array) == []


def different(one: Encode, other: Encode, array: pa.LargeStringArray) -> list[int]:
    return unequal(one(array), other(array)).tolist()


@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("make", MAKES)
def test_nasty_text_has_the_ids_of_the_reference(make: str, engine: str, texts: list[str]) -> None:
    the_ids_are_the_references(small_tokenizer(make), engine, texts)


@pytest.mark.shared_data
@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("name", REAL)
def test_nasty_text_has_the_ids_of_the_reference_with_real_tokenizers(
    shared_data: Path, name: str, engine: str, texts: list[str]
) -> None:
    """And texts without an end, a twentieth as long as below: the whole 5 MB take each of them 5 to 20 s."""
    content = (shared_data / "tokenizers" / name / "tokenizer.json").read_bytes()
    the_ids_are_the_references(content, engine, [*texts, *long_texts(250_000)])


@pytest.mark.parametrize("make", MAKES)
def test_texts_without_an_end_have_the_ids_of_the_reference(make: str) -> None:
    """5 MB without a space, 1 MB of spaces, of line breaks, of digits; a tenth of that for the slower makes."""
    content = small_tokenizer(make)
    array = pa.array(long_texts(5_000_000 if make == "bytes" else 500_000), pa.large_string())
    expected = ENGINES["hf"].load(content, False)(array)
    for engine in FAST:
        if ENGINES[engine].installed:
            assert unequal(ENGINES[engine].load(content, False)(array), expected).tolist() == [], engine


# Half a pair of surrogates can come in an escape of JSON only: what is written, and what becomes of it.
LONE_SURROGATES = {
    r"a\ud800b": "a\ufffdb",
    r"\udc00": "\ufffd",
    r"\ud83d\ud83d\ude00": "\ufffd😀",
    r"\ud83d\ude00 whole": "😀 whole",
    r"end \udbff": "end \ufffd",
    r"\ude00\ud83d x": "\ufffd\ufffd x",
}


@pytest.mark.parametrize("engine", ["hf", *FAST])
def test_a_build_of_nasty_text_keeps_every_document(
    tmp_path: Path, texts: list[str], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ENGINES[engine].installed:
        pytest.skip(f"{engine} is not installed")
    (tmp_path / "tokenizer.json").write_bytes(small_tokenizer("bytes"))
    some = [*texts[::80], *EMOJI, *MARKS, *SPACES, *long_texts(50_000)]
    codes = sorted({ord(letter) for text in some for letter in text})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(engine_check, "make_screen", partial(make_screen, codes=codes))  # all there are take a minute
    raw = write_jsonl(tmp_path / "raw.jsonl", some)
    with open(raw, "a") as file:
        file.writelines(f'{{"text": "{text}"}}\n' for text in LONE_SURROGATES)
    manifest = build_here(
        raw, tmp_path / "out", tmp_path / "tokenizer.json", engine=engine, eos_token=EOS, no_shuffle=True
    )
    some += LONE_SURROGATES.values()
    assert texts_of(tmp_path / "out") == some
    assert manifest.inputs["repaired"] == {"lone_surrogates": 5}
    assert manifest.rejects == {}
    reference = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    reference.encode_special_tokens = True
    expected = reference.encode_batch(some, add_special_tokens=False)
    eos = manifest.tokenizer.eos_id
    assert documents_of(tmp_path / "out") == [[*encoding.ids, eos] for encoding in expected]
