"""Which code points a fast engine may take otherwise than the reference, and which documents hold one.

Engines follow different versions of Unicode: a letter in one is unassigned in the other, and a mark of another
combining class stands elsewhere after normalisation. So every code point is put to both, once for each tokenizer,
engine and version, in contexts that tell its category, its combining class and what it composes with. A document that
holds one of those that differ goes to the reference.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flame.files import sha256_of_json
from flame.preprocess.engines import ENGINES, REFERENCE, Encode
from flame.preprocess.user_cache import keep, read_kept

if TYPE_CHECKING:
    import pyarrow as pa

SCREEN_VERSION = 1
SCREEN_KIND = "engine-screen"
NUM_CODE_POINTS = 0x110000
# Beyond this, or with one of ASCII, the engine is not this tokenizer's at all.
MOST_DIFFERING = 2**14
CHUNK = 64
# Put to both for every code point: alone, within, before and after a word, a number, a sign, an apostrophe, spaces and
# ends of lines, doubled, and beside marks of other combining classes (q composes with none of them; a and e do).
CONTEXTS = (
    *("{c}", "a{c}", "{c}a", "x{c}x", " {c}", "{c} a", " {c}{c}", "1{c}1", ".{c}.", "'{c}", "\r{c}", "{c}\r"),
    *("q\u0301{c}", "q{c}\u0323", "e{c}\u0301", "q{c}\u0334", "q\u0345{c}"),
)
# From plane 2 on: ideographs, private use, tags, and what is not assigned.
FEW_CONTEXTS = ("a{c}a", " {c} 1", "q\u0301{c}", "q{c}\u0323")
FIRST_WITH_FEW = 0x20000
_SEPARATOR = "\n"
_HIGH_BITS = np.uint64(0x8080808080808080)


@dataclass(frozen=True)
class Screen:
    """The code points that go to the reference, as ranges, both ends included; `num_differing` were seen to differ."""

    ranges: tuple[tuple[int, int], ...]
    num_differing: int

    @property
    def refusal(self) -> str | None:
        """Why no document may go to the engine, or None."""
        if self.ranges and self.ranges[0][0] < 0x80:
            return f"it differs from the reference on {chr(self.ranges[0][0])!a}, a character of ASCII"
        if self.num_differing > MOST_DIFFERING:
            return f"it differs from the reference on {self.num_differing:,} code points"
        return None

    @functools.cached_property
    def _tables(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
        """Whether a code point is screened; whether one of these first two bytes, or this first byte, may be."""
        screened = np.zeros(NUM_CODE_POINTS, dtype=bool)
        for first, last in self.ranges:
            screened[first : last + 1] = True
        pairs, leads = np.zeros(2**16, dtype=bool), np.zeros(2**8, dtype=bool)
        # Of 64 in a row, all bytes but the last are alike.
        for first in (64 * np.flatnonzero(screened.reshape(-1, 64).any(axis=1))).tolist():
            if first >= 0x80 and not 0xD800 <= first < 0xE000:
                one, two = chr(first).encode()[:2]
                pairs[one << 8 | two] = leads[one] = True
                if first < 0x800:
                    pairs[one << 8 : (one << 8) + 256] = True
        return screened, pairs, leads

    def find(self, texts: pa.LargeStringArray) -> NDArray[np.bool_]:
        """Return which texts hold a screened code point. Cost: a look at every eighth byte, more where not ASCII."""
        from flame.preprocess.texts import text_data, text_offsets

        offsets = text_offsets(texts)
        data = np.frombuffer(text_data(texts), dtype=np.uint8)[int(offsets[0]) : int(offsets[-1])]
        found = np.zeros(len(texts), dtype=bool)
        hits = self._positions(data)
        found[np.searchsorted(offsets - offsets[0], hits, side="right") - 1] = True
        return found

    def _positions(self, data: NDArray[np.uint8]) -> NDArray[np.int64]:
        screened, pairs, leads = self._tables
        words = data[: len(data) // 8 * 8].view("<u8")
        index = np.flatnonzero((words & _HIGH_BITS) != 0)
        if 4 * len(index) > len(words):
            at = np.flatnonzero(leads[data])
        else:
            suspects = np.flatnonzero(leads[data[: 8 * len(words)].reshape(-1, 8)[index]])
            rest = np.arange(8 * len(words), len(data))
            at = np.concatenate([8 * index[suspects >> 3] + (suspects & 7), rest[leads[data[rest]]]])
        # A text is valid UTF-8, so that a first byte is followed by as many as it says, and by two in any case but one.
        one, two = data[at].astype(np.int64), data[at + 1].astype(np.int64)
        keep = pairs[one << 8 | two]
        at, one, two = at[keep], one[keep], two[keep] & 0x3F
        last = len(data) - 1
        three, four = data[np.minimum(at + 2, last)] & 0x3F, data[np.minimum(at + 3, last)] & 0x3F
        code = np.where(
            one < 0xE0,
            (one & 0x1F) << 6 | two,
            np.where(
                one < 0xF0,
                (one & 0x0F) << 12 | two << 6 | three,
                (one & 0x07) << 18 | two << 12 | three.astype(np.int64) << 6 | four,
            ),
        )
        return at[screened[code]]


def make_screen(encode: Encode, reference: Encode, codes: Sequence[int] = range(NUM_CODE_POINTS)) -> Screen:
    """Put every code point of `codes` to both engines. Cost: half a CPU minute, nearly all of it the reference's."""
    differing = set(_differing(_probes(codes), encode, reference))
    parts = {code: unicodedata.normalize("NFD", chr(code)) for code in codes if _has_parts(code)}
    composed = ((code, f"x{text}x{_SEPARATOR}{chr(code)}") for code, text in parts.items())
    for code in _differing(composed, encode, reference):
        differing |= {code, *map(ord, parts[code])}
    differing |= {code for code, text in parts.items() if any(ord(part) in differing for part in text)}
    # What no table here knows may be a mark or a part of a letter in another's: one cannot probe for all its partners.
    unknown = [code for code in codes if unicodedata.category(chr(code)) == "Cn" and not _is_bare_plane(code)]
    return Screen(ranges=to_ranges({*differing, *unknown}), num_differing=len(differing))


