"""A fast engine, trusted as far as it is checked against the reference.

1. Every code point was put to both once (`engine_screen.py`): a document that holds one of those that differ goes to
   the reference.
2. A battery of strings on which tokenizers have erred is put to both at each start.
3. The first documents of a build, and one in a thousand after them, are compared while it runs (`task.py` redoes the
   task of one that differs).

An engine that fails 1 or 2 for a tokenizer is not used for it. So no byte of a corpus depends on the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from flame.errors import UsageError
from flame.preprocess.engine_screen import (
    SCREEN_KIND,
    Screen,
    make_screen,
    read_screen,
    screen_key,
    unequal,
    write_screen,
)
from flame.preprocess.engines import ENGINES, REFERENCE, Encode, Ids, join, split_model
from flame.preprocess.user_cache import user_cache

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

FIRST_COMPARED = 64
COMPARED_EVERY = 1000
# A document beyond this is not compared: the reference needs 120 times its memory.
MOST_COMPARED_BYTES = 2**20
# Below this much input, the reference is done sooner than a screen is made.
SMALL_INPUT_BYTES = 2**25


class EngineDifferenceError(Exception):
    """A fast engine failed on a batch of documents: which of them differs, None where it gave no ids for the batch."""

    def __init__(self, what: str, document: int | None) -> None:
        self.what = what
        self.document = document
        super().__init__(what)


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """What encodes the documents of a build: the engine `name`, checked, or the reference alone (`fast` None)."""

    name: str
    reference: Encode
    fast: Encode | None = None
    screen: Screen | None = None
    screen_key: str | None = None

    @property
    def batch_bytes(self) -> int:
        return ENGINES[self.name].batch_bytes

    def without_fast(self) -> Encoder:
        return Encoder(name=REFERENCE, reference=self.reference)

    def encode(self, texts: pa.LargeStringArray) -> Ids:
        """Return the ids of the texts; those with a screened code point are the reference's. Texts are not blank.

        Raises `EngineDifferenceError` where the fast engine fails.
        """
        if self.fast is None:
            return self.reference(texts)
        assert self.screen is not None
        screened = self.screen.find(texts)
        if not screened.any():
            return _encode_fast(self.fast, texts)
        if screened.all():
            return self.reference(texts)
        import pyarrow as pa

        ids, lengths = _encode_fast(self.fast, texts.filter(pa.array(~screened)))
        others, other_lengths = self.reference(texts.filter(pa.array(screened)))
        return _merge((ids, lengths), (others, other_lengths), screened)

    def compare(self, texts: pa.LargeStringArray, found: Ids, chosen: NDArray[np.int64]) -> None:
        """Raise `EngineDifferenceError` where the ids `found` of a chosen text are not the reference's."""
        if self.fast is None or len(chosen) == 0:
            return
        import pyarrow as pa

        from flame.preprocess.texts import text_lengths

        chosen = chosen[text_lengths(texts)[chosen] <= MOST_COMPARED_BYTES]
        ids, lengths = found
        ends = np.cumsum(lengths)
        parts = [ids[ends[index] - lengths[index] : ends[index]] for index in chosen.tolist()]
        expected = self.reference(texts.take(pa.array(chosen)))
        ours = (np.concatenate([*parts, np.zeros(0, np.uint32)]), lengths[chosen])
        for index in unequal(ours, expected).tolist():
            raise EngineDifferenceError("its ids differ from the reference's", int(chosen[index]))


def _encode_fast(fast: Encode, texts: pa.LargeStringArray) -> Ids:
    try:
        ids, lengths = fast(texts)
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        # What a Rust library panics with is no Exception.
        raise EngineDifferenceError(f"it failed: {type(error).__name__}: {error}", None) from error
    if len(lengths) != len(texts) or lengths.sum() != len(ids):
        raise EngineDifferenceError(f"it gave ids for {len(lengths)} documents of {len(texts)}", None)
    return ids, lengths


def _merge(one: Ids, other: Ids, of_other: NDArray[np.bool_]) -> Ids:
    """Return the documents of both in one order: those of `other` where `of_other` says so."""
    lengths = np.empty(len(of_other), dtype=np.int64)
    lengths[~of_other], lengths[of_other] = one[1], other[1]
    cuts = np.flatnonzero(np.diff(of_other)) + 1
    taken = [0, 0]
    parts = []
    for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(of_other)], strict=True):
        side = int(of_other[start])
        size = int(lengths[start:stop].sum())
        parts.append(((one, other)[side][0][taken[side] : taken[side] + size], lengths[start:stop]))
        taken[side] += size
    return join(parts)


