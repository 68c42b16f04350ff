"""Which rows and documents are chosen: the language of --where against Python's own, row groups, lengths."""

from __future__ import annotations

import ast
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.errors import InputError, UsageError
from flame.preprocess.filters import by_characters, cut_long
from flame.preprocess.readers.columns import Columns
from flame.preprocess.rejects import Rejects
from flame.preprocess.texts import make_documents
from flame.preprocess.where_arrow import kept_rows
from flame.preprocess.where_columns import check_columns, group_may_match
from flame.preprocess.where_parse import parse_where
from flame.preprocess.where_rows import WhereTypeError, keeps_row, typed_value
from tests.reading import read

# ---- the language


NUMBERS = st.one_of(st.integers(-4, 4), st.sampled_from([-1.5, 0.5, 2.0, 2.5]))
TEXTS = st.sampled_from(["", "a", "b", "ab", "é", "日本"])
COLUMNS = {"i": pa.int64(), "f": pa.float64(), "s": pa.string(), "t": pa.string(), "b": pa.bool_()}
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "i": st.none() | st.integers(-4, 4),
            "f": st.none() | st.sampled_from([-1.5, 0.0, 0.5, 2.0, math.nan]),
            "s": st.none() | TEXTS,
            "t": st.none() | TEXTS,
            "b": st.none() | st.booleans(),
        }
    ),
    min_size=1,
    max_size=8,
)


def quoted(text: str) -> str:
    return '"' + text + '"'


def conditions() -> st.SearchStrategy[str]:
    """Expressions of the language, all of them also Python's."""
    comparison = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
    number = st.one_of(
        st.sampled_from(["i", "f", "-i", "(i + f)", "(2 * i - 1)", "i * f"]), NUMBERS.map(lambda value: f"({value})")
    )
    text = st.one_of(st.sampled_from(["s", "t"]), TEXTS.map(quoted))
    is_in = st.sampled_from(["in", "not in"])
    membership = st.tuples(st.sampled_from(["i", "f"]), is_in, st.lists(NUMBERS, min_size=1))
    words = st.tuples(text, is_in, st.lists(TEXTS, min_size=1))
    leaf = st.one_of(
        st.tuples(number, comparison, number).map(" ".join),
        st.tuples(number, comparison, number, comparison, number).map(" ".join),
        st.tuples(text, comparison, text).map(" ".join),
        membership.map(lambda parts: f"{parts[0]} {parts[1]} {parts[2]}"),
        words.map(lambda parts: f"{parts[0]} {parts[1]} [{', '.join(map(quoted, parts[2]))}]"),
        st.tuples(TEXTS.map(quoted), st.sampled_from(["s", "t"])).map(" in ".join),
        st.tuples(st.sampled_from("ifstb"), st.sampled_from(["is None", "is not None"])).map(" ".join),
        st.sampled_from(["b", "b == True", "b != (i > 0)"]),
    )
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda parts: f"({' '.join(parts)})"),
            inner.map(lambda part: f"not ({part})"),
        ),
        max_leaves=5,
    )


def python_keeps(expression: str, row: dict[str, Any]) -> bool:
    """Whether Python keeps the row, where each comparison that reads a null is neither true nor false."""

    body = ast.parse(expression, mode="eval").body

    def value(node: ast.expr) -> Any:
        return eval(compile(ast.Expression(node), "", "eval"), {}, row)

    def reads_null(node: ast.AST) -> bool:
        return any(isinstance(part, ast.Name) and row[part.id] is None for part in ast.walk(node))

    def truth(node: ast.expr) -> bool | None:
        if isinstance(node, ast.BoolOp):
            found = [truth(part) for part in node.values]
            if isinstance(node.op, ast.And):
                return False if False in found else None if None in found else True
            return True if True in found else None if None in found else False
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = truth(node.operand)
            return None if inner is None else not inner
        if isinstance(node, ast.Compare) and len(node.ops) > 1:
            operands = [node.left, *node.comparators]
            pairs = [
                ast.Compare(left, [symbol], [right])
                for (left, right), symbol in zip(itertools.pairwise(operands), node.ops, strict=True)
            ]
            return truth(ast.BoolOp(ast.And(), [ast.copy_location(ast.fix_missing_locations(p), node) for p in pairs]))
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
            return bool(value(node))
        return None if reads_null(node) else bool(value(node))

    return truth(body) is True


@settings(max_examples=400, deadline=None)
@given(conditions(), ROWS)
def test_a_row_is_kept_where_python_and_three_valued_logic_say_so(expression: str, rows: list[dict[str, Any]]) -> None:
    where = parse_where(expression)
    expected = [python_keeps(expression, row) for row in rows]
    table = pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in COLUMNS.items()})
    batch = table.to_batches()[0]
    assert kept_rows(where, len(rows), batch.column).tolist() == expected
    assert [keeps_row(where, row.__getitem__) for row in rows] == expected


