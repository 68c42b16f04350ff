"""Token files with an index beside them: one file of plain ids, and one that says where each document ends.

Megatron's and datatrove's files are both of this kind. They are found, cut into groups of documents, mapped, and read
some documents at a time, so that memory does not grow with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flame.errors import InputError, UsageError
from flame.preprocess.file_kinds import natural_key
from flame.preprocess.plan import InputFile, Piece
from flame.preprocess.progress import log
from flame.preprocess.readers.columns import Columns
from flame.preprocess.sources.rows import TokenRows

BYTES_PER_TOKEN = 4  # about the text behind a token: tasks are cut by the bytes of text
GROUP_DOCUMENTS = 1024
BATCH_TOKENS = 2**20
BATCH_DOCUMENTS = 1024
CHECKED_AT_ONCE = 2**20  # entries of an index


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """The mapped `tokens` of one file; `starts(a, b)` are where documents [a, b) begin, and where the last one ends."""

    tokens: NDArray[np.integer]
    num_documents: int
    starts: Callable[[int, int], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A kind of token file with its index.

    `tokens` and `index` are the endings of their names. `open(tokens, index)` maps both, and checks what costs nothing;
    `check(tokens, index)` reads the whole index. Both raise `InputError`. `beside` are endings of other files that the
    system writes, which are not needed.
    """

    name: str
    tokens: str
    index: str
    open: Callable[[Path, Path], TokenFile]
    check: Callable[[Path, Path], None]
    beside: tuple[str, ...] = ()

    def index_path(self, tokens: Path) -> Path:
        return tokens.with_name(tokens.name.removesuffix(self.tokens) + self.index)

    def tokens_path(self, index: Path) -> Path:
        return index.with_name(index.name.removesuffix(self.index) + self.tokens)


def find_files(
    layout: Layout, place: Path, split: str | None, keep_columns: Sequence[str]
) -> tuple[tuple[InputFile, ...], Columns]:
    """Return the token files and indexes of a folder, in natural order, or those of one file or prefix.

    The index counts as a file without documents: a changed one is another input. Cost: every index is read. Raises
    `UsageError` for what is absent or cannot be asked for, `InputError` for what is damaged.
    """
    if split is not None or keep_columns:
        raise UsageError(
            f"token files of {layout.name} have no " + ("splits" if split is not None else "columns to keep"),
            got="--dataset_split " + split if split is not None else "--keep_columns " + ",".join(keep_columns),
            fix="Leave it away" + ("; name the files of one split in --input" if split is not None else ""),
        )
    files: list[InputFile] = []
    for tokens in _token_paths(layout, place):
        index = layout.index_path(tokens)
        layout.check(tokens, index)
        opened = layout.open(tokens, index)
        files += [_describe(layout, tokens, tuple(_groups(opened))), _describe(layout, index, ())]
    return tuple(files), Columns(text="", kept=pa.schema([]))


def _token_paths(layout: Layout, place: Path) -> list[Path]:
    if place.is_dir():
        return _paths_in(layout, place)
    tokens = layout.tokens_path(place) if place.name.endswith(layout.index) else place
    if not place.is_file():
        tokens = place.with_name(place.name + layout.tokens)
        if not tokens.exists() and not layout.index_path(tokens).exists():
            raise UsageError(
                "there is no such file or folder",
                got=place,
                expected=f"a folder with {layout.tokens} files, such a file, or its name without {layout.tokens}",
                fix="Check the path in --input",
            )
    _need_both(layout, tokens)
    return [tokens]


def _paths_in(layout: Layout, folder: Path) -> list[Path]:
    names = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: natural_key(str(path)))
    tokens = [path for path in names if path.name.endswith(layout.tokens)]
    indexes = [path for path in names if path.name.endswith(layout.index)]
    for path in (*tokens, *(layout.tokens_path(path) for path in indexes)):
        _need_both(layout, path)
    known = (layout.tokens, layout.index, *layout.beside)
    others = [path.name for path in names if not path.name.endswith(known)]
    if not tokens:
        raise InputError(
            f"the folder holds no token file of {layout.name}",
            where=folder,
            got=", ".join(others[:5]) or "an empty folder",
            expected=f"files NAME{layout.tokens} with NAME{layout.index}",
            fix="Name the folder that holds them in --input; text is read by: flame-preprocess build --dataset PATH",
        )
    if others:
        log(f"note: passed over {len(others)} other files: {', '.join(others[:5])}" + ", …" * (len(others) > 5))
    return tokens


