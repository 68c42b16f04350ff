"""What turns texts to ids. An engine is an entry in `ENGINES`; all of them give the same ids.

The reference ids of a text are those of `tokenizers.Tokenizer`, without the template's special tokens, and with text
that looks like a special token taken as plain text unless `parse_special`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flame.errors import TokenizerError

if TYPE_CHECKING:
    import pyarrow as pa

# A batch of texts (large_string, no nulls) to all their ids, one behind the other, and the number of each.
Encode = Callable[["pa.LargeStringArray"], tuple[NDArray[np.uint32], NDArray[np.int64]]]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """`load(tokenizer_json, parse_special)` gives the function that encodes; `package` says which version did.

    `batch_bytes` of text are given to it at once, or one document that is larger.
    """

    package: str
    load: Callable[[bytes, bool], Encode]
    batch_bytes: int

    @property
    def version(self) -> str:
        return metadata.version(self.package)


def load_hf(tokenizer_json: bytes, parse_special: bool) -> Encode:
    """Hugging Face's `tokenizers`: the reference.

    Cost: about 2 MB of text a second, and 120 bytes of memory for each byte that is encoded at once.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # `tokenizers` raises bare Exception for a file that it cannot use
        raise TokenizerError("`tokenizers` cannot load the tokenizer.json", got=str(error)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = not parse_special

    def encode(texts: pa.LargeStringArray) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        encodings = tokenizer.encode_batch_fast(texts.to_pylist(), add_special_tokens=False)
        lengths = np.fromiter(map(len, encodings), dtype=np.int64, count=len(encodings))
        ids = itertools.chain.from_iterable(encoding.ids for encoding in encodings)
        return np.fromiter(ids, dtype=np.uint32, count=int(lengths.sum())), lengths

    return encode


ENGINES: dict[str, Engine] = {"hf": Engine(package="tokenizers", load=load_hf, batch_bytes=2**19)}


def choose_engine(asked: str) -> str:
    """Return the name of the engine to use; `auto` takes the fastest that there is."""
    return next(iter(ENGINES)) if asked == "auto" else asked