@settings(max_examples=200, deadline=None)
@given(conditions(), ROWS)
def test_no_row_group_is_passed_over_that_holds_a_wanted_row(expression: str, rows: list[dict[str, Any]]) -> None:
    where = parse_where(expression)
    table = pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in COLUMNS.items()})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=2)
    file = pq.ParquetFile(pa.BufferReader(sink.getvalue()))
    for group in range(file.num_row_groups):
        part = file.read_row_group(group).combine_chunks().to_batches()[0]
        if kept_rows(where, part.num_rows, part.column).any():
            assert group_may_match(where, file, group)


def test_row_groups_that_cannot_match_are_passed_over(tmp_path: Path) -> None:
    table = pa.table(
        {
            "score": [1, 2, 3, 4, 5, None],
            "lang": ["de", "de", "en", "en", "fr", "fr"],
            "f": [1.0, 2, 3, 4, 5, 6],
            "n": [math.nan, 5, 1, 1, 5, 5],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    file = pq.ParquetFile(tmp_path / "a.parquet")
    for expression, groups in {
        "score > 2": [1, 2],
        "2 >= score": [0],
        "score > 2.5 and lang == 'en'": [1],
        "lang in ['de', 'fr']": [0, 2],
        "score is null": [2],
        "score is not null and f < 1": [],
        "not (lang < 'fr')": [2],
        "score + 1 > 100": [0, 1, 2],
        "not (n > 3)": [0, 1, 2],  # NaN is not, and no bound tells of it
        "f >= 3 or lang == 'de'": [0, 1, 2],
    }.items():
        where = parse_where(expression)
        assert [group for group in range(3) if group_may_match(where, file, group)] == groups, expression


def test_a_row_group_that_cannot_match_is_not_read_and_no_column_but_those_named(tmp_path: Path) -> None:
    """What is not read may be damaged."""
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["zero", "one", "two"], "score": [0.0, 1.0, 2.0], "other": ["x", "y", "z"]})
    pq.write_table(table, path, row_group_size=1, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    groups = pq.read_metadata(path)
    for group, column in ((0, 0), (1, 2), (2, 2)):  # the text of the first, the other column of the rest
        start = groups.row_group(group).column(column).data_page_offset
        data[start : start + 8] = b"\xff" * 8
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"damaged: [ -~]*[^.] \(in .*in or after row 0"):
        read(path, columns=Columns(text="text", kept=pa.schema([]), where=parse_where("score >= 0")))
    texts, rows, rejects = read(
        path, columns=Columns(text="text", kept=pa.schema([]), where=parse_where("score > 0.5"))
    )
    assert (texts, rows, rejects.counts) == (["one", "two"], [1, 2], {"where": 1})


@pytest.mark.parametrize(
    ("array", "expression", "expected"),
    [
        (pa.array(["x", None, "yx"], pa.string_view()), '"x" in c', [True, False, True]),
        (pa.array(["x", None, "yx"]).dictionary_encode(), 'c in ["x", "z"]', [True, False, False]),
        (pa.array([b"\xff", None, b"x"]), 'c == "x"', [False, False, True]),
        (pa.nulls(3), "c > 1", [False, False, False]),
        (pa.nulls(3), "c is null", [True, True, True]),
        (pa.array([1, None, 2**64 - 1], pa.uint64()), "c > -1", [True, False, True]),
        (pa.array([1, None, 3]).cast(pa.decimal128(30, 2)), "c >= 2.5", [False, False, True]),
        (pa.array([0.5, None, 2], pa.float32()), "c == 0.5", [True, False, False]),
        (pa.array([2**62, None, 1]), "c > 1.5", [True, False, False]),
        (pa.array([0, None, 1]), "1 / c > 2", [True, False, False]),
        (pa.array([0, None, 1]), "true", [True, True, True]),
    ],
)
def test_columns_of_any_type_are_compared(array: pa.Array, expression: str, expected: list[bool]) -> None:
    assert kept_rows(parse_where(expression), 3, lambda _: array).tolist() == expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "empty"),
        ("score >", r"no expression \(got score >«the end»"),
        ("a > 1 and (b > 2", r"a > 1 and «\(»b > 2"),
        ("score = 3", r"score «=» 3.*Write == for ="),
        ("a > 1 AND b > 2", r"«AND».*Write and for AND"),
        ("score", None),
        ("score + 1", "«score \\+ 1»"),
        ("é > 1 and f(x) > 2", r"é > 1 and «f\(x\)» > 2"),
        ("a == null", r"a == «null»\).*is null"),
        ("a == None", r"a == «None»\).*is null"),
        ('a > 1 and a == "x"', r'compares a number with a string.*«a == "x"»'),
        ('a > b and a > 1 and b == "x"', "compares 'a', a number, with 'b', a string"),
        ("a in []", "empty"),
        ('a in [1, "x"]', "several kinds"),
        ("a in b", "without a list"),
        ("a is 3", "without null"),
        ("not a + 1", "a number where a condition"),
        ("a[0] > 1", "does not know"),
        ("(lambda: 1)() > 0", "does not know"),
        ("__import__('os').system('x') == 0", "does not know"),
        ("a > 1 if b else c", "does not know"),
        ("(" * 300 + "a" + ")" * 300, "no expression"),
        ("a\0 > 1", "no expression"),
    ],
)
def test_what_is_no_expression_is_marked(expression: str, message: str | None) -> None:
    if message is None:
        assert parse_where(expression).kinds == {"score": "condition"}
        return
    with pytest.raises(UsageError, match=message):
        parse_where(expression)


