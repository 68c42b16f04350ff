"""Token data sets of the predecessor: folders of `datasets`' `save_to_disk`, a row of `input_ids` a document.

    FOLDER/state.json, dataset_info.json, data-00000-of-00002.arrow …        a data set
    FOLDER/dataset_dict.json, FOLDER/train/…, FOLDER/validation/…            several splits

Its files are Arrow streams. They are mapped and read a record batch at a time, so that memory does not grow with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flame.errors import InputError, UsageError
from flame.preprocess.plan import InputFile, Piece
from flame.preprocess.readers.columns import Columns
from flame.preprocess.saved import COPY_AGAIN
from flame.preprocess.sources.rows import TokenRows

FORMAT = "flame-v0"
IDS = "input_ids"
STATE = "state.json"
SPLITS = "dataset_dict.json"
BYTES_PER_TOKEN = 4  # about the text behind a token: tasks are cut by the bytes of text
BATCH_TOKENS = 2**20
BATCH_ROWS = 1024
_END_OF_STREAM = bytes(4)


def find_files(folder: Path, split: str | None, keep_columns: Sequence[str]) -> tuple[tuple[InputFile, ...], Columns]:
    """Return the files of a saved data set in its order, and the columns to read.

    Cost: the headers of all record batches are read, and no body. Raises `UsageError` where the folder or the split is
    absent, `InputError` where there is no saved data set, a file is damaged, or a column is absent or of another type.
    """
    saved = _saved_folder(folder, split)
    state = _read_json(saved / STATE)
    try:
        paths = [saved / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise InputError(
            "the data set does not name its files", where=saved / STATE, got=repr(error), fix=COPY_AGAIN
        ) from error
    if not paths:
        raise InputError("the saved data set has no rows", where=saved, fix="Check the path in --input")
    first = _open(paths[0]).schema
    columns = Columns(text=IDS, kept=_kept_schema(first, keep_columns, paths[0]))
    return tuple(_describe(path, columns) for path in paths), columns


def _saved_folder(folder: Path, split: str | None) -> Path:
    """Return the folder of the one data set that is asked for."""
    if not folder.exists():
        raise UsageError("there is no such folder", got=folder, fix="Check the path in --input")
    if (folder / SPLITS).is_file():
        names = _read_json(folder / SPLITS).get("splits") or []
        chosen = names[0] if split is None and len(names) == 1 else split
        if chosen is None:
            raise InputError(
                "the data set has several splits, and a corpus is made of one",
                where=folder,
                got=", ".join(names) or "none",
                fix="Name one with --dataset_split",
            )
        if chosen not in names:
            raise InputError(
                "the data set has no such split", where=folder, got=chosen, expected=" or ".join(names) or "none"
            )
        folder = folder / chosen
    elif split is not None:
        raise InputError(
            "the data set has no splits",
            where=folder,
            got=f"--dataset_split {split}",
            expected=f"a folder with a {SPLITS}",
            fix="Leave --dataset_split away",
        )
    if not (folder / STATE).is_file():
        names = sorted(path.name for path in folder.iterdir())[:5] if folder.is_dir() else ["a file"]
        raise InputError(
            "this is no data set that `datasets` saved",
            where=folder,
            got=", ".join(names) or "an empty folder",
            expected=f"what save_to_disk writes: {STATE} and .arrow files, or {SPLITS} and a folder a split",
            fix="Name that folder in --input; text is read by: flame-preprocess build --dataset PATH",
        )
    return folder


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"a file of the data set is no JSON: {error}", where=path, fix=COPY_AGAIN) from error
    if not isinstance(value, dict):
        raise InputError("a file of the data set is no JSON object", where=path, fix=COPY_AGAIN)
    return value


def _open(path: Path, fields: Sequence[int] | None = None) -> pa.RecordBatchStreamReader:
    options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=None if fields is None else list(fields))
    try:
        return pa.ipc.open_stream(pa.memory_map(str(path)), options=options)
    except FileNotFoundError as error:
        raise InputError("a file of the data set is absent", where=path, fix="Copy the whole folder again") from error
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path | str, error: Exception | str) -> InputError:
    detail = " ".join(str(error).split())
    return InputError(
        "a file of the data set is damaged", where=path, got=detail, fix="Copy it again, or save the data set again"
    )


def _kept_schema(schema: pa.Schema, names: Sequence[str], path: Path) -> pa.Schema:
    absent = [name for name in names if name not in schema.names]
    if absent or IDS in names:
        raise InputError(
            f"there is no column {absent[0]!r} to keep" if absent else f"{IDS} cannot be kept: it is what is converted",
            where=path,
            got="columns " + ", ".join(schema.names),
            fix="Correct --keep_columns",
        )
    return pa.schema([schema.field(name).remove_metadata() for name in names])


def _describe(path: Path, columns: Columns) -> InputFile:
    """Return the file with (rows, about the bytes of text) of each record batch."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise InputError("a file of the data set is absent", where=path, fix="Copy the whole folder again") from error
    schema = _open(path).schema
    _check_columns(path, schema, columns)
    groups = [(len(batch), BYTES_PER_TOKEN * _num_ids(batch.column(0))) for batch in _batches(path, [IDS], schema)]
    with open(path, "rb") as file:
        file.seek(-min(len(_END_OF_STREAM), found.st_size), 2)
        if file.read() != _END_OF_STREAM:
            raise _damaged(path, "it is cut short: the end of the stream is not marked")
    return InputFile(
        path=str(path),
        format=FORMAT,
        compression=None,
        size_bytes=found.st_size,
        mtime_ns=found.st_mtime_ns,
        groups=tuple(groups),
    )


