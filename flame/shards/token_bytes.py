"""How many bytes of text each token id stands for: what bits per byte are counted with."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from flame.errors import TokenizerError
from flame.shards.manifest import TokenizerInfo
from flame.shards.tokenizer import text_can_give

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_TEXT_DECODERS = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}  # they write a token as text


def token_bytes(tokenizer: Tokenizer, info: TokenizerInfo) -> NDArray[np.int64]:
    """Return the UTF-8 bytes of text that each id stands for, `[vocab_size]`, from how the tokenizer spells its tokens.

    The lengths of a document's ids sum up to the bytes of its text. EOS, BOS and other special tokens stand for none.
    What a tokenizer does to a text first is in what is counted: a normal form (Qwen3: NFC), the space that it may put
    before a text (Mistral: always one), the space that it takes a "▁" for (Mistral). Raises `TokenizerError` where the
    bytes of an id cannot be told: spaces are lost, characters become one unknown token, EOS is a text's token too.
    Cost: about a second for 150,000 ids.
    """
    definition = json.loads(tokenizer.to_str())
    kinds = list(_parts(definition.get("decoder"), "decoders"))
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    lengths = np.zeros(max(vocabulary.values(), default=-1) + 1, dtype=np.int64)
    if any(part["type"] == "ByteLevel" for part in kinds):
        alphabet = frozenset(ByteLevel.alphabet())
        for token, token_id in vocabulary.items():
            lengths[token_id] = len(token) if alphabet.issuperset(token) else len(token.encode())
    elif {part["type"] for part in kinds} <= _TEXT_DECODERS:
        spaces = [part.get("replacement") or part["pattern"].get("String") for part in kinds if _writes_space(part)]
        for token, token_id in vocabulary.items():
            lengths[token_id] = 1 if _BYTE_TOKEN.fullmatch(token) else _text_length(token, spaces)
    else:
        _cannot("its decoder is none that writes every byte of a text", ", ".join(part["type"] for part in kinds))
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        if not added.special and (added.lstrip or added.rstrip):
            _cannot("an added token takes the spaces beside it, too", added.content)
        lengths[token_id] = 0 if added.special else len(added.content.encode())
    if text_can_give(tokenizer, info.eos_id):
        _cannot("EOS is a token of texts, too", tokenizer.id_to_token(info.eos_id))
    lengths[[token_id for token_id in (info.eos_id, info.bos_id) if token_id is not None]] = 0
    _check(tokenizer, lengths)
    return lengths


def _check(tokenizer: Tokenizer, lengths: NDArray[np.int64]) -> None:
    """Raise unless the ids of some hard texts stand for as many bytes as these have, or for a space before them more.

    The texts are in the normal form NFKC, so that a tokenizer that normalises does not change them.
    """
    for raw in _probes():
        text = unicodedata.normalize("NFKC", raw)
        counted = int(lengths[tokenizer.encode(text, add_special_tokens=False).ids].sum())
        if counted - len(text.encode()) not in (0, 1):
            _cannot(
                "a text's tokens do not stand for all its bytes", f"{counted} of {len(text.encode())}: {text[:40]!r}"
            )


def _probes() -> Iterator[str]:
    yield from (
        "The quick brown fox",
        "  two  spaces   three ",
        "UPPER lower İ Ⱥ",
        "a\tb\r\n\n  c\n",
        "1234567890 3.14",
    )
    yield from ("don't — “quotes” …", "résumé naïve façade", "日本語のテキスト 한국어 עברית", "🏳️ 🌈", "x <0x41>")
    yield "".join(map(chr, range(0x800)))  # every byte of one and two that UTF-8 has; then of three and four
    yield "".join(chr(code) for code in range(0x800, 0x110000, 0x3F1) if not 0xD800 <= code < 0xE000)


def _parts(part: Mapping[str, Any] | None, inner: str) -> Iterator[Mapping[str, Any]]:
    """Yield the parts that a part of a tokenizer is a sequence of, or itself."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for each in part[inner]:
            yield from _parts(each, inner)
    else:
        yield part


def _writes_space(part: Mapping[str, Any]) -> bool:
    return part["type"] == "Metaspace" or (part["type"] == "Replace" and part["content"] == " ")


def _text_length(token: str, spaces: list[str | None]) -> int:
    for mark in spaces:
        token = token if mark is None else token.replace(mark, " ")
    return len(token.encode())


def _cannot(why: str, got: object) -> NoReturn:
    raise TokenizerError(f"how many bytes each token stands for cannot be told: {why}", got=got)