def test_columns_are_looked_at_before_anything_is_read() -> None:
    schema = pa.schema({"language_score": pa.float32(), "lang": pa.string(), "m": pa.struct({"n": pa.int8()})})

    def check(expression: str, *, untyped: bool = False) -> None:
        check_columns(parse_where(expression), "a.parquet", schema, untyped=untyped)

    check('language_score > 0.9 and lang == "en" and m.n in [1]')
    check("m is null")
    with pytest.raises(InputError, match=r"'languag_score'.*columns language_score, lang, m, m.n.*'language_score'\?"):
        check("languag_score > 0.9")
    with pytest.raises(InputError, match=r"needs a number in 'lang'.*a.parquet.*type string"):
        check("lang > 0.9")
    with pytest.raises(InputError, match=r"needs a string in 'language_score'.*type float"):
        check('language_score == "0.9"')
    with pytest.raises(InputError, match="cannot compare 'lang' with 'language_score'"):
        check("lang == language_score")
    with pytest.raises(InputError, match=r"write lang \+ 0"):
        check("lang == language_score", untyped=True)


def test_fields_of_csv_are_what_the_expression_needs() -> None:
    where = parse_where('score >= 3 and (ok or lang == "") and lang is not null')

    def keeps(**fields: str) -> bool:
        return keeps_row(where, lambda name: typed_value(fields[name], where.kinds[name]))

    assert keeps(score="3.5", ok="True", lang="en")
    assert not keeps(score="2", ok="true", lang="en")
    assert not keeps(score="", ok="true", lang="en")
    assert not keeps(score="4", ok="true", lang="")
    with pytest.raises(WhereTypeError, match="'score' must be a number and is 'high'"):
        keeps(score="high", ok="true", lang="en")


# ---- lengths


def test_lengths_are_counted_in_characters() -> None:
    texts = pa.array(["é" * 3, "日本", "a" * 5, "🔥" * 4], pa.large_string())
    rejects = Rejects(on_error="fail")
    documents = make_documents(texts, np.arange(4, dtype=np.uint64), None, rejects, path="a", progress_bytes=7)
    found = by_characters(documents, 3, 4, rejects)
    assert found.texts.to_pylist() == ["é" * 3, "🔥" * 4]
    assert (found.rows.tolist(), found.num_bytes.tolist(), found.progress_bytes) == ([0, 3], [6, 16], 7)
    assert rejects.counts == {"too_short": 1, "too_long": 1}


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=8), st.integers(1, 4))
def test_long_documents_are_left_out_cut_off_or_cut_up(shape: list[tuple[int, bool]], most: int) -> None:
    lists = [[i * 10 + j for j in range(length)] for i, (length, _) in enumerate(shape)]
    ids = np.array([i for ids in lists for i in ids], np.uint32)
    lengths = np.array([len(ids) for ids in lists], np.int64)
    long = np.array([wanted and length > most for length, wanted in shape], bool)
    num_bytes = lengths * 3 + 1
    expected = {
        "skip": [(i, 0, ids) for i, ids in enumerate(lists) if not long[i]],
        "truncate": [(i, 0, ids[:most] if long[i] else ids) for i, ids in enumerate(lists)],
        "split": [
            (i, part, ids[start : start + step])
            for i, ids in enumerate(lists)
            for step in [most if long[i] else len(ids)]
            for part, start in enumerate(range(0, len(ids), step))
        ],
    }
    for policy, wanted in expected.items():
        cut = cut_long(ids, lengths, long, most, policy=policy)
        parts = np.split(cut.ids, np.cumsum(cut.lengths)[:-1]) if len(cut.lengths) else []
        found = list(zip(cut.origin.tolist(), cut.part.tolist(), [part.tolist() for part in parts], strict=True))
        assert found == wanted, policy
        shares = cut.share(num_bytes, lengths)
        if policy == "split":
            assert np.bincount(cut.origin, shares, minlength=len(lists)).tolist() == num_bytes.tolist()
        assert (shares <= num_bytes[cut.origin]).all()
