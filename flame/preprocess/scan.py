"""From found files to what a plan needs: sizes, row groups, the text's column, and where a trial stops."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from flame.errors import InputError
from flame.preprocess.inputs import FoundFile
from flame.preprocess.plan import InputFile
from flame.preprocess.readers.columns import Columns
from flame.preprocess.readers.lines import MISSING, lookup, parse_object
from flame.preprocess.readers.parquet import batch_rows, field_of, group_sizes, is_text_type, open_parquet, select
from flame.preprocess.readers.stream import ByteStream, DamagedStreamError, lines_between, range_stream

PROBED_FILES = 100
PROBED_LINES = 256


def scan_inputs(
    found: Sequence[FoundFile],
    *,
    text_columns: Sequence[str],
    keep_columns: Sequence[str],
    limit_documents: int | None,
    limit_bytes: int | None,
    on_error: str,
) -> tuple[tuple[InputFile, ...], Columns]:
    """Return the files as they are now, and the columns to read.

    Cost: a stat a file, the footer of each parquet file, the first lines of some jsonl files; with a limit, one
    reading of what comes before it. Raises `InputError` where the text's column is absent or holds no text, and for a
    file that is no parquet unless `on_error` is to skip it.
    """
    schemas = _schemas([file.path for file in found if file.format == "parquet"], on_error)
    text = _text_column(found, schemas, text_columns)
    for path, schema in schemas.items():
        _check_text_column(path, schema, text)
    columns = Columns(text=text, kept=_kept_schema(found, schemas, keep_columns))
    files = (_input_file(file, text, file.format == "parquet" and file.path not in schemas) for file in found)
    return tuple(_limited(files, columns.text, limit_documents, limit_bytes)), columns


def _schemas(paths: Sequence[str], on_error: str) -> dict[str, pa.Schema]:
    """Return the schemas by path, without those of damaged files if these are to be skipped."""
    schemas = {}
    for path in paths:
        try:
            schemas[path] = open_parquet(path).schema_arrow
        except InputError:
            if on_error == "fail":
                raise
    return schemas


def _input_file(file: FoundFile, text_column: str, damaged: bool) -> InputFile:
    status = Path(file.path).stat()
    described = file.format == "parquet" and not damaged
    return InputFile(
        path=file.path,
        format=file.format,
        compression=file.compression,
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        groups=group_sizes(open_parquet(file.path), text_column) if described else (),
        damaged=damaged,
    )


def _text_column(found: Sequence[FoundFile], schemas: dict[str, pa.Schema], wanted: Sequence[str]) -> str:
    """Return the one of `wanted` that the first parquet file has, else the first jsonl lines; txt needs none."""
    jsonl = [file for file in found if file.format == "jsonl"]
    if schemas:
        path, schema = next(iter(schemas.items()))
        names = [name for name in wanted if field_of(schema, name) is not None]
        if not names:
            raise _absent(wanted, path, schema.names)
        wanted = names[:1]
    if jsonl:
        return _probe(jsonl, wanted)
    return wanted[0]


def _probe(files: Sequence[FoundFile], wanted: Sequence[str]) -> str:
    keys: dict[str, None] = {}
    seen: set[str] = set()
    for file in files[:PROBED_FILES]:
        for value in _first_objects(file):
            keys |= dict.fromkeys(value)
            seen |= {name for name in wanted if lookup(value, name) is not MISSING}
            if wanted[0] in seen:
                return wanted[0]
    if keys and not seen:
        raise _absent(wanted, files[0].path, list(keys))
    return next((name for name in wanted if name in seen), wanted[0])


def _first_objects(file: FoundFile) -> Iterator[dict[str, object]]:
    stream = ByteStream(file.path, file.compression)
    try:
        for _, line in itertools.islice(lines_between(stream, 0, None), PROBED_LINES):
            try:
                yield parse_object(line.decode("utf-8"))
            except ValueError:
                continue
    except DamagedStreamError:
        return


def _absent(wanted: Sequence[str], path: str, names: Sequence[str]) -> InputError:
    return InputError(
        f"there is no column {' or '.join(map(repr, wanted))}",
        where=path,
        got="the columns " + ", ".join(list(names)[:20]),
        fix="Name the text's column with --text_column",
    )


def _check_text_column(path: str, schema: pa.Schema, text_column: str) -> None:
    field = field_of(schema, text_column)
    if field is None:
        raise _absent((text_column,), path, schema.names)
    if not is_text_type(field.type):
        raise InputError(
            f"the column {text_column!r} holds no text",
            where=path,
            got=f"the type {field.type}",
            expected="strings",
            fix="Name the text's column with --text_column",
        )


def _kept_schema(found: Sequence[FoundFile], schemas: dict[str, pa.Schema], names: Sequence[str]) -> pa.Schema:
    """Return one type for each kept column: what the parquet files agree on, string where lines are read too."""
    only_parquet = all(file.format == "parquet" for file in found)
    return pa.schema([_kept_field(name, schemas, only_parquet) for name in names])


def _kept_field(name: str, schemas: dict[str, pa.Schema], only_parquet: bool) -> pa.Field:
    found = {path: field_of(schema, name) for path, schema in schemas.items()}
    kinds = {path: _plain(field.type) for path, field in found.items() if field is not None}
    if not only_parquet or not schemas:
        return pa.field(name, pa.string())
    if not kinds:
        path, schema = next(iter(schemas.items()))
        raise InputError(
            f"no file has the column {name!r} that --keep_columns names",
            where=path,
            got="the columns " + ", ".join(schema.names[:20]),
        )
    try:
        fields = [pa.schema([pa.field(name, kind)]) for kind in dict.fromkeys(kinds.values())]
        return pa.unify_schemas(fields, promote_options="permissive").field(name).with_nullable(True)
    except pa.ArrowException as error:
        raise InputError(
            f"the files disagree on the type of {name!r}, which --keep_columns names",
            got="; ".join(f"{path}: {kind}" for path, kind in list(kinds.items())[:3]),
            fix="Give the column one type, or leave it out of --keep_columns",
        ) from error


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _limited(
    files: Iterator[InputFile], text_column: str, limit_documents: int | None, limit_bytes: int | None
) -> Iterator[InputFile]:
    """Yield the files up to the document with which a limit is reached; refused documents count as well."""
    if limit_documents is None and limit_bytes is None:
        yield from files
        return
    documents_left = limit_documents if limit_documents is not None else 2**63
    bytes_left = limit_bytes if limit_bytes is not None else 2**63
    for file in files:
        if documents_left <= 0 or bytes_left <= 0:
            return
        measure = _measure_parquet if file.format == "parquet" else _measure_lines
        file, documents, size = measure(file, text_column, documents_left, bytes_left)
        documents_left -= documents
        bytes_left -= size
        yield file


def _measure_parquet(
    file: InputFile, text_column: str, documents_left: int, bytes_left: int
) -> tuple[InputFile, int, int]:
    """Return the file cut where a limit falls, and the documents and bytes that it takes of them.

    Whole row groups are counted by the footer; only the one in which a limit falls is read.
    """
    rows = size = 0
    for index, (group_rows, group_bytes) in enumerate(file.groups):
        if rows + group_rows >= documents_left or size + group_bytes >= bytes_left:
            taken, taken_bytes = _rows_within(file, index, text_column, documents_left - rows, bytes_left - size)
            groups = (*file.groups[:index], (group_rows, taken_bytes))
            return dataclasses.replace(file, groups=groups, stop=rows + taken), documents_left, bytes_left
        rows, size = rows + group_rows, size + group_bytes
    return file, rows, size


def _rows_within(file: InputFile, group: int, text_column: str, rows_left: int, bytes_left: int) -> tuple[int, int]:
    group_rows, group_bytes = file.groups[group]
    batches = open_parquet(file.path).iter_batches(
        batch_size=batch_rows(group_rows, group_bytes), row_groups=[group], columns=[text_column], use_threads=False
    )
    rows = size = 0
    for batch in batches:
        texts = select(batch, text_column).cast(pa.large_binary())
        ends = size + np.cumsum(pa.compute.binary_length(texts).fill_null(0).to_numpy(zero_copy_only=False))
        within = min(int(np.searchsorted(ends, bytes_left)) + 1, rows_left - rows)
        if within <= len(ends):
            return rows + within, int(ends[within - 1])
        rows, size = rows + len(ends), int(ends[-1])
    return rows, size


def _measure_lines(
    file: InputFile, _text_column: str, documents_left: int, bytes_left: int
) -> tuple[InputFile, int, int]:
    documents = size = 0
    stream = range_stream(file.path, file.compression, 0)
    try:
        for offset, line in lines_between(stream, 0, None):
            if documents >= documents_left or size >= bytes_left:
                return dataclasses.replace(file, stop=offset), documents_left, bytes_left
            if file.format == "txt" or (line and not line.isspace()):
                documents += 1
                size += len(line)
    except DamagedStreamError:
        pass  # reading it for the build says so, under the user's policy
    return file, documents, size