def _need_both(layout: Layout, tokens: Path) -> None:
    index = layout.index_path(tokens)
    for path, other, held in ((index, tokens, "where documents end"), (tokens, index, "the ids")):
        if not path.is_file():
            raise InputError(
                f"a file of {layout.name} lacks its other half, which holds {held}",
                where=other,
                expected=path,
                fix="Copy both; documents cannot be told apart without the index" if path == index else "Copy both",
            )


def _describe(layout: Layout, path: Path, groups: tuple[tuple[int, int], ...]) -> InputFile:
    found = path.stat()
    return InputFile(
        path=str(path),
        format=layout.name,
        compression=None,
        size_bytes=found.st_size,
        mtime_ns=found.st_mtime_ns,
        groups=groups,
    )


def _groups(file: TokenFile) -> Iterator[tuple[int, int]]:
    for start in range(0, file.num_documents, GROUP_DOCUMENTS):
        stop = min(start + GROUP_DOCUMENTS, file.num_documents)
        starts = file.starts(start, stop)
        yield stop - start, BYTES_PER_TOKEN * int(starts[-1] - starts[0])


def read_rows(layout: Layout, piece: Piece) -> Iterator[TokenRows]:
    """Yield the documents of a piece's groups, at most `BATCH_DOCUMENTS` and about `BATCH_TOKENS` at a time."""
    tokens = Path(piece.path)
    index = layout.index_path(tokens)
    _need_both(layout, tokens)
    file = layout.open(tokens, index)
    assert piece.stop is not None, "a piece ends at a group"
    document, stop = piece.start * GROUP_DOCUMENTS, min(piece.stop * GROUP_DOCUMENTS, file.num_documents)
    assert document == piece.first_row, "all groups but the last are of one size"
    if BYTES_PER_TOKEN * _num_tokens(file, document, stop) != piece.num_bytes:
        raise InputError("an index changed after the conversion was planned", where=index, fix="Put the old file back")
    while document < stop:
        starts = file.starts(document, min(document + BATCH_DOCUMENTS, stop))
        count = int(np.searchsorted(starts[1:], starts[0] + BATCH_TOKENS, side="right"))
        starts = starts[: max(count, 1) + 1]
        yield TokenRows(
            path=piece.path,
            first_row=document,
            ids=file.tokens[starts[0] : starts[-1]],
            lengths=np.diff(starts),
            null=np.zeros(len(starts) - 1, dtype=bool),
            kept=None,
            progress_bytes=BYTES_PER_TOKEN * int(starts[-1] - starts[0]),
            noun="document",
        )
        document += len(starts) - 1


def _num_tokens(file: TokenFile, start: int, stop: int) -> int:
    return 0 if start >= stop else int(file.starts(stop - 1, stop)[1] - file.starts(start, start + 1)[0])


def map_file(path: Path, dtype: np.dtype[np.integer], count: int, offset: int = 0) -> NDArray[np.integer]:
    """Map `count` values of a file; an empty stretch, which cannot be mapped, is an empty array."""
    if count == 0:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))


def first_fall(values: NDArray[np.integer], at_once: int = CHECKED_AT_ONCE) -> int | None:
    """Return the first place that holds less than the one before it, None where there is none; reads in stretches."""
    for start in range(0, len(values) - 1, at_once):
        part = values[start : start + at_once + 1]
        falls = np.flatnonzero(part[1:] < part[:-1])
        if len(falls):
            return start + int(falls[0]) + 1
    return None


def mismatch(layout_name: str, where: Path | str, *, got: object, expected: object, what: str) -> InputError:
    """Return the error for an index, or a token file, that is damaged, or for two that do not fit."""
    return InputError(
        what,
        where=where,
        got=got,
        expected=expected,
        fix=f"Copy both files again, or write them again with {layout_name}",
    )
