"""From found files to what a plan needs: sizes, row groups, the text's column, and where a trial stops."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from flame.errors import InputError
from flame.preprocess.file_kinds import FoundFile
from flame.preprocess.limits import limited
from flame.preprocess.plan import InputFile
from flame.preprocess.readers.columns import Columns
from flame.preprocess.readers.lines import MISSING, lookup, parse_object
from flame.preprocess.readers.rows import field_of, is_text_type
from flame.preprocess.readers.stream import ByteStream, DamagedStreamError, lines_between
from flame.preprocess.readers.tables import TABLES, UNTYPED, Table
from flame.preprocess.remote import RemoteError, at_once, is_remote
from flame.preprocess.where import Where, columns_of
from flame.preprocess.where_columns import check_columns, no_such_column

SHOWN_COLUMNS = 20
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
    where: Where | None = None,
) -> tuple[tuple[InputFile, ...], Columns]:
    """Return the files as they are now, and the columns to read.

    Cost: the footer of each parquet file, the headers within each arrow file, the first row of each csv file, the first
    lines of some jsonl files; with a limit, one reading of what comes before it, and no look at what comes after.
    Raises `InputError` where the text's column is absent or holds no text, and for a damaged file unless `on_error` is
    to skip it.
    """
    text = _text_column(found, text_columns, on_error)
    kinds: dict[str, dict[str, pa.DataType]] = {name: {} for name in keep_columns}  # by column and file
    names: dict[str, None] = {}
    _check_keys(found, keep_columns, where)
    described = (
        _input_file(file, table, text, kinds, names, where)
        for file, table in zip(found, _tables(found, text, on_error), strict=True)
    )
    files = tuple(limited(described, text, limit_documents, limit_bytes))
    kept = pa.schema([_kept_field(name, kinds[name], list(names), files) for name in keep_columns])
    return files, Columns(text=text, kept=kept, where=where)


def _tables(found: Sequence[FoundFile], text_column: str, on_error: str) -> Iterator[Table | None]:
    """Yield what each file says of itself; remote ones are asked some at a time."""

    def ask(file: FoundFile) -> Table | None:
        return _table(file, text_column, on_error) if file.format in TABLES else Table(schema=None)

    return at_once(ask, found) if any(is_remote(file.path) for file in found) else map(ask, found)


def _table(file: FoundFile, text_column: str | None, on_error: str) -> Table | None:
    """Return what the file says of itself, None where it is damaged and to be skipped."""
    try:
        return TABLES[file.format](file.path, file.compression, text_column)
    except RemoteError:
        raise
    except InputError:
        if on_error == "fail":
            raise
        return None


def _input_file(
    file: FoundFile,
    table: Table | None,
    text_column: str,
    kinds: dict[str, dict[str, pa.DataType]],
    names: dict[str, None],
    where: Where | None,
) -> InputFile:
    """Return the file as a plan knows it, and add the types of its kept columns to `kinds`, its columns to `names`."""
    if table is not None and table.schema is not None:
        _check_text_column(file.path, table.schema, text_column)
        _check_names(file.path, table.schema, (text_column, *kinds, *columns_of(where)))
        if where is not None:
            check_columns(where, file.path, table.schema, untyped=file.format in UNTYPED)
        names |= dict.fromkeys(table.schema.names[:SHOWN_COLUMNS] if len(names) < SHOWN_COLUMNS else ())
        for name, found in kinds.items():
            field = field_of(table.schema, name)
            if field is not None:
                found.setdefault(file.path, _plain(field.type))
    if file.format == "jsonl":
        _refuse_json_document(file)
    return InputFile(
        path=file.path,
        format=file.format,
        compression=file.compression,
        size_bytes=file.state.size_bytes,
        mtime_ns=file.state.mtime_ns,
        etag=file.state.etag,
        groups=() if table is None else table.groups,
        damaged=table is None,
    )


def _text_column(found: Sequence[FoundFile], wanted: Sequence[str], on_error: str) -> str:
    """Return the one of `wanted` that the first file with columns has, else the first jsonl lines; txt needs none."""
    tables = ((file, _table(file, None, on_error)) for file in found if file.format in TABLES)
    described = ((file, table.schema) for file, table in tables if table is not None and table.schema is not None)
    first = next(described, None)
    if first is not None:
        file, schema = first
        names = [name for name in wanted if field_of(schema, name) is not None]
        if not names:
            raise _absent(wanted, file.path, schema)
        wanted = names[:1]
    jsonl = [file for file in found if file.format == "jsonl"]
    return _probe(jsonl, wanted) if jsonl else wanted[0]


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


def _check_keys(found: Sequence[FoundFile], keep_columns: Sequence[str], where: Where | None) -> None:
    """Raise `InputError` for what --where or --keep_columns name and the first lines of jsonl do not hold.

    A column to keep may yet come in later lines: it is refused only where another key is spelled almost like it.
    """
    files = [file for file in found if file.format == "jsonl"][:PROBED_FILES]
    columnar = any(file.format in TABLES for file in found)
    txt = next((file for file in found if file.format == "txt"), None)
    if where is not None and where.kinds and txt is not None:
        raise no_such_column(next(iter(where.kinds)), (), txt.path)
    kept = () if columnar else keep_columns
    left = {*kept, *columns_of(where)}
    keys: dict[str, None] = {}
    for file in files if left else ():
        for value in _first_objects(file):
            keys |= dict.fromkeys(value)
            left -= {name for name in left if lookup(value, name) is not MISSING}
        if not left:
            return
    for name in sorted(left) if keys else ():
        if name in columns_of(where):
            raise no_such_column(name, list(keys), files[0].path)
        if near := difflib.get_close_matches(name, list(keys), 1, 0.7):
            raise InputError(
                f"there is no key {name!r}, which --keep_columns names",
                where=files[0].path,
                got="the keys " + ", ".join(list(keys)[:SHOWN_COLUMNS]),
                fix=f"Did you mean {near[0]!r}?",
            )


def _refuse_json_document(file: FoundFile) -> None:
    """Raise `InputError` for a .json file that is one array or one object over many lines, not an object a line."""
    if ".json" not in Path(file.path).suffixes:
        return
    stream = ByteStream(file.path, file.compression)
    try:
        first = next((line for _, line in lines_between(stream, 0, None) if line and not line.isspace()), b"")
    except DamagedStreamError:
        return
    start = first.strip()
    if not start.startswith(b"[") and start != b"{":
        return
    array = start.startswith(b"[")
    values = "'.[]'" if array else "."
    unpack = {"gzip": "gzip -dc ", "zstd": "zstd -dc "}.get(file.compression or "", "cat ")
    raise InputError(
        f"a .json file holds {'one array' if array else 'objects over several lines'}, not an object a line",
        where=file.path,
        expected='lines such as {"text": "…"}',
        fix=f"`{unpack}{file.path} | jq -c {values} > NEW.jsonl` makes such a file",
    )


def _absent(wanted: Sequence[str], path: str, columns: pa.Schema | Sequence[str]) -> InputError:
    shown = _shown_columns(columns) if isinstance(columns, pa.Schema) else ", ".join(list(columns)[:SHOWN_COLUMNS])
    return InputError(
        f"there is no column {' or '.join(map(repr, wanted))}",
        where=path,
        got=f"the columns {shown}",
        fix="Name the text's column with --text_column",
    )


def _shown_columns(schema: pa.Schema) -> str:
    """Return the columns for people, those within structs as they are named."""
    names: list[str] = []
    for field in schema:
        inner = [f"{field.name}.{part.name}" for part in field.type] if pa.types.is_struct(field.type) else []
        names += inner or [field.name]
    return ", ".join(names[:SHOWN_COLUMNS]) + (f" and {len(names) - SHOWN_COLUMNS} more" * (len(names) > SHOWN_COLUMNS))


def _check_names(path: str, schema: pa.Schema, wanted: Sequence[str]) -> None:
    """Raise `InputError` where what is read could be one of several columns."""
    for name in wanted:
        column = name if name in schema.names else name.split(".")[0]
        if schema.names.count(column) > 1:
            raise InputError(f"several columns are called {column!r}", where=path, fix="Give them different names")


def _check_text_column(path: str, schema: pa.Schema, text_column: str) -> None:
    field = field_of(schema, text_column)
    if field is None:
        raise _absent((text_column,), path, schema)
    if not is_text_type(field.type):
        raise InputError(
            f"the column {text_column!r} holds no text",
            where=path,
            got=f"the type {field.type}; the columns {_shown_columns(schema)}",
            expected="strings, or lists of strings",
            fix="Name the text's column with --text_column",
        )


def _kept_field(name: str, kinds: dict[str, pa.DataType], names: Sequence[str], files: Sequence[InputFile]) -> pa.Field:
    """Return one type for a kept column: what the files agree on, string where text files are read too."""
    if not kinds and names and all(file.format in TABLES for file in files):
        near = difflib.get_close_matches(name, names, 1, 0.6)
        raise InputError(
            f"no file has the column {name!r} that --keep_columns names",
            got="the columns " + ", ".join(names[:SHOWN_COLUMNS]),
            fix=f"Did you mean {near[0]!r}?" if near else None,
        )
    if not kinds or any(file.format in UNTYPED for file in files):
        nested = next((path for path, kind in kinds.items() if pa.types.is_nested(kind)), None)
        if nested is not None:
            raise InputError(
                f"the files disagree on the type of {name!r}, which --keep_columns names",
                where=nested,
                got=f"{kinds[nested]}, and text in others",
                fix="Build the files of each format on their own, or leave it out of --keep_columns",
            )
        return pa.field(name, pa.string())
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
    """Return the type in which values of this one are kept: none that parquet does not have."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.string()
    return pa.binary() if pa.types.is_binary_view(kind) else kind
