"""Other systems' readers of token files, over the same documents: for `bench_loader.py --peers`.

Each returns a function that reads window `i` in the peer's own shuffled order, opened anew at each call; `None` where
the package is not installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Read = Callable[[int], object]
Documents = Iterable[NDArray[np.uint32]]


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


# ---- Megatron's GPTDataset


class _Tokenizer:
    """What GPTDataset asks of a tokenizer."""

    def __init__(self, eod: int) -> None:
        self.eod = eod
        self.pad = eod
        self.vocab_size = eod + 1
        self.unique_identifiers = {"class": "bench"}


def write_megatron(folder: Path, documents: Documents) -> None:
    """Write the documents as Megatron's `.bin` and `.idx`."""
    with _quiet():
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    folder.mkdir()
    builder = IndexedDatasetBuilder(str(folder / "tokens.bin"), dtype=np.int32)
    for tokens in documents:
        builder.add_document(torch.from_numpy(tokens.astype(np.int32)), [len(tokens)])
    builder.finalize(str(folder / "tokens.idx"))


def open_megatron(folder: Path, window_len: int, num_windows: int, eos: int, *, documents: bool) -> Read:
    """Open them as GPTDataset; with `documents`, positions restart and losses are masked at their ends."""
    with _quiet():
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.indexed_dataset import IndexedDataset
        from megatron.core.datasets.utils import Split

        tokenizer: Any = _Tokenizer(eos)
        config = GPTDatasetConfig(
            random_seed=42,
            sequence_length=window_len,
            split="1",
            path_to_cache=str(folder / "cache"),
            tokenizer=tokenizer,
            reset_position_ids=documents,
            reset_attention_mask=False,
            eod_mask_loss=documents,
            create_attention_mask=False,
        )
        indexed = IndexedDataset(str(folder / "tokens"), mmap=True)
        numbers = np.arange(len(indexed), dtype=np.int32)
        dataset = GPTDataset(indexed, str(folder / "tokens"), numbers, num_windows, Split.train, config)
    return lambda i: dataset[i % len(dataset)]


# ---- litdata's TokensLoader


def write_litdata(folder: Path, documents: Documents, window_len: int) -> None:
    """Write the documents as litdata's chunks of tokens."""
    with _quiet():
        from litdata.streaming import Cache, TokensLoader
    folder.mkdir()
    cache = Cache(str(folder), chunk_size=(1 << 24) // window_len * window_len, item_loader=TokensLoader(window_len))
    for number, tokens in enumerate(documents):
        cache[number] = torch.from_numpy(tokens.astype(np.int32))
    with _quiet():
        cache.done()
        cache.merge()


def open_litdata(folder: Path, window_len: int) -> Read:
    """Open them as a shuffled StreamingDataset, which is read in its own order, epoch after epoch."""
    with _quiet():
        from litdata import StreamingDataset, TokensLoader
    dataset = StreamingDataset(str(folder), item_loader=TokensLoader(window_len), shuffle=True)

    def windows() -> Iterable[object]:
        while True:
            yield from dataset

    ahead = iter(windows())
    return lambda _: next(ahead)


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep what the packages print of themselves out of the table."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
