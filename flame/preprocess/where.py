"""The condition of `--where` as a tree, with what it asks of columns.

Truth has three values as in SQL: a comparison with null is neither true nor false, and a row is kept only where the
whole is true.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

NUMBER, STRING, BOOL = "number", "string", "condition"


@dataclass(frozen=True)
class Column:
    """A column or key; `a.b` lies inside `a` unless something is so called."""

    name: str


@dataclass(frozen=True)
class Literal:
    """A number, text or truth that stands in the expression."""

    value: int | float | str | bool


@dataclass(frozen=True)
class Compare:
    """`operator` is one of < <= > >= == !=."""

    operator: str
    left: Node
    right: Node


@dataclass(frozen=True)
class Membership:
    """Whether the operand is one of the values."""

    operand: Node
    values: tuple[int | float | str | bool, ...]


@dataclass(frozen=True)
class Contains:
    """Whether the operand, a text, holds `part`."""

    part: str
    operand: Node


@dataclass(frozen=True)
class IsNull:
    """Whether a column holds nothing: itself never null."""

    operand: Column


@dataclass(frozen=True)
class Arithmetic:
    """`operator` is one of + - * /, of floats of 64 bits."""

    operator: str
    left: Node
    right: Node


@dataclass(frozen=True)
class Logic:
    """All of `parts` (`and`), or any of them (`or`)."""

    is_and: bool
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Not:
    """The contrary of `part`."""

    part: Node


Node = Column | Literal | Compare | Membership | Contains | IsNull | Arithmetic | Logic | Not


@dataclass(frozen=True, kw_only=True)
class Where:
    """An expression: its text, its tree, and of each column what it must hold, None where any one kind will do.

    `alike` are columns that are compared with each other: they must hold the same kind.
    """

    text: str
    tree: Node
    kinds: Mapping[str, str | None]
    alike: tuple[tuple[str, str], ...] = ()


def columns_of(where: Where | None) -> Iterable[str]:
    """Return the names of the columns that an expression reads."""
    return () if where is None else where.kinds