def compared(task: int, first: int, count: int) -> NDArray[np.int64]:
    """Return which of a task's documents `first` … `first + count - 1` are compared, counted from `first`.

    It depends on the task and the document's place in it, so that it is the same with any workers and batches.
    """
    places = np.arange(first, first + count, dtype=np.uint64)
    mixed = places + np.uint64((task * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor)
    chosen = (mixed ^ mixed >> np.uint64(31)) % np.uint64(COMPARED_EVERY) == 0
    if task == 0:
        chosen |= places < FIRST_COMPARED
    return np.flatnonzero(chosen)


# ---- the battery

_PIECES = (
    *("a", "the", " the", "  the", "THE", "don't", "I'LL", "it’s", "we'Ve", "'", "''s", "ſ", "İ", "ß", "e\u0301", "é"),
    *(
        "0",
        "1234567",
        "3.14",
        "1,000",
        "٣",
        "²",
        "½",
        "Ⅷ",
        "-",
        "--",
        "---",
        "=" * 40,
        "!?",
        "...",
        "…",
        "<",
        ">",
        "</",
    ),
    *("\n", "\n\n", "\r\n", "\r\n\r\n", "\r", "\t", "\t\t", " \n", "\n ", "   \n\n  ", "\x0b", "\x0c", "\x85", "\x1c"),
    *("\xa0", "\u2003", "\u2028", "\u3000", "\u200b", "\u200d", "\ufeff", "\xad", "\x00", "\x7f", "\ufffd", "\ufffe"),
    *("日本語", "中文字", "한국어", "\u1112\u1161\u11ab", "עִבְרִית", "العربية", "हिन्दी", "ไทย", "Ελλάς", "Привет"),
    *(
        "😀",
        "👩‍👩‍👧",
        "🇺🇸",
        "👍🏽",
        "❤️",
        "\U0001d11e",
        "\U00020000",
        "\ue000",
        "\U0010ffff",
        "▁",
        "▁▁",
        "Ġ",
        "Ċ",
        "ﬁ",
        "Å",
    ),
    *(
        "http://a.b/c?d=e&f#g",
        "user@host.com",
        "C:\\dir",
        "def f(x):\n    return x\n",
        "{'a': [1, 2]}",
        "<0x0A>",
        "##a",
    ),
)


def battery(tokenizer_json: bytes) -> list[str]:
    """Return the strings: pieces alone, repeated, and each beside others; the tokenizer's added tokens among them."""
    tokens = [token["content"] for token in split_model(tokenizer_json)[0].get("added_tokens") or []][:64]
    texts = [*_PIECES, *(piece * 2 for piece in _PIECES), *(piece * 300 for piece in _PIECES[::3])]
    for number, piece in enumerate(_PIECES):
        for step in (1, 7, 29):
            other = _PIECES[(number + step) % len(_PIECES)]
            texts += [piece + other, f"{piece} {other}", f"a{piece}{other}\n{piece}"]
    for token in tokens:
        texts += [
            token,
            f"a{token}b",
            f" {token} ",
            token * 2,
            token[:-1],
            f"{token}\n",
            f"x {token[1:]}",
            token.upper(),
        ]
    return [text for text in texts if text and not text.isspace()]


def battery_difference(encoder: Encoder, texts: Sequence[str]) -> str | None:
    """Return in words the first string that the encoder takes otherwise than the reference, or None."""
    import pyarrow as pa

    array = pa.array(texts, pa.large_string())
    try:
        differing = unequal(encoder.encode(array), encoder.reference(array)) if len(texts) else ()
    except EngineDifferenceError as error:
        return error.what
    return next((f"it differs from the reference on {texts[index][:60]!a}" for index in differing), None)


# ---- from a name to an encoder


def _directly(function: Callable[[], T]) -> T:
    return function()


def load_encoder(
    asked: str,
    tokenizer_json: bytes,
    parse_special: bool,
    *,
    say: Callable[[str], None],
    screens: Sequence[Path] = (),
    small_input: bool = False,
    apart: Callable[[Callable[[], Screen | str | None]], Screen | str | None] = _directly,
) -> Encoder:
    """Load the engine `asked`, or the first of `ENGINES` that serves (auto); the reference where none does.

    `screens` are files, besides the user's cache, where an earlier build may have kept one. `apart` runs a check in a
    process of its own, so that this one stays without the threads and the memory that encoding takes. `say` hears why
    an engine is passed over, and that a screen is made.
    """
    reference = ENGINES[REFERENCE].load(tokenizer_json, parse_special)
    for name in [name for name in ENGINES if name != REFERENCE and asked in (name, "auto")]:
        if not ENGINES[name].installed:
            continue
        key = screen_key(name, tokenizer_json, parse_special)
        screen = read_screen([user_cache(SCREEN_KIND, key), *screens], key)
        if screen is None and small_input and asked == "auto":
            say(f"{name} is not used: so little text is tokenized sooner than that is checked (--engine {name} does)")
            break
        try:
            fast = ENGINES[name].load(tokenizer_json, parse_special)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            say(f"{name} is not used: it cannot serve this tokenizer ({' '.join(str(error).split())[:200]})")
            continue
        encoder = _check(name, fast, reference, tokenizer_json, screen, key, say, apart)
        if encoder is not None:
            return encoder
    return Encoder(name=REFERENCE, reference=reference)


def _check(
    name: str,
    fast: Encode,
    reference: Encode,
    tokenizer_json: bytes,
    screen: Screen | None,
    key: str,
    say: Callable[[str], None],
    apart: Callable[[Callable[[], Screen | str | None]], Screen | str | None],
) -> Encoder | None:
    """Return the engine behind its screen; None, having said so, where it fails a check."""
    if screen is None:
        say(
            f"checking {name} {ENGINES[name].version} against the reference on every code point: half a CPU minute, "
            "once for each tokenizer"
        )
        try:
            made = apart(lambda: make_screen(fast, reference))
        except Exception as error:
            say(f"{name} is not used: its check failed ({error})")
            return None
        assert isinstance(made, Screen)
        screen = made
        write_screen(user_cache(SCREEN_KIND, key), screen, key)
    encoder = Encoder(name=name, reference=reference, fast=fast, screen=screen, screen_key=key)
    try:
        trouble = screen.refusal or apart(lambda: battery_difference(encoder, battery(tokenizer_json)))
    except Exception as error:
        trouble = f"its check failed ({error})"
    if trouble is not None:
        say(f"{name} is not used: {trouble}")
        return None
    return encoder


def require_installed(asked: str) -> None:
    """Raise `UsageError` for an engine asked by name whose package is absent."""
    if asked != "auto" and not ENGINES[asked].installed:
        package = ENGINES[asked].package
        raise UsageError(f"--engine {asked} needs a package that is not installed", fix=f"pip install {package}")
