"""What `--where` says of Arrow columns: which rows of a batch are kept, and which row groups hold none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flame.preprocess.where import (
    BOOL,
    NUMBER,
    STRING,
    Arithmetic,
    Column,
    Compare,
    Contains,
    IsNull,
    Literal,
    Logic,
    Membership,
    Node,
    Not,
    Where,
)
from flame.preprocess.where_rows import COMPARISONS

_COMPARE = {
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "==": pc.equal,
    "!=": pc.not_equal,
}
_COMPUTE = {"+": pc.add, "-": pc.subtract, "*": pc.multiply, "/": pc.divide}
_INT, _FLOAT, _BYTES = pa.int64(), pa.float64(), pa.large_binary()
_TYPES = {NUMBER: _FLOAT, STRING: _BYTES, BOOL: pa.bool_()}


def kind_of_type(kind: pa.DataType) -> str | None:
    """Return what a column of this type holds, None where the language compares no such values."""
    if pa.types.is_dictionary(kind):
        return kind_of_type(kind.value_type)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return NUMBER
    if pa.types.is_boolean(kind):
        return BOOL
    return STRING if is_string_type(kind) else None


def is_string_type(kind: pa.DataType) -> bool:
    """Whether a column of this type holds strings or bytes, in any of Arrow's layouts of them."""
    tests = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_binary_view,
    )
    return any(test(kind) for test in tests)


def kept_rows(where: Where, num_rows: int, column: Callable[[str], pa.Array]) -> NDArray[np.bool_]:
    """Return which rows are kept; `column` gives the values of a name. Integers beyond 2^63 are compared as floats."""

    def typed(name: str) -> pa.Array:
        array = column(name)
        kind = where.kinds[name]
        return pa.nulls(num_rows, _TYPES[kind]) if kind is not None and pa.types.is_null(array.type) else array

    found = _evaluate(where.tree, num_rows, typed)
    if isinstance(found, pa.Scalar):
        return np.full(num_rows, found.as_py() is True)
    return np.asarray(pc.fill_null(found, False))


def _evaluate(node: Node, num_rows: int, column: Callable[[str], pa.Array]) -> Any:
    def values(part: Node) -> Any:
        return _evaluate(part, num_rows, column)

    match node:
        case Column():
            return _plain(column(node.name))
        case Literal():
            return _scalar(node.value)
        case IsNull():
            return column(node.operand.name).is_null()
        case Not():
            return pc.invert(values(node.part))
        case Logic():
            found, *others = (values(part) for part in node.parts)
            for other in others:
                found = (pc.and_kleene if node.is_and else pc.or_kleene)(found, other)
            return found
        case Membership():
            operand = values(node.operand)
            found = _compare("==", operand, _scalar(node.values[0]))
            for value in node.values[1:]:
                found = pc.or_kleene(found, _compare("==", operand, _scalar(value)))
            return found
        case Contains():
            return pc.match_substring(values(node.operand), node.part)
        case Compare():
            return _compare(node.operator, values(node.left), values(node.right))
        case Arithmetic():
            return _COMPUTE[node.operator](_float(values(node.left)), _float(values(node.right)))


def _compare(symbol: str, left: Any, right: Any) -> Any:
    types = {left.type, right.type}
    if pa.null() in types:  # a column of nothing, compared with another column
        return pa.nulls(len(left), pa.bool_())
    if types == {_INT, _FLOAT}:
        left, right = _float(left), _float(right)
    return _COMPARE[symbol](left, right)


def _scalar(value: float | str) -> pa.Scalar:
    if isinstance(value, str):
        return pa.scalar(value.encode(), _BYTES)
    return pa.scalar(value, pa.bool_() if isinstance(value, bool) else _INT if isinstance(value, int) else _FLOAT)


def _float(values: Any) -> Any:
    return values.cast(_FLOAT, safe=False) if values.type != _FLOAT else values


def _plain(array: pa.Array) -> pa.Array:
    """Return a column as int64, float64, bytes, truths, or nothing but nulls."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _plain(array.dictionary_decode())
    if pa.types.is_null(kind) or pa.types.is_boolean(kind):
        return array
    if kind_of_type(kind) == STRING:
        return array.cast(_BYTES)
    if pa.types.is_uint64(kind):
        try:
            return array.cast(_INT)
        except pa.ArrowInvalid:
            return array.cast(_FLOAT, safe=False)
    return array.cast(_INT if pa.types.is_integer(kind) else _FLOAT, safe=False)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a file says of a column in a group of rows: least and greatest value (None: unknown) and its nulls."""

    num_rows: int
    num_nulls: int | None
    low: Any = None
    high: Any = None
    may_be_nan: bool = False


def may_match(where: Where, bounds: Mapping[str, Bounds]) -> bool:
    """Whether a group of rows can hold one that is kept; columns that are not in `bounds` may hold anything."""
    return _outcomes(where.tree, bounds)[0]


def _outcomes(node: Node, bounds: Mapping[str, Bounds]) -> tuple[bool, bool]:
    """Return whether a condition can be true in some row, and whether it can be false."""
    match node:
        case Literal():
            return node.value is True, node.value is False
        case Not():
            true, false = _outcomes(node.part, bounds)
            return false, true
        case Logic():
            trues, falses = zip(*(_outcomes(part, bounds) for part in node.parts), strict=True)
            return (all(trues), any(falses)) if node.is_and else (any(trues), all(falses))
        case IsNull() if node.operand.name in bounds:
            known = bounds[node.operand.name]
            return known.num_nulls != 0, known.num_nulls != known.num_rows
        case Membership(operand=Column(name=name)) if name in bounds:
            found = [_compared("==", bounds[name], value)[0] for value in node.values]
            return any(found), bounds[name].num_nulls != bounds[name].num_rows
        case Compare(left=Column(name=name), right=Literal(value=value)) if name in bounds:
            return _compared(node.operator, bounds[name], value)
        case Compare(left=Literal(value=value), right=Column(name=name)) if name in bounds:
            turned = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}.get(node.operator, node.operator)
            return _compared(turned, bounds[name], value)
    return True, True


def _compared(symbol: str, known: Bounds, value: Any) -> tuple[bool, bool]:
    if known.num_nulls == known.num_rows:
        return False, False
    if known.low is None or known.high is None:
        return True, True
    low, high = known.low, known.high
    if isinstance(value, str):
        value = value.encode()
    if isinstance(low, float) or isinstance(value, float):
        low, high, value = float(low), float(high), float(value)
    if symbol in ("==", "!="):
        can_equal = low <= value <= high
        return (can_equal, True) if symbol == "==" else (True, can_equal)
    nearest, farthest = (low, high) if symbol in ("<", "<=") else (high, low)
    holds = COMPARISONS[symbol]
    return holds(nearest, value), known.may_be_nan or not holds(farthest, value)
