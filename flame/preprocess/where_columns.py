"""Whether the columns that `--where` names are there, and hold what it compares them with."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

import pyarrow as pa
import pyarrow.parquet as pq

from flame.errors import InputError
from flame.preprocess.readers.rows import field_of
from flame.preprocess.where import NUMBER, STRING, Where
from flame.preprocess.where_arrow import Bounds, kind_of_type, may_match

SHOWN_COLUMNS = 20
_BOUNDED = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.large_string())


def check_columns(where: Where, path: str, schema: pa.Schema, *, untyped: bool) -> None:
    """Raise `InputError` unless a file's columns are what the expression needs; `untyped` ones become what it needs."""
    names = column_names(schema)
    found = {}
    for name, wanted in where.kinds.items():
        field = field_of(schema, name)
        if field is None:
            raise no_such_column(name, names, path)
        kind = wanted if untyped else kind_of_type(field.type)
        found[name] = wanted if pa.types.is_null(field.type) else kind
        if wanted not in (None, found[name]):
            raise InputError(
                f"--where needs a {wanted} in {name!r}",
                where=path,
                got=f"the type {field.type}, in {where.text}",
                fix={STRING: f'Compare it with a text: {name} == "…"', NUMBER: "Write the number without quotes"}.get(
                    kind or ""
                ),
            )
    for one, other in where.alike:
        if None in (found[one], found[other]) or found[one] != found[other]:
            raise InputError(
                f"--where cannot compare {one!r} with {other!r}",
                where=path,
                got=f"{found[one] or 'values of no known kind'} and {found[other] or 'values of no known kind'}",
                fix=f"If they hold numbers, write {one} + 0 and {other} + 0" if untyped else None,
            )


def no_such_column(name: str, names: Collection[str], path: str) -> InputError:
    """Return the error for a column that no file of the input, or this one, has."""
    near = difflib.get_close_matches(name, names, 1, 0.6)
    more = f" and {len(names) - SHOWN_COLUMNS} more" if len(names) > SHOWN_COLUMNS else ""
    return InputError(
        f"there is no column {name!r}, which --where names",
        where=path,
        got=f"the columns {', '.join(list(names)[:SHOWN_COLUMNS])}{more}" if names else "no columns",
        fix=f"Did you mean {near[0]!r}?" if near else None,
    )


def column_names(schema: pa.Schema) -> list[str]:
    """Return the names by which columns can be asked for, those within structs included."""
    names: list[str] = []
    for field in schema:
        names.append(field.name)
        if pa.types.is_struct(field.type):
            names += [f"{field.name}.{part}" for part in column_names(pa.schema(list(field.type)))]
    return names


def group_may_match(where: Where, file: pq.ParquetFile, group: int) -> bool:
    """Whether a row group can hold a row that is kept, by what the file's footer says of its columns."""
    return may_match(where, _bounds(where.kinds, file, group))


def _bounds(names: Mapping[str, object], file: pq.ParquetFile, group: int) -> dict[str, Bounds]:
    bounds: dict[str, Bounds] = {}
    row_group = file.metadata.row_group(group)
    for index in range(row_group.num_columns):
        chunk = row_group.column(index)
        name = chunk.path_in_schema
        field = field_of(file.schema_arrow, name) if name in names else None
        if field is None or field.type not in _BOUNDED or chunk.statistics is None:
            continue
        if name in bounds:  # two columns to which this name could lead
            return {}
        known = chunk.statistics
        low = high = None
        if known.has_min_max:
            try:
                low, high = known.min, known.max
            except (ValueError, pa.ArrowException):  # a text that was cut within a character
                low = high = None
        if isinstance(low, str) and isinstance(high, str):
            low, high = low.encode(), high.encode()
        if low != low or high != high:  # NaN bounds nothing
            low = high = None
        bounds[name] = Bounds(
            num_rows=row_group.num_rows,
            num_nulls=known.null_count if known.has_null_count else None,
            low=low,
            high=high,
            may_be_nan=pa.types.is_floating(field.type),
        )
    return bounds
