"""Which documents a build takes: rows, lengths, copies, trials; from every kind of input, by any number of workers."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pytest

from flame.errors import CorpusError, InputError, UsageError
from flame.preprocess.config import BuildOptions
from flame.preprocess.folder import COPIES, HASHES
from flame.shards.manifest import read_manifest
from tests.builds import (
    build_here,
    command,
    documents_of,
    rows_of,
    run_build,
    same_corpus,
    some_texts,
    texts_of,
    write_jsonl,
    write_parquet,
)
from tests.processes import running, until
from tests.tokenizers import write_tiny_tokenizer

SCORES: list[float | None] = [0.95, 0.5, None, 0.91, 0.99, 0.2]
LANGUAGES: list[str | None] = ["en", "en", "en", "de", None, "fr"]
CONDITION = 'score > 0.9 and (lang == "en" or lang is null)'


def write_kind(path: Path, texts: list[str]) -> None:
    """Write the rows of `SCORES` and `LANGUAGES` as the kind of file that the path's ending names."""
    table = pa.table({"text": texts, "score": SCORES, "lang": LANGUAGES})
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        write_parquet(path, texts, score=SCORES, lang=LANGUAGES, rows_a_group=2)
    elif path.suffix == ".feather":
        pyarrow.feather.write_feather(table, path)
    elif path.suffix == ".csv":
        rows = [[row["text"], row["score"], row["lang"]] for row in table.to_pylist()]
        lines = [",".join("" if value is None else str(value) for value in row) for row in rows]
        path.write_text("\n".join(["text,score,lang", *lines]) + "\n")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


@pytest.mark.parametrize("ending", ["parquet", "feather", "jsonl", "csv"])
def test_rows_are_chosen_in_every_kind_of_input(tmp_path: Path, tiny_tokenizer: Path, ending: str) -> None:
    texts = ["one", "two", "three", "four", "five", "six"]
    write_kind(tmp_path / f"a.{ending}", texts)
    manifest = build_here(
        tmp_path / f"a.{ending}", tmp_path / "out", tiny_tokenizer, where=CONDITION, keep_columns=("score",)
    )
    assert sorted(texts_of(tmp_path / "out")) == ["five", "one"]
    assert manifest.rejects == {"where": 4}
    assert manifest.options["where"] == CONDITION
    (rows,) = rows_of(tmp_path / "out").values()
    assert sorted(float(row["score"]) for row in rows) == [0.95, 0.99]


def test_rows_are_chosen_before_anything_else_is_asked_of_them(tmp_path: Path, tiny_tokenizer: Path) -> None:
    lines = [{"text": 7, "keep": False}, {"keep": False}, {"text": None, "keep": True}, {"text": "x", "keep": True}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    manifest = build_here(tmp_path / "a.jsonl", tmp_path / "out", tiny_tokenizer, where="keep")
    assert manifest.rejects == {"null": 1, "where": 2}
    write_parquet(tmp_path / "b.parquet", ["x", None, "", "y"], keep=[True, False, True, True])
    manifest = build_here(tmp_path / "b.parquet", tmp_path / "b", tiny_tokenizer, where="keep")
    assert manifest.rejects == {"empty": 1, "where": 1}


def test_columns_are_refused_by_name_before_any_output(tmp_path: Path, tiny_tokenizer: Path) -> None:
    write_kind(tmp_path / "a.parquet", some_texts(6))
    write_kind(tmp_path / "a.jsonl", some_texts(6))
    (tmp_path / "a.txt").write_text("a text\n")
    for name, where, message in (
        ("a.parquet", "scor > 1", r"'scor'.*a\.parquet.*text, score, lang.*'score'\?"),
        ("a.jsonl", "scor > 1", r"'scor'.*a\.jsonl.*text, score, lang.*'score'\?"),
        ("a.txt", "score > 1", r"'score'.*a\.txt.*no columns"),
        ("a.parquet", "lang > 1", "needs a number in 'lang'"),
    ):
        with pytest.raises(InputError, match=message):
            build_here(tmp_path / name, tmp_path / "out", tiny_tokenizer, where=where)
    for name in ("a.parquet", "a.jsonl"):
        with pytest.raises(InputError, match=r"'lnag'.*--keep_columns.*text, score, lang.*'lang'\?"):
            build_here(tmp_path / name, tmp_path / "out", tiny_tokenizer, keep_columns=("lnag",))
    assert not (tmp_path / "out").exists()


def test_a_value_of_another_kind_is_malformed_input(tmp_path: Path, tiny_tokenizer: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "score": 5}\n{"text": "b", "score": "high"}\n')
    with pytest.raises(InputError, match=r"'score' must be a number and is 'high'.*a\.jsonl, line 2"):
        build_here(tmp_path / "a.jsonl", tmp_path / "out", tiny_tokenizer, where="score > 3")
    manifest = build_here(tmp_path / "a.jsonl", tmp_path / "skip", tiny_tokenizer, where="score > 3", on_error="skip")
    assert manifest.rejects == {"where_type": 1}
    assert "high" in next((tmp_path / "skip/rejects").iterdir()).read_text()


def test_nested_columns_are_asked_and_kept(tmp_path: Path, tiny_tokenizer: Path) -> None:
    meta = [{"score": 1, "url": "a"}, {"score": 5, "url": "b"}, None, {"score": None, "url": "d"}]
    write_parquet(tmp_path / "a.parquet", ["one", "two", "three", "four"], meta=meta, rows_a_group=2)
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"text": f"j{i}", "meta": value}) + "\n" for i, value in enumerate(meta))
    )
    for name, expected in (("a.parquet", ["two"]), ("b.jsonl", ["j1"])):
        out = tmp_path / f"out-{name}"
        build_here(tmp_path / name, out, tiny_tokenizer, where="meta.score > 1", keep_columns=("meta.url",))
        assert texts_of(out) == expected
        assert next(iter(rows_of(out).values()))[0]["meta.url"] == "b"


