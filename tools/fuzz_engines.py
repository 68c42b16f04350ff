"""Short strings of every kind through a fast engine and the reference: prints each that differs, then the counts.

    python tools/fuzz_engines.py --count 400000 --tokenizer tok/qwen3 --engine gigatoken [--raw]

The engine is checked as a build checks it: what is screened goes to the reference. `--raw` shows the bare engine.
Exits with 1 where a string differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from flame.preprocess.engine_check import load_encoder
from flame.preprocess.engines import ENGINES, REFERENCE, Encode

BATCH = 4096
MARKS = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000 and unicodedata.category(chr(c)).startswith("M")]
UNASSIGNED = [chr(c) for c in range(0x30000) if unicodedata.category(chr(c)) == "Cn"]
SPACES = list(
    " \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2003\u2009\u200b\u2028\u2029\u202f\u205f\u3000\ufeff"
)
WORDS = [
    "the",
    "don't",
    "I'LL",
    "it’s",
    "12,345.67",
    "naïve",
    "e\u0301",
    "\r\n",
    "  ",
    "http://a.b/c?d=e",
    "ＡＢＣ",
    "ſ's",
    "▁",
    "İ",
]


def ranged(first: int, last: int) -> list[str]:
    return [chr(c) for c in range(first, last + 1) if not 0xD800 <= c < 0xE000]


KINDS: list[list[str]] = [
    ranged(0x20, 0x7E),
    ranged(0x61, 0x7A),
    ranged(0x00, 0x1F) + ranged(0x7F, 0x9F),
    ranged(0xA0, 0x24F),
    ranged(0x370, 0x5FF) + ranged(0x600, 0x6FF),
    ranged(0x700, 0x1FFF),
    ranged(0x2000, 0x2BFF),
    ranged(0x3040, 0x30FF) + ranged(0x4E00, 0x9FFF),
    ranged(0xAC00, 0xD7A3) + ranged(0x1100, 0x11FF) + ranged(0xA960, 0xA97F) + ranged(0xD7B0, 0xD7FF),
    ranged(0xF900, 0xFAFF) + ranged(0x2F800, 0x2FA1F),
    [*ranged(0x1F300, 0x1FAFF), "\u200d", "\ufe0f", "\U0001f3fb", "\U0001f1e6", "\U0001f1fa"],
    ranged(0xE000, 0xE0FF) + ranged(0xF0000, 0xF00FF) + ranged(0x10FF00, 0x10FFFF),
    ranged(0x10000, 0x1FFFF),
    ranged(0x0, 0x10FFFF),
    MARKS,
    ranged(0x300, 0x36F),
    UNASSIGNED,
    SPACES,
    ["0", "1", "9", "٣", "५", "²", "Ⅷ", "½", "𝟙"],
    WORDS,
]


def strings(seed: int, tokens: Sequence[str]) -> Iterator[str]:
    """Yield strings of up to 24 characters of a few kinds each, the added tokens among them; never blank."""
    rng = random.Random(seed)
    kinds = [*KINDS, [*tokens, *(token[:-1] for token in tokens)] or WORDS]
    while True:
        chosen = [rng.choice(kinds) for _ in range(rng.randint(1, 4))]
        text = "".join(rng.choice(rng.choice(chosen)) for _ in range(rng.randint(1, 24)))
        if text and not text.isspace():
            yield text


def differing(texts: Sequence[str], encode: Encode, reference: Encode) -> list[str]:
    """Return the texts whose ids differ."""
    array = pa.array(texts, pa.large_string())
    (ids, lengths), (expected, expected_lengths) = encode(array), reference(array)
    if np.array_equal(lengths, expected_lengths) and np.array_equal(ids, expected):
        return []
    ours, theirs = np.split(ids, np.cumsum(lengths)[:-1]), np.split(expected, np.cumsum(expected_lengths)[:-1])
    return [text for text, one, other in zip(texts, ours, theirs, strict=True) if not np.array_equal(one, other)]


def added_tokens(tokenizer_json: bytes) -> list[str]:
    return [token["content"] for token in json.loads(tokenizer_json).get("added_tokens") or []]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400_000)
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer folder")
    parser.add_argument("--engine", choices=[name for name in ENGINES if name != REFERENCE], required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--raw", action="store_true", help="the engine as it is, unscreened")
    parser.add_argument("--parse_special", action="store_true")
    arguments = parser.parse_args()
    content = (arguments.tokenizer / "tokenizer.json").read_bytes()
    reference = ENGINES[REFERENCE].load(content, arguments.parse_special)
    if arguments.raw:
        encode = ENGINES[arguments.engine].load(content, arguments.parse_special)
        share = None
    else:
        checked = load_encoder(arguments.engine, content, arguments.parse_special, say=lambda note: print(note))
        encode, share = checked.encode, checked.screen
    source = strings(arguments.seed, added_tokens(content))
    found = done = screened = 0
    started = time.monotonic()
    while done < arguments.count:
        texts = [next(source) for _ in range(min(BATCH, arguments.count - done))]
        done += len(texts)
        if share is not None:
            screened += int(np.count_nonzero(share.find(pa.array(texts, pa.large_string()))))
        for text in differing(texts, encode, reference):
            found += 1
            print(f"differs: {text!a}", flush=True)
    print(
        f"{arguments.tokenizer.name} {arguments.engine}: {done:,} strings, {found} differ, "
        f"{screened:,} went to the reference, {time.monotonic() - started:.0f} s"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
