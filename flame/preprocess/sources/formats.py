"""The token files of other systems that `convert` reads: an entry here and its two functions make a new one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flame.preprocess.plan import InputFile, Piece
from flame.preprocess.readers.columns import Columns
from flame.preprocess.sources import datatrove, flame_v0, megatron
from flame.preprocess.sources.rows import TokenRows


@dataclass(frozen=True, kw_only=True)
class Source:
    """`find(input, split, keep_columns)` describes the files with their groups; `read(piece, columns)` gives rows."""

    find: Callable[[Path, str | None, Sequence[str]], tuple[tuple[InputFile, ...], Columns]]
    read: Callable[[Piece, Columns], Iterator[TokenRows]]


SOURCES: dict[str, Source] = {
    flame_v0.FORMAT: Source(find=flame_v0.find_files, read=flame_v0.read_rows),
    megatron.FORMAT: Source(find=megatron.find, read=megatron.read),
    datatrove.FORMAT: Source(find=datatrove.find, read=datatrove.read),
}
