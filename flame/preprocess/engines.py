"""What turns texts to ids. An engine is an entry in `ENGINES`; all of them give the same ids.

The reference ids of a text are those of `tokenizers.Tokenizer`, without the template's special tokens, and with text
that looks like a special token taken as plain text unless `parse_special`. Fast engines are trusted only as far as
they are checked against it (`engine_check.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flame.errors import TokenizerError
from flame.preprocess.tokenizer import RENEW

if TYPE_CHECKING:
    import pyarrow as pa

Ids = tuple[NDArray[np.uint32], NDArray[np.int64]]
# A batch of texts (large_string, no nulls) to all their ids, one behind the other, and the number of each.
Encode = Callable[["pa.LargeStringArray"], Ids]

REFERENCE = "hf"
REFERENCE_BATCH_BYTES = 2**19
FAST_BATCH_BYTES = 2**22
# A fast engine remembers every word that it meets. A process that has grown by the first gives back what it has freed;
# where more than the second is left, the engine is loaded afresh.
GROWTH_BYTES = 88 * 2**20
CACHE_BYTES = 72 * 2**20


@dataclass(frozen=True, kw_only=True)
class Engine:
    """`load(tokenizer_json, parse_special)` gives the function that encodes; `package` says which version did.

    It raises `TokenizerError` for a tokenizer that it cannot serve. `batch_bytes` of text are given to it at once, or
    one document that is larger.
    """

    package: str
    load: Callable[[bytes, bool], Encode]
    batch_bytes: int

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    @property
    def version(self) -> str:
        return metadata.version(self.package)


def load_hf(tokenizer_json: bytes, parse_special: bool) -> Encode:
    """Hugging Face's `tokenizers`: the reference.

    Cost: about 2 MB of text a second, and 120 bytes of memory for each byte that is encoded at once; that is
    `REFERENCE_BATCH_BYTES`, or one document that is larger.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # `tokenizers` raises bare Exception for a file that it cannot use
        raise TokenizerError("`tokenizers` cannot load the tokenizer.json", got=str(error), fix=RENEW) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = not parse_special

    def encode(texts: pa.LargeStringArray) -> Ids:
        parts = [encode_part(part) for part in bounded_parts(texts, REFERENCE_BATCH_BYTES)]
        return parts[0] if len(parts) == 1 else join(parts)

    def encode_part(texts: pa.LargeStringArray) -> Ids:
        encodings = tokenizer.encode_batch_fast(texts.to_pylist(), add_special_tokens=False)
        lengths = np.fromiter(map(len, encodings), dtype=np.int64, count=len(encodings))
        ids = itertools.chain.from_iterable(encoding.ids for encoding in encodings)
        return np.fromiter(ids, dtype=np.uint32, count=int(lengths.sum())), lengths

    return encode


def load_gigatoken(tokenizer_json: bytes, parse_special: bool) -> Encode:
    """`gigatoken`, fed with Arrow's own buffers.

    Cost: 70 to 200 MB of text a second with byte-level BPE, 25 with SentencePiece's; half a second to load. No thread.
    """
    import awkward as ak
    import pyarrow as pa
    from gigatoken import Tokenizer

    from flame.preprocess.texts import text_data, text_offsets

    content = json_for_fast_engines(tokenizer_json, parse_special)

    def encode(texts: pa.LargeStringArray) -> Ids:
        data = np.frombuffer(text_data(texts), dtype=np.uint8)
        strings = ak.contents.ListOffsetArray(
            ak.index.Index64(text_offsets(texts)),
            ak.contents.NumpyArray(data, parameters={"__array__": "byte"}),
            parameters={"__array__": "bytestring"},
        )
        found = tokenizer.get().encode_batch(ak.Array(strings), parallel=False).layout
        offsets = np.asarray(found.offsets.data)
        return np.asarray(found.content.data)[int(offsets[0]) : int(offsets[-1])], np.diff(offsets)

    tokenizer = Recycled(lambda: Tokenizer.from_json(content))
    encode(pa.array(["a"], pa.large_string()))  # what is built and imported at the first call is shared by forks
    return encode


def load_fastokens(tokenizer_json: bytes, parse_special: bool) -> Encode:
    """`fastokens`. Cost: 50 to 100 MB of text a second, 14 with SentencePiece's BPE. Its first call starts a thread."""
    from fastokens import Tokenizer

    content = json_for_fast_engines(tokenizer_json, parse_special).decode()
    tokenizer = Recycled(lambda: Tokenizer.from_json_str(content))

    def encode(texts: pa.LargeStringArray) -> Ids:
        ids, offsets = tokenizer.get().encode_batch_flat(texts.to_pylist(), add_special_tokens=False)
        lengths: NDArray[np.int64] = np.diff(np.frombuffer(offsets, dtype="<i8"))
        return np.frombuffer(ids, dtype="<u4"), lengths

    return encode