def _check_columns(path: Path, schema: pa.Schema, columns: Columns) -> None:
    kind = schema.field(IDS).type if IDS in schema.names else None
    if kind is None or not _is_list_of_ids(kind):
        raise InputError(
            f"the data set has no column {IDS}"
            if kind is None
            else f"the column {IDS} holds no lists of whole numbers",
            where=path,
            got="columns " + ", ".join(schema.names) if kind is None else kind,
            expected=f"{IDS}: a list of token ids a row",
            fix="Tokenize it first; text is read by: flame-preprocess build --dataset PATH",
        )
    for field in columns.kept:
        if field.name not in schema.names or schema.field(field.name).type != field.type:
            other = schema.field(field.name).type if field.name in schema.names else "no such column"
            raise InputError(
                f"the kept column {field.name!r} is not the same in all files",
                where=path,
                got=other,
                expected=field.type,
                fix="Leave it out of --keep_columns",
            )


def _is_list_of_ids(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list and pa.types.is_integer(kind.value_type))


def _num_ids(lists: pa.Array) -> int:
    if pa.types.is_fixed_size_list(lists.type):
        return len(lists) * int(lists.type.list_size)
    return lists.offsets[-1].as_py() - lists.offsets[0].as_py() if len(lists) else 0


def _batches(path: Path, names: Sequence[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a file with only the columns `names`, in that order."""
    reader = _open(path, [schema.names.index(name) for name in names])
    try:
        for batch in reader:
            yield batch.select(list(names))
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def read_rows(piece: Piece, columns: Columns) -> Iterator[TokenRows]:
    """Yield the rows of the piece's record batches, at most `BATCH_ROWS` and about `BATCH_TOKENS` at a time."""
    path = Path(piece.path)
    assert piece.stop is not None, "a piece ends at a record batch"
    row = piece.first_row
    names = [IDS, *columns.kept_names]
    for number, batch in enumerate(_batches(path, names, _open(path).schema)):
        if number >= piece.stop:
            return
        if number < piece.start:
            continue
        for start, stop in _stretches(_lengths(batch.column(0))):
            yield _token_rows(batch.slice(start, stop - start), row + start, piece.path, columns)
        row += len(batch)


def _lengths(lists: pa.Array) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
    return lengths


def _stretches(lengths: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    ends = np.cumsum(lengths)
    start = 0
    while start < len(ends):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + BATCH_TOKENS, side="right"))
        stop = min(max(stop, start + 1), start + BATCH_ROWS)
        yield start, min(stop, len(ends))
        start = stop


def _token_rows(batch: pa.RecordBatch, first_row: int, path: str, columns: Columns) -> TokenRows:
    lists = batch.column(0)
    ids = lists.flatten()
    if ids.null_count:
        raise InputError(
            "a row holds a null among its ids",
            where=f"{path}, rows {first_row} to {first_row + len(batch) - 1}",
            fix="Tokenize it again",
        )
    return TokenRows(
        path=path,
        first_row=first_row,
        ids=ids.to_numpy(),
        lengths=_lengths(lists),
        null=np.asarray(lists.is_null()),
        kept=pa.table(list(batch.columns[1:]), schema=columns.kept) if columns.kept_names else None,
        progress_bytes=BYTES_PER_TOKEN * len(ids),
    )
