"""What `--where` says of one row whose values are Python's own, as lines of jsonl and fields of csv give them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

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

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_TRUTHS = {"true": True, "false": False}


class WhereTypeError(Exception):
    """A row's value is not of the kind that the expression needs: says which, and what is."""


def keeps_row(where: Where, value_of: Callable[[str], Any]) -> bool:
    """Whether a row is kept; `value_of` gives a column's value, None for null. Raises `WhereTypeError`."""
    values: dict[str, Any] = {}
    for name, kind in where.kinds.items():
        value = values[name] = value_of(name)
        if kind is not None and value is not None and kind_of(value) != kind:
            raise WhereTypeError(f"{name!r} must be a {kind} and is {_shown(value)}")
    for one, other in where.alike:
        kinds = kind_of(values[one]), kind_of(values[other])
        if None not in (values[one], values[other]) and (kinds[0] is None or kinds[0] != kinds[1]):
            raise WhereTypeError(f"{one!r} and {other!r} cannot be compared: {values[one]!r}, {values[other]!r}")
    return _evaluate(where.tree, values) is True


def typed_value(text: str, kind: str | None) -> Any:
    """Return what a field of a csv file means where a value of `kind` is needed; an empty one is null."""
    if text == "":
        return None
    if kind == BOOL:
        return _TRUTHS.get(text.strip().lower(), text)
    if kind == NUMBER and "_" not in text:
        for parse in (int, float):
            try:
                return parse(text)
            except ValueError:
                continue
    return text


def kind_of(value: Any) -> str | None:
    """Return the kind of a value, None where the language has none for it."""
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int | float):
        return NUMBER
    return STRING if isinstance(value, str) else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


def _evaluate(node: Node, values: dict[str, Any]) -> Any:
    match node:
        case Column():
            return values[node.name]
        case Literal():
            return node.value
        case IsNull():
            return values[node.operand.name] is None
        case Not():
            value = _evaluate(node.part, values)
            return None if value is None else not value
        case Logic():
            found = [_evaluate(part, values) for part in node.parts]
            decisive = not node.is_and  # what a single part decides
            return decisive if decisive in found else None if None in found else not decisive
        case Membership():
            value = _evaluate(node.operand, values)
            return None if value is None else value in node.values
        case Contains():
            value = _evaluate(node.operand, values)
            return None if value is None else node.part in value
        case Compare() | Arithmetic():
            left, right = _evaluate(node.left, values), _evaluate(node.right, values)
            if left is None or right is None:
                return None
            return COMPARISONS[node.operator](left, right) if isinstance(node, Compare) else _compute(node, left, right)


def _compute(node: Arithmetic, left: float, right: float) -> float:
    left, right = _as_float(left), _as_float(right)
    match node.operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    if right == 0:  # as IEEE 754 divides, and Arrow
        return math.nan if left == 0 or math.isnan(left) else math.copysign(math.inf, left) * math.copysign(1, right)
    return left / right


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)
