"""The language of `--where`: `language_score > 0.9 and lang in ["en", "de"]` to the tree of where.py.

Python's grammar, read by `ast` and never run: only the nodes below are known.
"""

from __future__ import annotations

import ast
import warnings

from flame.errors import UsageError
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

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
_ARITHMETIC: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_LANGUAGE = (
    'comparisons (< <= > >= == !=) of columns with numbers or "texts", in [1, 2], "part" in url, is null, is not null, '
    'and, or, not, + - * /, parentheses; column("a name") for a name with spaces'
)


def parse_where(text: str) -> Where:
    """Return what an expression means; `UsageError` that marks the place for what is no expression of this language."""
    return _Parser(" ".join(text.splitlines()).strip()).parse()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._kinds: dict[str, str | None] = {}
        self._alike: list[tuple[str, str]] = []

    def parse(self) -> Where:
        if not self._text:
            raise UsageError("--where is empty", expected=_LANGUAGE)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parsed = ast.parse(self._text, mode="eval")
            tree = self._condition(parsed.body)
        except SyntaxError as error:
            start = error.offset - 1 if error.offset and error.lineno == 1 else len(self._text)  # or it ends too soon
            stop = error.end_offset - 1 if error.end_offset and error.end_offset > start + 1 else start + 1
            raise self._error("--where is no expression", start, stop, _hint(self._text)) from error
        except (RecursionError, MemoryError, ValueError) as error:
            raise UsageError("--where is no expression", got=str(error), expected=_LANGUAGE) from error
        while self._settle():
            pass
        return Where(text=self._text, tree=tree, kinds=dict(self._kinds), alike=tuple(self._alike))

    def _settle(self) -> bool:
        """Carry what is known of one column to the one that it is compared with; whether that told anything new."""
        changed = False
        for one, other in self._alike:
            kinds = self._kinds[one], self._kinds[other]
            if kinds[0] != kinds[1]:
                if None not in kinds:
                    raise UsageError(
                        f"--where compares {one!r}, a {kinds[0]}, with {other!r}, a {kinds[1]}", got=self._text
                    )
                self._kinds[one] = self._kinds[other] = kinds[0] or kinds[1]
                changed = True
        return changed

    def _condition(self, node: ast.expr) -> Node:
        tree, kind = self._read(node)
        self._require(tree, kind, BOOL, node, "a condition, such as a comparison")
        return tree

    def _operand(self, node: ast.expr, wanted: str) -> Node:
        tree, kind = self._read(node)
        self._require(tree, kind, wanted, node, f"a {wanted}")
        return tree

    def _require(self, tree: Node, kind: str | None, wanted: str, node: ast.expr, words: str) -> None:
        if isinstance(tree, Column) and kind is None:
            self._kinds[tree.name] = wanted
        elif kind != wanted:
            raise self._wrong(f"--where has a {kind} where {words} is needed", node)

    def _read(self, node: ast.expr) -> tuple[Node, str | None]:
        """Return the tree of a part, and what it yields: None where that is the column's affair."""
        match node:
            case ast.BoolOp():
                parts = tuple(self._condition(part) for part in node.values)
                return Logic(isinstance(node.op, ast.And), parts), BOOL
            case ast.UnaryOp(op=ast.Not()):
                return Not(self._condition(node.operand)), BOOL
            case ast.Compare():
                return self._comparisons(node), BOOL
            case ast.BinOp() if type(node.op) in _ARITHMETIC:
                left, right = self._operand(node.left, NUMBER), self._operand(node.right, NUMBER)
                return Arithmetic(_ARITHMETIC[type(node.op)], left, right), NUMBER
            case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
                return self._signed(node), NUMBER
            case _ if _is_null(node):
                raise self._wrong(
                    "--where compares with null, which is never true", node, "Write: x is null, or x is not null"
                )
            case ast.Name() if node.id in ("true", "false"):
                return Literal(node.id == "true"), BOOL
            case ast.Constant():
                return self._literal(node)
        column = self._column(node)
        return column, self._kinds.setdefault(column.name, None)

    def _literal(self, node: ast.Constant) -> tuple[Literal, str]:
        value = node.value
        if isinstance(value, bool):
            return Literal(value), BOOL
        if isinstance(value, int | float):
            return Literal(value if isinstance(value, float) or abs(value) < 2**63 else float(value)), NUMBER
        if isinstance(value, str):
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise self._wrong("--where has a text that is no valid Unicode", node)
            return Literal(value), STRING
        raise self._wrong("--where has something that it does not know", node)

    def _signed(self, node: ast.UnaryOp) -> Node:
        operand = self._operand(node.operand, NUMBER)
        if isinstance(node.op, ast.UAdd):
            return operand
        if isinstance(operand, Literal) and not isinstance(operand.value, str):
            return Literal(-operand.value)
        return Arithmetic("-", Literal(0.0), operand)

    def _column(self, node: ast.expr) -> Column:
        match node:
            case ast.Name():
                return Column(node.id)
            case ast.Attribute():
                return Column(f"{self._column(node.value).name}.{node.attr}")
            case ast.Call(func=ast.Name(id="column"), args=[ast.Constant(value=str() as name)], keywords=[]):
                return Column(name)
        raise self._wrong("--where has something that it does not know", node)

    def _comparisons(self, node: ast.Compare) -> Node:
        """Return `a < b <= c` as the two comparisons that it stands for."""
        parts = []
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            parts.append(self._comparison(left, operator, right, node))
            left = right
        return parts[0] if len(parts) == 1 else Logic(True, tuple(parts))

    def _comparison(self, left: ast.expr, operator: ast.cmpop, right: ast.expr, whole: ast.Compare) -> Node:
        match operator:
            case ast.Is() | ast.IsNot():
                if not _is_null(right):
                    raise self._wrong("--where has an `is` without null", right, "Write == to compare")
                column = self._column(left)
                self._kinds.setdefault(column.name, None)
                return IsNull(column) if isinstance(operator, ast.Is) else Not(IsNull(column))
            case ast.In() | ast.NotIn():
                found = self._member(left, right)
                return found if isinstance(operator, ast.In) else Not(found)
        one, one_kind = self._read(left)
        other, other_kind = self._read(right)
        if isinstance(one, Column) and isinstance(other, Column):
            self._alike.append((one.name, other.name))
        elif one_kind is None and isinstance(one, Column):
            self._kinds[one.name] = one_kind = other_kind
        elif other_kind is None and isinstance(other, Column):
            self._kinds[other.name] = other_kind = one_kind
        if None not in (one_kind, other_kind) and one_kind != other_kind:
            raise self._wrong(f"--where compares a {one_kind} with a {other_kind}", whole)
        symbol = _COMPARISONS[type(operator)]
        if BOOL in (one_kind, other_kind) and symbol not in ("==", "!="):
            raise self._wrong(f"--where asks which of two conditions is {symbol}", whole, "Use ==, != or not")
        return Compare(symbol, one, other)

    def _member(self, left: ast.expr, right: ast.expr) -> Node:
        if isinstance(right, ast.List | ast.Tuple | ast.Set):
            values, kinds = [], set()
            for element in right.elts:
                value, kind = self._read(element)
                if not isinstance(value, Literal):
                    raise self._wrong("--where has a list with more than numbers and texts", element)
                values.append(value.value)
                kinds.add(kind)
            if len(kinds) != 1:
                raise self._wrong("--where has a list that is empty, or of several kinds", right)
            return Membership(self._operand(left, kinds.pop() or BOOL), tuple(values))
        if isinstance(left, ast.Constant) and isinstance(left.value, str):
            return Contains(left.value, self._operand(right, STRING))
        raise self._wrong("--where has an `in` without a list", right, 'Write x in ["a", "b"], or "part" in x')

    def _wrong(self, what: str, node: ast.expr, fix: str | None = None) -> UsageError:
        data = self._text.encode()
        start, stop = (len(data[:end].decode()) for end in (node.col_offset, node.end_col_offset or node.col_offset))
        return self._error(what, start, stop, fix)

    def _error(self, what: str, start: int, stop: int, fix: str | None) -> UsageError:
        marked = f"{self._text[:start]}«{self._text[start:stop] or 'the end'}»{self._text[stop:]}"
        return UsageError(what, got=marked, expected=_LANGUAGE if fix is None else None, fix=fix)


def _is_null(node: ast.expr) -> bool:
    """Whether a part is Python's None, or the null of SQL and JSON."""
    match node:
        case ast.Name():
            return node.id.lower() in ("null", "none")
        case ast.Constant():
            return node.value is None
    return False


def _hint(text: str) -> str | None:
    """Return what those who think of another language should write."""
    words = text.split()
    for theirs, ours in {
        "AND": "and",
        "OR": "or",
        "NOT": "not",
        "&&": "and",
        "||": "or",
        "<>": "!=",
        "=": "==",
    }.items():
        if theirs in words:
            return f"Write {ours} for {theirs}"
    return None