def _has_parts(code: int) -> bool:
    decomposition = unicodedata.decomposition(chr(code))
    return decomposition != "" and not decomposition.startswith("<")


def _is_bare_plane(code: int) -> bool:
    """Whether it lies in a plane that holds nothing yet, or private use only."""
    return 4 <= code >> 16 <= 13 or code >= 0xF0000


def _probes(codes: Iterable[int]) -> Iterator[tuple[int, str]]:
    for code in codes:
        if not 0xD800 <= code < 0xE000:
            contexts = FEW_CONTEXTS if code >= FIRST_WITH_FEW else CONTEXTS
            yield code, _SEPARATOR.join(contexts).replace("{c}", chr(code))


def _differing(probes: Iterable[tuple[int, str]], encode: Encode, reference: Encode) -> Iterator[int]:
    """Yield the code points whose probe differs: put to both by chunks, and alone only where a chunk differs."""
    for batch in _batches(probes, 64 * CHUNK):
        chunks = [batch[start : start + CHUNK] for start in range(0, len(batch), CHUNK)]
        suspects = _unequal([_SEPARATOR.join(text for _, text in chunk) for chunk in chunks], encode, reference)
        alone = [probe for index in suspects for probe in chunks[index]]
        for index in _unequal([text for _, text in alone], encode, reference) if alone else []:
            yield alone[index][0]


def _batches(probes: Iterable[tuple[int, str]], size: int) -> Iterator[list[tuple[int, str]]]:
    batch: list[tuple[int, str]] = []
    for probe in probes:
        batch.append(probe)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _unequal(texts: Sequence[str], encode: Encode, reference: Encode) -> list[int]:
    import pyarrow as pa

    array = pa.array(texts, pa.large_string())
    return unequal(encode(array), reference(array)).tolist()


def unequal(
    one: tuple[NDArray[np.uint32], NDArray[np.int64]], other: tuple[NDArray[np.uint32], NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Return the numbers of the documents whose ids differ; they are equally many in both."""
    (ids, lengths), (others, other_lengths) = one, other
    assert len(lengths) == len(other_lengths), "as many documents out as in"
    if np.array_equal(lengths, other_lengths) and np.array_equal(ids, others):
        return np.zeros(0, dtype=np.int64)
    ends, other_ends = np.cumsum(lengths), np.cumsum(other_lengths)
    same = [
        np.array_equal(ids[end - length : end], others[other_end - other_length : other_end])
        for end, length, other_end, other_length in zip(
            ends.tolist(), lengths.tolist(), other_ends.tolist(), other_lengths.tolist(), strict=True
        )
    ]
    return np.flatnonzero(~np.array(same))


def to_ranges(codes: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the numbers as ranges, both ends included, in order."""
    ranges: list[tuple[int, int]] = []
    for code in sorted(codes):
        if ranges and code == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], code)
        else:
            ranges.append((code, code))
    return tuple(ranges)


# ---- kept between builds


def screen_key(engine: str, tokenizer_json: bytes, parse_special: bool) -> str:
    """Return what a screen is of: the tokenizer, the engine and the reference with their versions."""
    return sha256_of_json(
        {
            "screen_version": SCREEN_VERSION,
            "tokenizer": hashlib.sha256(tokenizer_json).hexdigest(),
            "parse_special": parse_special,
            "engines": {name: ENGINES[name].version for name in (engine, REFERENCE)},
            "unicode": unicodedata.unidata_version,
        }
    )


def read_screen(paths: Iterable[Path], key: str) -> Screen | None:
    """Return the first screen of this key that can be read; None where there is none."""
    value = read_kept(paths, key)
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if value is not None:
            ranges = tuple((int(first), int(last)) for first, last in value["ranges"])
            return Screen(ranges=ranges, num_differing=int(value["num_differing"]))
    return None


def write_screen(path: Path, screen: Screen, key: str) -> None:
    """Keep a screen; a folder that cannot be written is passed over, for it can be made again."""
    keep(path, key, {"num_differing": screen.num_differing, "ranges": screen.ranges})