# ---- lengths


def test_long_documents_are_dealt_with_as_asked(tmp_path: Path) -> None:
    tokenizer = write_tiny_tokenizer(tmp_path / "tok", bos="<s>")
    texts = ["the", *some_texts(40, longest=30)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    common: dict[str, Any] = {"no_shuffle": True, "bos": "always"}
    build_here(tmp_path / "a.jsonl", tmp_path / "whole", tokenizer, **common)
    whole = documents_of(tmp_path / "whole")
    eos, bos = whole[0][-1], whole[0][0]
    most = 20
    long = sum(len(ids) > most for ids in whole)
    assert 5 < long < 41
    found = {}
    for policy in ("skip", "truncate", "split"):
        options = {**common, "max_tokens_per_document": most, "long_documents": policy}
        manifest = build_here(tmp_path / "a.jsonl", tmp_path / policy, tokenizer, **options)
        found[policy] = documents_of(tmp_path / policy)
        assert all(len(ids) <= most and (ids[0], ids[-1]) == (bos, eos) for ids in found[policy])
        counted = manifest.rejects.get("too_many_tokens", 0) + manifest.inputs["repaired"].get(policy, 0)
        assert counted == long
    assert found["skip"] == [ids for ids in whole if len(ids) <= most]
    assert found["truncate"] == [ids if len(ids) <= most else [*ids[: most - 1], eos] for ids in whole]
    joined = [token for ids in found["split"] for token in ids[1:-1]]
    assert joined == [token for ids in whole for token in ids[1:-1]]
    manifests = [read_manifest(tmp_path / name) for name in ("whole", "split")]
    assert len({manifest.splits["train"].num_bytes for manifest in manifests}) == 1


def test_all_parts_of_a_text_are_held_out_with_it_once(tmp_path: Path, tiny_tokenizer: Path) -> None:
    texts = some_texts(60, longest=40)
    write_jsonl(tmp_path / "a.jsonl", texts * 2)
    options: dict[str, Any] = {"val_fraction": 0.3, "no_shuffle": True}
    whole = build_here(tmp_path / "a.jsonl", tmp_path / "whole", tiny_tokenizer, **options)
    split = build_here(
        tmp_path / "a.jsonl",
        tmp_path / "split",
        tiny_tokenizer,
        max_tokens_per_document=9,
        long_documents="split",
        **options,
    )
    assert whole.splits["val"].num_documents < split.splits["val"].num_documents
    assert whole.splits["val"].num_bytes == split.splits["val"].num_bytes
    tokens = [
        [token for ids in documents_of(tmp_path / name, "val") for token in ids[:-1]] for name in ("whole", "split")
    ]
    assert tokens[0] == tokens[1]


def test_short_and_long_texts_are_left_out(tmp_path: Path, tiny_tokenizer: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["é", "日本語", "abcdef", None, " "])
    manifest = build_here(tmp_path / "a.jsonl", tmp_path / "out", tiny_tokenizer, min_chars=2, max_chars=3)
    assert texts_of(tmp_path / "out") == ["日本語"]
    assert manifest.rejects == {"null": 1, "too_long": 1, "too_short": 1, "whitespace": 1}


# ---- copies


def test_of_copies_the_first_of_the_input_stays(tmp_path: Path, tiny_tokenizer: Path) -> None:
    texts = some_texts(200)
    for part in range(4):
        write_parquet(tmp_path / f"raw/part-{part}.parquet", [*texts[part::2], "", texts[0]], rows_a_group=9)
    first = {}
    for part in range(4):
        for row, text in enumerate([*texts[part::2], "", texts[0]]):
            first.setdefault(text, (part, row))
    expected = sorted(place for text, place in first.items() if text)
    for name, options in {"one": {}, "two": {"seed": 5, "shard_tokens": 300}, "three": {"no_shuffle": True}}.items():
        manifest = build_here(tmp_path / "raw", tmp_path / name, tiny_tokenizer, dedup="exact", **options)
        rows = [row for rows in rows_of(tmp_path / name).values() for row in rows]
        assert sorted((int(row["source_file"][-9]), row["row"]) for row in rows) == expected
        assert sorted(texts_of(tmp_path / name)) == sorted(texts)
        assert manifest.rejects["duplicate"] == 4 + sum(len(texts[part::2]) for part in range(4)) - len(texts)
        assert not (tmp_path / name / COPIES).exists() and not (tmp_path / name / HASHES).exists()


def test_copies_are_looked_for_among_the_chosen(tmp_path: Path, tiny_tokenizer: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["same", "same", "long text", "same"], score=[1, 5, 5, 5])
    manifest = build_here(
        tmp_path / "a.parquet",
        tmp_path / "out",
        tiny_tokenizer,
        where="score > 3",
        max_chars=5,
        dedup="exact",
        val_fraction=0.999999,
    )
    (rows,) = rows_of(tmp_path / "out").values()
    assert [row["row"] for row in rows] == [1]
    assert manifest.rejects == {"duplicate": 1, "too_long": 1, "where": 1}


# ---- the same bytes, and no others


CHOICE: dict[str, Any] = {
    "where": 'n >= 20 and kind in ["a", "b"]',
    "min_chars": 30,
    "max_chars": 700,
    "dedup": "exact",
    "max_tokens_per_document": 200,
    "long_documents": "split",
    "val_fraction": 0.05,
    "shard_tokens": 20_000,
    "shuffle_block_tokens": 30_000,
    "limit_documents": 5500,
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with inputs of some 2 MB, one in three a copy, a tokenizer, and the corpus as one process makes it."""
    folder = tmp_path_factory.mktemp("choice")
    write_tiny_tokenizer(folder / "tok")
    for part in range(6):
        texts = some_texts(1000, seed=part // 2 * 2, longest=150)[part % 2 * 300 :]
        numbers = [(7 * row + part) % 100 for row in range(len(texts))]
        kinds = ["abc"[row % 3] for row in range(len(texts))]
        if part % 2:
            write_parquet(folder / f"raw/part-{part}.parquet", texts, n=numbers, kind=kinds)
        else:
            rows = zip(texts, numbers, kinds, strict=True)
            lines = (json.dumps({"text": text, "n": number, "kind": kind}) for text, number, kind in rows)
            (folder / "raw").mkdir(exist_ok=True)
            (folder / f"raw/part-{part}.jsonl").write_text("\n".join(lines) + "\n")
    build_here(folder / "raw", folder / "expected", folder / "tok", **CHOICE)
    refused = read_manifest(folder / "expected").rejects
    assert refused.keys() >= {"where", "duplicate", "too_short", "too_long"}
    return folder


@pytest.mark.parametrize("workers", [1, 2])
def test_any_number_of_workers_makes_the_same_choice(work: Path, tmp_path: Path, workers: int) -> None:
    result = run_build(work / "raw", tmp_path / "out", work / "tok", num_workers=workers, **CHOICE)
    assert result.returncode == 0, result.stderr
    assert same_corpus(tmp_path / "out", work / "expected")
    assert read_manifest(tmp_path / "out").rejects == read_manifest(work / "expected").rejects


def test_killed_while_hashing_and_while_writing_it_makes_the_same_choice(work: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    moments = (HASHES / "task-00003.json", COPIES, Path("build/tasks/task-00002.json"))
    for moment in moments:
        with running(command(work / "raw", out, work / "tok", **CHOICE)) as process:
            assert until((out / moment).exists, process), f"the build ended before {moment} was seen"
            process.kill()
            assert process.wait() == -signal.SIGKILL, f"the kill at {moment} came too late to show anything"
        assert not (out / "manifest.json").exists()
    result = run_build(work / "raw", out, work / "tok", **CHOICE)
    assert result.returncode == 0, result.stderr
    assert same_corpus(out, work / "expected")
    assert read_manifest(out).rejects == read_manifest(work / "expected").rejects
    assert not any((out / path).exists() for path in (HASHES, COPIES))


def test_another_choice_in_the_same_folder_is_refused_by_name(tmp_path: Path, tiny_tokenizer: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["some text", "more text"], n=[1, 2])
    base: dict[str, Any] = {
        "where": "n > 0",
        "min_chars": 2,
        "max_chars": 99,
        "max_tokens_per_document": 50,
        "long_documents": "split",
        "dedup": "exact",
    }
    build_here(tmp_path / "a.parquet", tmp_path / "out", tiny_tokenizer, **base)
    build_here(tmp_path / "a.parquet", tmp_path / "out", tiny_tokenizer, **base)
    for name, value in {
        "where": "n > 1",
        "min_chars": 3,
        "max_chars": None,
        "max_tokens_per_document": 51,
        "long_documents": "skip",
        "dedup": None,
    }.items():
        with pytest.raises(CorpusError, match=f"{name} was .* and is "):
            build_here(tmp_path / "a.parquet", tmp_path / "out", tiny_tokenizer, **{**base, name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": "score >"}, "--where is no expression"),
        ({"min_chars": 0}, "min_chars"),
        ({"min_chars": 5, "max_chars": 4}, "no text would be left"),
        ({"max_tokens_per_document": 2}, "3 or more"),
        ({"long_documents": "split"}, "needs --max_tokens_per_document"),
    ],
)
def test_what_cannot_be_chosen_is_a_wrong_call(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BuildOptions(dataset=("x",), tokenizer=tmp_path, output=tmp_path, **options)