# The reference last: `auto` takes the first that is installed, serves the tokenizer and passes the checks.
ENGINES: dict[str, Engine] = {
    "gigatoken": Engine(package="gigatoken", load=load_gigatoken, batch_bytes=FAST_BATCH_BYTES),
    "fastokens": Engine(package="fastokens", load=load_fastokens, batch_bytes=FAST_BATCH_BYTES),
    REFERENCE: Engine(package="tokenizers", load=load_hf, batch_bytes=REFERENCE_BATCH_BYTES),
}


class Recycled:
    """A tokenizer that is loaded afresh when the process has grown by `CACHE_BYTES` since it was loaded."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._tokenizer = load()
        self._baseline = resident_bytes()
        self._process = os.getpid()

    def get(self) -> Any:
        if self._process != os.getpid():  # what a fork has touched of its parent's memory is no growth
            self._process, self._baseline = os.getpid(), resident_bytes()
        elif resident_bytes() - self._baseline > GROWTH_BYTES:
            give_memory_back()
            if resident_bytes() - self._baseline > CACHE_BYTES:
                self._tokenizer = None
                give_memory_back()
                self._tokenizer = self._load()
                self._baseline = resident_bytes()
        return self._tokenizer


def resident_bytes() -> int:
    """Return the memory that this process holds; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def give_memory_back() -> None:
    """Have the C library return what was freed to the system, where it can be asked (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def json_for_fast_engines(tokenizer_json: bytes, parse_special: bool) -> bytes:
    """Return a tokenizer.json that has no special added tokens, no truncation, padding or template.

    A special token is then plain text, as for the reference. Raises `TokenizerError` where that is not the same: where
    a special token overlaps one that is not special, the reference looks for the longest of both before it drops it.
    """
    settings, model = split_model(tokenizer_json)
    added = settings.get("added_tokens") or []
    if not parse_special:
        special = [token["content"] for token in added if token.get("special")]
        added = [token for token in added if not token.get("special")]
        for token in added:
            rival = next((other for other in special if _overlap(token["content"], other)), None)
            if rival is not None or token.get("lstrip") or token.get("rstrip"):
                raise TokenizerError(
                    "the added token cannot be told from special ones by this engine",
                    got=repr(token["content"]) + ("" if rival is None else f" beside {rival!r}"),
                )
    changed = {"added_tokens": added, "truncation": None, "padding": None, "post_processor": None}
    return json.dumps(settings | changed).encode()[:-1] + b',"model":' + model


def split_model(tokenizer_json: bytes) -> tuple[dict[str, Any], bytes]:
    """Return all of a tokenizer.json but its model, and the JSON of the model and of what is left, `}` included.

    The vocabulary, nearly all of the file, is not parsed where the model is last, as it is in files of `tokenizers`.
    """
    text = tokenizer_json.decode()
    settings: dict[str, Any] = {}
    decoder, place = json.JSONDecoder(), _after(text, 0, "{")
    while True:
        key, place = decoder.raw_decode(text, _after(text, place))
        place = _after(text, place, ":")
        if key == "model":
            break
        settings[key], place = decoder.raw_decode(text, place)
        place = _after(text, place, ",")
    if "added_tokens" in settings:
        return settings, text[place:].encode()
    whole = json.loads(text)
    model = whole.pop("model")
    return whole, json.dumps(model).encode() + b"}"


def _after(text: str, place: int, mark: str = "") -> int:
    """Return the place behind white space, `mark` and white space."""
    while text[place].isspace():
        place += 1
    if not text.startswith(mark, place):
        raise TokenizerError("the tokenizer.json cannot be taken apart", got=repr(text[place : place + 20]))
    place += len(mark)
    while text[place].isspace():
        place += 1
    return place


def _overlap(one: str, other: str) -> bool:
    """Whether two texts can share characters in some text: one within the other, or one's end the other's start."""
    if one in other or other in one:
        return True
    return any(one.endswith(other[:n]) or other.endswith(one[:n]) for n in range(1, min(len(one), len(other))))


def bounded_parts(texts: pa.LargeStringArray, batch_bytes: int) -> Iterator[pa.LargeStringArray]:
    """Yield the texts in slices of at most `batch_bytes`, never less than one text; one slice where there is none."""
    from flame.preprocess.texts import text_lengths

    ends = np.cumsum(text_lengths(texts))
    start = 0
    while start < len(texts) or start == 0:
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + batch_bytes, side="right")), start + 1)
        yield texts.slice(start, stop - start)
        start = stop


def join(parts: list[Ids]) -> Ids:
    """Return the ids of all parts, in order."""
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([lengths for _, lengths in parts])
