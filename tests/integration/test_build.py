"""What a build makes of its input: policies, order, held-out texts, continuation, refusals. All in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from tokenizers import Tokenizer

from flame.errors import CorpusError, FlameError, InputError, TokenizerError, UsageError
from flame.files import exclusive_lock
from flame.preprocess import build as build_module
from flame.preprocess.config import BuildOptions
from flame.preprocess.folder import LOCK, VAL_PARTS
from flame.shards.manifest import read_manifest
from tests.builds import (
    build_here,
    documents_of,
    files_of,
    rows_of,
    same_corpus,
    some_texts,
    texts_of,
    write_jsonl,
    write_parquet,
)
from tests.tokenizers import EOS, write_tiny_tokenizer


def reference(tokenizer: Path, texts: list[str]) -> list[list[int]]:
    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    loaded.encode_special_tokens = True
    return [[*loaded.encode(text, add_special_tokens=False).ids, 0] for text in texts]


def test_the_same_texts_in_any_format_are_the_same_corpus(
    tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [text.replace("\n", " ") for text in some_texts(300)]
    write_jsonl(tmp_path / "in/jsonl/a.jsonl", [None, *texts, "", " "])
    write_parquet(tmp_path / "in/parquet/a.parquet", [None, *texts, "", " "])
    (tmp_path / "in/txt").mkdir()
    (tmp_path / "in/txt/a.txt").write_text("\n" + "\n".join(texts) + "\n\n \n")
    for name in ("jsonl", "parquet", "txt"):
        manifest = build_here(tmp_path / "in" / name, tmp_path / name, tiny_tokenizer)
        assert files_of(tmp_path / name) == files_of(tmp_path / "jsonl")
        assert sum(manifest.rejects.values()) == 3
        assert "303 read, 300 written, 3 refused" in capsys.readouterr().out
    assert sorted(documents_of(tmp_path / "jsonl")) == sorted(reference(tiny_tokenizer, texts))
    assert sorted(texts_of(tmp_path / "jsonl")) == sorted(texts)
    assert read_manifest(tmp_path / "jsonl").rejects == {"empty": 1, "null": 1, "whitespace": 1}


def test_no_shuffle_keeps_the_order_and_shuffle_only_changes_it(tmp_path: Path, tiny_tokenizer: Path) -> None:
    texts = some_texts(400)
    for part, start in enumerate(range(0, 400, 40)):
        write_parquet(tmp_path / f"raw/part-{part}.parquet", texts[start : start + 40], rows_a_group=15)
    small = {"shard_tokens": 500, "shuffle_block_tokens": 700}
    plain = build_here(tmp_path / "raw", tmp_path / "plain", tiny_tokenizer, no_shuffle=True, **small)
    assert documents_of(tmp_path / "plain") == reference(tiny_tokenizer, texts)
    assert len(plain.splits["train"].shards) > 10
    shuffled = build_here(tmp_path / "raw", tmp_path / "shuffled", tiny_tokenizer, **small)
    other = build_here(tmp_path / "raw", tmp_path / "other", tiny_tokenizer, seed=1, **small)
    assert len({plain.fingerprint, shuffled.fingerprint, other.fingerprint}) == 3
    for name in ("shuffled", "other"):
        assert sorted(documents_of(tmp_path / name)) == sorted(documents_of(tmp_path / "plain"))


def test_neither_directory_order_nor_batches_change_a_byte(
    tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"part-{i}.jsonl" for i in range(10)] + ["sub/part-1.parquet", "sub/part-10.jsonl"]
    contents = {name: some_texts(60, seed=i) for i, name in enumerate(names)}
    for folder, order, options in (("one", names, {}), ("two", names[::-1], {"batch_size": 7})):
        for name in order:
            write = write_parquet if name.endswith("parquet") else write_jsonl
            write(tmp_path / folder / "raw" / name, contents[name])
        monkeypatch.chdir(tmp_path / folder)
        build_here("raw", Path("out"), tiny_tokenizer, val_fraction=0.05, shard_tokens=800, **options)
    assert same_corpus(tmp_path / "one/out", tmp_path / "two/out")
    sources = {row["source_file"] for rows in rows_of(tmp_path / "one/out").values() for row in rows}
    assert sources == {f"raw/{name}" for name in names}


def test_provenance_names_the_row_of_every_document(tmp_path: Path, tiny_tokenizer: Path) -> None:
    texts = some_texts(120)
    write_parquet(tmp_path / "raw/a.parquet", [*texts[:60], None], url=[f"u{i}" for i in range(61)], rows_a_group=7)
    write_jsonl(tmp_path / "raw/b.jsonl", texts[60:])
    build_here(tmp_path / "raw", tmp_path / "out", tiny_tokenizer, val_fraction=0.1, keep_columns=("url",))
    parquet = pq.read_table(tmp_path / "raw/a.parquet").to_pylist()
    lines = (tmp_path / "raw/b.jsonl").read_bytes()
    seen = []
    for split in ("train", "val"):
        rows = [row for name, rows in rows_of(tmp_path / "out").items() if name.startswith(split) for row in rows]
        for row, text in zip(rows, texts_of(tmp_path / "out", split), strict=True):
            if row["source_file"].endswith("parquet"):
                assert parquet[row["row"]] == {"text": text, "url": row["url"]}
            else:
                assert json.loads(lines[row["row"] :].split(b"\n")[0]) == {"text": text}
            assert row["num_bytes"] == len(text.encode())
            seen.append(text)
    assert sorted(seen) == sorted(texts)


def test_without_provenance_nothing_else_changes(tmp_path: Path, tiny_tokenizer: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", some_texts(200))
    options: dict[str, Any] = {"val_fraction": 0.1, "shard_tokens": 900}
    kept = build_here(tmp_path / "a.jsonl", tmp_path / "kept", tiny_tokenizer, **options)
    bare = build_here(tmp_path / "a.jsonl", tmp_path / "bare", tiny_tokenizer, provenance=False, **options)
    assert bare.splits == kept.splits
    assert not rows_of(tmp_path / "bare")


# ---- held out


def test_a_text_is_on_one_side_and_val_keeps_one_copy(tmp_path: Path, tiny_tokenizer: Path) -> None:
    texts = some_texts(300) * 3
    for part in range(6):
        write_jsonl(tmp_path / f"raw/{part}.jsonl", texts[part::6])
    for name, options in {"one": {}, "two": {"seed": 5, "shard_tokens": 300}, "three": {"no_shuffle": True}}.items():
        manifest = build_here(tmp_path / "raw", tmp_path / name, tiny_tokenizer, val_fraction=0.2, **options)
        expected = {text for text in texts if xxhash.xxh3_64_intdigest(text.encode()) / 2**64 < 0.2}
        val = texts_of(tmp_path / name, "val")
        assert sorted(val) == sorted(expected)
        assert 30 < len(val) < 90
        assert sorted(texts_of(tmp_path / name)) == sorted(text for text in texts if text not in expected)
        assert manifest.rejects == {"val_duplicate": 2 * len(expected)}
        assert not (tmp_path / name / VAL_PARTS).exists()
        shards = manifest.splits["val"].shards
        assert all(shard.num_tokens >= options.get("shard_tokens", 2**28) for shard in shards[:-1])


def test_a_val_split_that_no_text_falls_in_is_there_and_empty(tmp_path: Path, tiny_tokenizer: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["one"])
    manifest = build_here(tmp_path / "a.jsonl", tmp_path / "out", tiny_tokenizer, val_fraction=1e-9)
    assert (manifest.splits["val"].num_documents, manifest.splits["train"].num_documents) == (0, 1)


# ---- the tokenizer


def test_special_text_is_plain_unless_asked(tmp_path: Path, tiny_tokenizer: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [f"a {EOS} b", f"ends {EOS}"])
    build_here(tmp_path / "a.jsonl", tmp_path / "plain", tiny_tokenizer, no_shuffle=True)
    assert texts_of(tmp_path / "plain") == [f"a {EOS} b", f"ends {EOS}"]
    manifest = build_here(
        tmp_path / "a.jsonl", tmp_path / "parsed", tiny_tokenizer, parse_special=True, no_shuffle=True
    )
    counts = [ids.count(0) for ids in documents_of(tmp_path / "parsed")]
    assert counts == [2, 1], "a text's own EOS at its end is not doubled"
    assert manifest.tokenizer.special_text == "parsed"


def test_a_template_that_adds_bos_and_eos_doubles_neither(tmp_path: Path) -> None:
    folder = write_tiny_tokenizer(tmp_path / "tok", bos="<s>")
    loaded = Tokenizer.from_file(str(folder / "tokenizer.json"))
    from tokenizers.processors import TemplateProcessing

    loaded.post_processor = TemplateProcessing(single=f"<s> $A {EOS}", special_tokens=[("<s>", 0), (EOS, 1)])
    loaded.save(str(folder / "tokenizer.json"))
    write_jsonl(tmp_path / "a.jsonl", ["the fox"])
    manifest = build_here(tmp_path / "a.jsonl", tmp_path / "out", folder)
    (ids,) = documents_of(tmp_path / "out")
    assert ids == loaded.encode("the fox").ids
    assert (ids[0], ids[-1], len(set(ids) & {0, 1})) == (0, 1, 2)
    assert (manifest.tokenizer.bos_id, manifest.tokenizer.bos) == (0, "always")


@pytest.mark.parametrize("eos_token", [None, "</nowhere>"])
def test_no_usable_eos_is_refused_before_any_output(tmp_path: Path, eos_token: str | None) -> None:
    folder = write_tiny_tokenizer(tmp_path / "tok", eos=None)
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(TokenizerError, match=r"EOS.*--eos_token"):
        build_here(tmp_path / "a.jsonl", tmp_path / "out", folder, eos_token=eos_token)
    assert not (tmp_path / "out").exists()


def test_a_text_without_a_token_is_refused_and_counted(tmp_path: Path) -> None:
    from tokenizers import models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "a": 1, "?": 2}, unk_token="?"))
    tokenizer.normalizer = normalizers.Replace("-", "")
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_jsonl(tmp_path / "a.jsonl", ["a", "-", "a a", "--", "b"])
    options: dict[str, Any] = {"eos_token": "</s>", "no_shuffle": True, "keep_columns": ("other",)}
    manifest = build_here(tmp_path / "a.jsonl", tmp_path / "out", tmp_path / "tokenizer.json", **options)
    assert documents_of(tmp_path / "out") == [[1, 0], [1, 1, 0], [2, 0]]
    assert manifest.rejects == {"no_tokens": 2}
    assert [row["num_bytes"] for rows in rows_of(tmp_path / "out").values() for row in rows] == [1, 3, 1]


# ---- inputs


def test_files_may_differ_in_all_but_the_text(tmp_path: Path, tiny_tokenizer: Path) -> None:
    texts = some_texts(50)
    raw = tmp_path / "raw"
    write_parquet(raw / "1.parquet", texts[:20], url=["u"] * 20)
    pq.write_table(pa.table({"n": range(20), "text": pa.array(texts[20:40], pa.large_string())}), raw / "2.parquet")
    write_parquet(raw / "3.parquet", [])
    with pq.ParquetWriter(raw / "4.parquet", pa.schema([("text", pa.string())])):
        pass
    pq.write_table(pa.table({"text": pa.nulls(2)}), raw / "5.parquet")
    write_jsonl(raw / "6.jsonl", texts[40:])
    (raw / "7.jsonl").touch()
    manifest = build_here(raw, tmp_path / "out", tiny_tokenizer, no_shuffle=True)
    assert texts_of(tmp_path / "out") == texts
    assert manifest.rejects == {"null": 2}


@pytest.mark.parametrize("values", [[], [None, "", " \n"]])
def test_an_empty_corpus_is_refused_and_nothing_is_sealed(
    tmp_path: Path, tiny_tokenizer: Path, values: list[str | None]
) -> None:
    write_parquet(tmp_path / "a.parquet", values)
    for _ in range(2):
        with pytest.raises(InputError, match="no document"):
            build_here(tmp_path / "a.parquet", tmp_path / "out", tiny_tokenizer)
    assert not (tmp_path / "out/manifest.json").exists()


def test_malformed_input_fails_or_is_skipped_and_a_failed_build_may_go_on_skipping(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", some_texts(100))
    path.write_bytes(path.read_bytes() + b'{"text": "half\n')
    with pytest.raises(InputError, match=r"a\.jsonl, line 101.*--on_error skip"):
        build_here(path, tmp_path / "out", tiny_tokenizer)
    assert not (tmp_path / "out/manifest.json").exists()
    assert not list((tmp_path / "out").rglob("*.tmp"))
    manifest = build_here(path, tmp_path / "out", tiny_tokenizer, on_error="skip")
    assert manifest.rejects == {"malformed_json": 1}
    assert manifest.splits["train"].num_documents == 100
    (samples,) = (tmp_path / "out/rejects").iterdir()
    assert json.loads(samples.read_text())["sample"] == '{"text": "half'
    with pytest.raises(CorpusError, match="on_error"):
        build_here(path, tmp_path / "out", tiny_tokenizer, on_error="fail")


def test_a_file_that_is_no_parquet_fails_or_is_skipped_and_counted(tmp_path: Path, tiny_tokenizer: Path) -> None:
    for part in range(3):
        write_parquet(tmp_path / f"raw/{part}.parquet", some_texts(10, seed=part))
    whole = (tmp_path / "raw/1.parquet").read_bytes()
    (tmp_path / "raw/1.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"1\.parquet"):
        build_here(tmp_path / "raw", tmp_path / "out", tiny_tokenizer)
    manifest = build_here(tmp_path / "raw", tmp_path / "out", tiny_tokenizer, on_error="skip", no_shuffle=True)
    assert texts_of(tmp_path / "out") == some_texts(10, seed=0) + some_texts(10, seed=2)
    assert manifest.rejects == {"corrupt": 1}


def test_limits_take_the_first_of_the_input(tmp_path: Path, tiny_tokenizer: Path) -> None:
    texts = some_texts(90)
    write_parquet(tmp_path / "raw/a.parquet", texts[:30], rows_a_group=8)
    write_jsonl(tmp_path / "raw/b.jsonl", texts[30:])
    for count in (5, 8, 30, 41):
        build_here(tmp_path / "raw", tmp_path / str(count), tiny_tokenizer, limit_documents=count)
        assert sorted(texts_of(tmp_path / str(count))) == sorted(texts[:count])
    build_here(tmp_path / "raw", tmp_path / "bytes", tiny_tokenizer, limit_bytes=2000, no_shuffle=True)
    found = texts_of(tmp_path / "bytes")
    assert found == texts[: len(found)]
    assert 0 < len(found) < 30


def test_long_documents_and_neighbours_are_whole(tmp_path: Path, tiny_tokenizer: Path) -> None:
    texts = ["before", "a" * 200_000, "between", "-" * 100_000, "語" * 60_000, "after"]
    write_jsonl(tmp_path / "a.jsonl", texts)
    manifest = build_here(tmp_path / "a.jsonl", tmp_path / "out", tiny_tokenizer, no_shuffle=True, shard_tokens=1000)
    assert texts_of(tmp_path / "out") == texts
    assert len(manifest.splits["train"].shards) > 2
    assert manifest.splits["train"].shards[0].num_documents == 2


# ---- the same folder again


@pytest.fixture
def built(tmp_path: Path, tiny_tokenizer: Path) -> Path:
    for part in range(3):
        write_jsonl(tmp_path / f"raw/{part}.jsonl", some_texts(50, seed=part))
    build_here(tmp_path / "raw", tmp_path / "out", tiny_tokenizer, val_fraction=0.1)
    return tmp_path / "out"


def test_the_same_build_again_is_a_no_op(built: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in built.rglob("*") if path.is_file()}
    build_here(built.parent / "raw", built, tiny_tokenizer, val_fraction=0.1, num_workers=7, batch_size=3)
    assert "already built" in capsys.readouterr().out
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in built.rglob("*") if path.is_file()}


def test_another_build_into_the_folder_is_refused_naming_the_difference(
    built: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    raw = tmp_path / "raw"
    before = files_of(built)
    with pytest.raises(CorpusError, match=r"val_fraction was 0\.1 and is 0\.2"):
        build_here(raw, built, tiny_tokenizer, val_fraction=0.2)
    other = write_tiny_tokenizer(tmp_path / "other", vocab_size=300)
    with pytest.raises(CorpusError, match="tokenizer was"):
        build_here(raw, built, other, val_fraction=0.1)
    with pytest.raises(CorpusError, match=r"2\.jsonl is no longer an input"):
        build_here([raw / "0.jsonl", raw / "1.jsonl"], built, tiny_tokenizer, val_fraction=0.1)
    os.utime(raw / "1.jsonl", ns=(1, 1))
    with pytest.raises(CorpusError, match=r"1\.jsonl: mtime_ns was"):
        build_here(raw, built, tiny_tokenizer, val_fraction=0.1)
    assert files_of(built) == before


def test_an_unfinished_build_goes_on_and_sweeps_what_no_receipt_names(
    built: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    before, rows = files_of(built), rows_of(built)
    (built / "manifest.json").unlink()
    for stray in (
        "train/shard-00009-000.tokens.npy",
        "train/shard-00000-001.ends.npy",
        "build/tasks/task-00077.json.tmp",
    ):
        (built / stray).write_bytes(b"stray")
    (built / "tokenizer.tmp").mkdir()
    build_here(tmp_path / "raw", built, tiny_tokenizer, val_fraction=0.1)
    assert (files_of(built), rows_of(built)) == (before, rows)
    assert not list(built.rglob("*.tmp"))


@pytest.mark.parametrize("lost", ["tokens.npy", "receipt"])
def test_a_task_that_lost_its_files_is_done_again(built: Path, tiny_tokenizer: Path, tmp_path: Path, lost: str) -> None:
    before = files_of(built)
    (built / "manifest.json").unlink()
    path = built / "build/tasks/task-00000.json" if lost == "receipt" else built / "train/shard-00000-000.tokens.npy"
    path.unlink()
    build_here(tmp_path / "raw", built, tiny_tokenizer, val_fraction=0.1)
    assert files_of(built) == before


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', "\xff\xfe{"])
def test_a_damaged_plan_is_named(built: Path, tiny_tokenizer: Path, tmp_path: Path, text: str, sealed: bool) -> None:
    if not sealed:
        (built / "manifest.json").unlink()
    (built / "build/plan.json").write_text(text, encoding="latin-1")
    with pytest.raises(CorpusError, match=r"out/build/plan\.json.*or delete this one to build it again"):
        build_here(tmp_path / "raw", built, tiny_tokenizer, val_fraction=0.1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda receipt: receipt[:40],
        lambda receipt: b"null",
        lambda receipt: b"{}",
        lambda receipt: receipt.replace(b'"rejects": {', b'"rejects": 3, "was": {'),
        lambda receipt: receipt.replace(b'"num_tokens"', b'"tokens"'),
    ],
)
def test_a_damaged_receipt_is_named_and_without_it_the_task_is_run_again(
    built: Path, tiny_tokenizer: Path, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    before = files_of(built)
    (built / "manifest.json").unlink()
    receipt = built / "build/tasks/task-00000.json"
    assert damage(receipt.read_bytes()) != receipt.read_bytes()
    receipt.write_bytes(damage(receipt.read_bytes()))
    with pytest.raises(CorpusError, match=r"task-00000\.json.*Delete this file and run the same command again"):
        build_here(tmp_path / "raw", built, tiny_tokenizer, val_fraction=0.1)
    receipt.unlink()
    build_here(tmp_path / "raw", built, tiny_tokenizer, val_fraction=0.1)
    assert files_of(built) == before


def test_a_folder_with_other_files_is_refused(tmp_path: Path, tiny_tokenizer: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    (tmp_path / "out").mkdir()
    build_here(tmp_path / "a.jsonl", tmp_path / "out", tiny_tokenizer)
    for name, content in {"notes.txt": "mine", "manifest.json": "{}"}.items():
        (tmp_path / name.split(".")[0]).mkdir()
        (tmp_path / name.split(".")[0] / name).write_text(content)
        with pytest.raises(CorpusError, match="output folder holds"):
            build_here(tmp_path / "a.jsonl", tmp_path / name.split(".")[0], tiny_tokenizer)
    with pytest.raises(CorpusError, match="not a folder"):
        build_here(tmp_path / "a.jsonl", tmp_path / "a.jsonl", tiny_tokenizer)


def test_the_second_build_at_a_time_is_refused(tmp_path: Path, tiny_tokenizer: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    with exclusive_lock(tmp_path / "out" / LOCK, what="x"), pytest.raises(FlameError, match="another process"):
        build_here(tmp_path / "a.jsonl", tmp_path / "out", tiny_tokenizer)
    build_here(tmp_path / "a.jsonl", tmp_path / "out", tiny_tokenizer)


def test_a_kill_while_sealing_leaves_what_sealing_again_completes(
    built: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    again = tmp_path / "again"
    for place in ("first_copies", "write_manifest", "remove_tree"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(f"flame.preprocess.seal.{place}", die)
            build_here(tmp_path / "raw", again, tiny_tokenizer, val_fraction=0.1)
        assert (again / "manifest.json").exists() == (place == "remove_tree")
    assert (again / VAL_PARTS).exists()
    build_here(tmp_path / "raw", again, tiny_tokenizer, val_fraction=0.1)
    assert same_corpus(built, again)
    assert not (again / VAL_PARTS).exists()


# ---- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_probs": "0.5,0.5"}, "flame-mix"),
        ({"where": "score >"}, "--where is no expression"),
        ({"val_fraction": 1.0}, "val_fraction"),
        ({"val_fraction": float("nan")}, "val_fraction"),
        ({"limit_documents": 0}, "limit_documents"),
        ({"batch_size": 4096}, "batch_size"),
        ({"keep_columns": ("row",)}, "'row'"),
        ({"keep_columns": ("a", "a")}, "twice"),
        ({"keep_columns": ("a",), "provenance": False}, "provenance"),
    ],
)
def test_what_cannot_be_asked_is_a_wrong_call(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BuildOptions(dataset=("x",), tokenizer=tmp_path, output=tmp_path, **options)


def test_nothing_is_written_before_inputs_and_tokenizer_are_known_good(tmp_path: Path, tiny_tokenizer: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    (tmp_path / "b.jsonl").write_text('{"body": "x"}\n')
    for dataset, tokenizer in (("absent", tiny_tokenizer), ("a.jsonl", tmp_path / "no"), ("b.jsonl", tiny_tokenizer)):
        with pytest.raises(FlameError):
            build_here(tmp_path / dataset, tmp_path / "out", tokenizer)
    assert not (tmp_path / "out").exists()


def test_the_plan_covers_every_option_that_decides_bytes(tmp_path: Path, tiny_tokenizer: Path) -> None:
    """Each of these options, changed, must change the digest; the others must not."""
    write_jsonl(tmp_path / "a.jsonl", ["x", "y"])
    tokenizer = build_module.read_tokenizer(tiny_tokenizer, eos_token=None, bos="auto", parse_special=False)
    found = build_module.find_inputs([str(tmp_path / "a.jsonl")], data_dir=None, data_files=())

    def digest(**options: Any) -> str:
        chosen = BuildOptions(dataset=("a",), tokenizer=tiny_tokenizer, output=tmp_path / "out", **options)
        return build_module.make_plan(chosen, found, tokenizer).digest

    deciding: list[dict[str, Any]] = [
        {"seed": 1},
        {"no_shuffle": True},
        {"shuffle_block_tokens": 5},
        {"shard_tokens": 5},
        {"val_fraction": 0.5},
        {"limit_documents": 1},
        {"limit_bytes": 1},
        {"keep_columns": ("url",)},
        {"provenance": False},
        {"where": "true"},
        {"min_chars": 2},
        {"max_chars": 3},
        {"dedup": "exact"},
        {"max_tokens_per_document": 9},
        {"max_tokens_per_document": 9, "long_documents": "split"},
    ]
    assert len({digest(), *(digest(**options) for options in deciding)}) == len(deciding) + 1
    for options in ({"num_workers": 3}, {"batch_size": 5}, {"engine": "hf"}, {"on_error": "skip"}):
        assert digest(**options) == digest()
