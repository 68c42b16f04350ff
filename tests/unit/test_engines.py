"""Fast engines: the same ids as the reference, and each check catches a wrong engine with the others off."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flame.errors import TokenizerError, UsageError
from flame.preprocess import engine_check
from flame.preprocess.engine_check import Encoder, battery, compared, load_encoder
from flame.preprocess.engine_screen import (
    SCREEN_KIND,
    Screen,
    make_screen,
    read_screen,
    screen_key,
    to_ranges,
    unequal,
    write_screen,
)
from flame.preprocess.engines import ENGINES, Encode, Engine, Recycled, bounded_parts, json_for_fast_engines
from flame.preprocess.user_cache import user_cache
from tests.builds import build_here, files_of, rows_of, run_build, some_texts, write_parquet
from tests.builds import environment as fresh_environment
from tests.tokenizers import EOS
from tools.fuzz_engines import added_tokens, differing, strings

FAST = ("gigatoken", "fastokens")
NAMES = ("gpt2", "qwen3", "mistral_v1")
NONE = Screen(ranges=(), num_differing=0)


def load(name: str, content: bytes, *, parse_special: bool = False) -> Encode:
    if not ENGINES[name].installed:
        pytest.skip(f"{name} is not installed")
    return ENGINES[name].load(content, parse_special)


def array(texts: list[str]) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


# ---- equal to the reference


@pytest.mark.shared_data
@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("name", NAMES)
def test_real_documents_have_the_ids_of_the_reference(shared_data: Path, name: str, engine: str) -> None:
    """300 documents of each file; all of them with FLAME_ALL_DOCUMENTS=1."""
    content = (shared_data / "tokenizers" / name / "tokenizer.json").read_bytes()
    fast, reference = load(engine, content), load("hf", content)
    for path in sorted((shared_data / "web_sample").glob("*.parquet")):
        texts = pq.read_table(path, columns=["text"]).column("text").cast(pa.large_string()).combine_chunks()
        last = len(texts) if os.environ.get("FLAME_ALL_DOCUMENTS") else 300
        for start in range(0, last, 1000):
            batch = texts.slice(start, min(1000, last - start))
            assert unequal(fast(batch), reference(batch)).tolist() == []


@pytest.mark.shared_data
@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("name", NAMES)
def test_strings_of_every_kind_have_the_ids_of_the_reference(shared_data: Path, name: str, engine: str) -> None:
    content = (shared_data / "tokenizers" / name / "tokenizer.json").read_bytes()
    fast, reference = load(engine, content), load("hf", content)
    source = strings(1, added_tokens(content))
    texts = [next(source) for _ in range(3000)] + battery(content)
    bare = differing(texts, fast, reference)
    screen = make_screen(fast, reference, sorted({ord(letter) for text in texts for letter in text}))
    assert screen.refusal is None
    assert differing(texts, Encoder(name=engine, reference=reference, fast=fast, screen=screen).encode, reference) == []
    if (name, engine) == ("qwen3", "gigatoken"):
        assert bare, "it follows another version of Unicode: without its screen it differs"
        assert screen.find(array(["a\u07fd\u0301 \u0323"])).tolist() == [False]


@pytest.mark.parametrize("engine", FAST)
@pytest.mark.parametrize("parse_special", [False, True])
def test_text_like_a_special_token_is_as_the_reference_takes_it(
    tiny_tokenizer: Path, engine: str, parse_special: bool
) -> None:
    content = json.loads((tiny_tokenizer / "tokenizer.json").read_bytes())
    new_id = max(content["model"]["vocab"].values()) + 1
    added = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": False}
    content["added_tokens"].append({"id": new_id, "content": "<think>", **added})
    changed = json.dumps(content).encode()
    texts = [f"a {EOS} b", EOS, "x<think>y", "<think", f"<think>{EOS}<think>", "plain"]
    fast, reference = (load(name, changed, parse_special=parse_special) for name in (engine, "hf"))
    assert unequal(fast(array(texts)), reference(array(texts))).tolist() == []
    assert new_id in fast(array(["x<think>y"]))[0]
    assert (0 in fast(array([EOS]))[0]) == parse_special


def test_a_token_that_overlaps_a_special_one_is_left_to_the_reference(tiny_tokenizer: Path) -> None:
    content = json.loads((tiny_tokenizer / "tokenizer.json").read_bytes())
    for token in (EOS[:4], EOS[-3:] + "x", "x" + EOS[:2]):
        plain = {"id": 600, "content": token, "special": False}
        changed = json.dumps(content | {"added_tokens": [*content["added_tokens"], plain]}).encode()
        with pytest.raises(TokenizerError, match="cannot be told from special ones"):
            json_for_fast_engines(changed, False)
        assert json.loads(json_for_fast_engines(changed, True))["added_tokens"][-1] == plain


def test_the_copy_for_fast_engines_keeps_the_model_wherever_it_stands(tiny_tokenizer: Path) -> None:
    content = json.loads((tiny_tokenizer / "tokenizer.json").read_bytes())
    for names in (list(content), list(reversed(content))):
        copy = json.loads(json_for_fast_engines(json.dumps({name: content[name] for name in names}).encode(), False))
        assert copy["model"] == content["model"]
        assert copy["pre_tokenizer"] == content["pre_tokenizer"]
        assert copy["added_tokens"] == []


@pytest.mark.parametrize("engine", FAST)
def test_two_megabytes_without_a_space_among_others(tiny_tokenizer: Path, engine: str) -> None:
    content = (tiny_tokenizer / "tokenizer.json").read_bytes()
    texts = ["before", "a" * 2_000_000, "-" * 2_000_000, "日本" * 300_000, "after"]
    assert unequal(load(engine, content)(array(texts)), load("hf", content)(array(texts))).tolist() == []


def test_an_engine_that_has_grown_is_loaded_afresh_unless_giving_back_was_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    given_back: list[int] = []
    monkeypatch.setattr("flame.preprocess.engines.resident_bytes", lambda: sizes.pop(0))
    monkeypatch.setattr("flame.preprocess.engines.give_memory_back", lambda: given_back.append(1))
    monkeypatch.setattr("flame.preprocess.engines.GROWTH_BYTES", 7)
    monkeypatch.setattr("flame.preprocess.engines.CACHE_BYTES", 5)
    loads = iter("ab")
    sizes[:] = [10]  # the baseline
    recycled = Recycled(lambda: next(loads))
    for found, expected, times in (([17], "a", 0), ([18, 15], "a", 1), ([18, 16, 12], "b", 3), ([19], "b", 3)):
        sizes[:] = found
        assert recycled.get() == expected and len(given_back) == times and not sizes


@given(st.lists(st.text(max_size=9), max_size=20), st.integers(1, 30))
def test_bounded_parts_hold_every_text_once(texts: list[str], most: int) -> None:
    parts = list(bounded_parts(array(texts), most))
    assert [text for part in parts for text in part.to_pylist()] == texts
    assert all(len(part) <= 1 or sum(len(text.encode()) for text in part.to_pylist()) <= most for part in parts)


# ---- the screen


@given(st.lists(st.text(max_size=30), max_size=12), st.sets(st.integers(0x80, 0x10FFFF), max_size=20), st.data())
def test_find_tells_which_texts_hold_a_screened_code_point(texts: list[str], codes: set[int], data: Any) -> None:
    codes |= {ord(letter) for text in texts[::2] for letter in text[:1] if ord(letter) >= 0x80}
    screen = Screen(ranges=to_ranges(codes), num_differing=0)
    start = data.draw(st.integers(0, len(texts)))
    expected = [any(ord(letter) in codes for letter in text) for text in texts]
    assert screen.find(array(texts).slice(start)).tolist() == expected[start:]


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_the_numbers_they_are_made_of(codes: set[int]) -> None:
    ranges = to_ranges(codes)
    assert [code for first, last in ranges for code in range(first, last + 1)] == sorted(codes)
    assert all(one[1] + 1 < two[0] for one, two in itertools.pairwise(ranges))


def test_a_screen_is_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    key = screen_key("gigatoken", b"{}", False)
    assert key != screen_key("gigatoken", b"{}", True)
    screen = Screen(ranges=((0x80, 0x90), (0x1F600, 0x1F600)), num_differing=2)
    write_screen(user_cache(SCREEN_KIND, key), screen, key)
    assert user_cache(SCREEN_KIND, key).is_relative_to(tmp_path / "cache" / "flame")
    assert read_screen([tmp_path / "absent", user_cache(SCREEN_KIND, key)], key) == screen
    assert read_screen([user_cache(SCREEN_KIND, key)], "sha256:other") is None
    user_cache(SCREEN_KIND, key).write_bytes(user_cache(SCREEN_KIND, key).read_bytes()[:20])
    assert read_screen([user_cache(SCREEN_KIND, key)], key) is None
    write_screen(Path("/proc/none/screen.json"), screen, key)  # cannot be written: no error


# ---- each check by itself: a wrong engine, the others off


def wrong_on(part: str) -> Callable[[bytes, bool], Encode]:
    """A loader of an engine that is the reference, but adds 1 to the first id of texts that hold `part`."""

    def load_wrong(content: bytes, parse_special: bool) -> Encode:
        reference = ENGINES["hf"].load(content, parse_special)

        def encode(texts: pa.LargeStringArray) -> Any:
            ids, lengths = reference(texts)
            wrong = [part in text for text in texts.to_pylist()]
            ids[(np.cumsum(lengths) - lengths)[np.array(wrong, dtype=bool)]] += 1
            return ids, lengths

        return encode

    return load_wrong


def broken(content: bytes, parse_special: bool) -> Encode:
    reference = ENGINES["hf"].load(content, parse_special)

    def encode(texts: pa.LargeStringArray) -> Any:
        if any("corpus 7" in text for text in texts.to_pylist()):
            raise BaseException("a panic")
        return reference(texts)

    return encode


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Put a wrong engine in gigatoken's place, and all checks off but those named."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def use(load_engine: Callable[[bytes, bool], Encode], *on: str) -> None:
        engine = Engine(package="numpy", load=load_engine, batch_bytes=2**20)
        monkeypatch.setitem(ENGINES, "gigatoken", engine)
        made = partial(make_screen, codes=range(0x500)) if "screen" in on else lambda *_: NONE
        monkeypatch.setattr(engine_check, "make_screen", made)
        if "battery" not in on:
            monkeypatch.setattr(engine_check, "battery", lambda _: [])
        if "compared" not in on:
            monkeypatch.setattr("flame.preprocess.tokenize.compared", lambda *_: np.zeros(0, dtype=np.int64))

    return use


def test_the_screen_alone_sends_to_the_reference_what_differs(
    checks: Callable[..., None], tmp_path: Path, tiny_tokenizer: Path
) -> None:
    checks(wrong_on("Ж"), "screen")
    texts = some_texts(300)
    texts[7], texts[8], texts[250] = "Жук", "a Ж b", "end Ж"
    built = check_build(tmp_path, tiny_tokenizer, texts)
    assert (built["name"], built["redone_tasks"]) == ("gigatoken", 0)
    assert json.loads((tmp_path / "fast" / "build" / "engine-screen.json").read_text())["num_differing"] >= 1


def test_the_screen_refuses_what_differs_on_ascii(
    checks: Callable[..., None], tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks(wrong_on("\t"), "screen")
    assert check_build(tmp_path, tiny_tokenizer, some_texts(50))["name"] == "hf"
    assert "gigatoken is not used: it differs from the reference on '\\t'" in capsys.readouterr().err


def test_the_battery_alone_refuses_an_engine(
    checks: Callable[..., None], tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks(wrong_on("1234567"), "battery")
    assert check_build(tmp_path, tiny_tokenizer, ["a 1234567", *some_texts(50)])["name"] == "hf"
    assert "gigatoken is not used: it differs from the reference on '1234567'" in capsys.readouterr().err


@pytest.mark.parametrize("load_engine", [wrong_on("corpus 7"), broken])
def test_a_difference_while_building_redoes_the_task_and_no_other(
    checks: Callable[..., None],
    load_engine: Callable[[bytes, bool], Encode],
    tmp_path: Path,
    tiny_tokenizer: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks(load_engine, "compared")
    texts = [f"{i} " + "some words that fill a task " * 30 for i in range(300)]
    texts[5] = "the corpus 7"
    built = check_build(tmp_path, tiny_tokenizer, texts, no_shuffle=True, shard_tokens=20_000)
    receipts = [json.loads(path.read_text()) for path in sorted((tmp_path / "fast/build/tasks").glob("*.json"))]
    assert (built["name"], built["redone_tasks"]) == ("gigatoken", 1)
    assert [receipt["engine"] for receipt in receipts] == ["hf", *["gigatoken"] * (len(receipts) - 1)]
    assert len(receipts) > 2
    said = capsys.readouterr().err
    assert "task 0 is done again with the reference: gigatoken erred on" in said
    assert str(tmp_path / "raw.parquet") in receipts[0]["redone"]
    assert load_engine is broken or "raw.parquet, row 5: " in said


def test_an_unfinished_build_goes_on_with_another_engine(
    checks: Callable[..., None], tmp_path: Path, tiny_tokenizer: Path
) -> None:
    checks(wrong_on("never there"), "compared")
    check_build(tmp_path, tiny_tokenizer, some_texts(900), shard_tokens=5_000, val_fraction=0.0)
    receipts = sorted((tmp_path / "slow/build/tasks").glob("*.json"))
    assert len(receipts) > 1
    for path in (receipts[1], tmp_path / "slow/manifest.json"):
        path.unlink()
    manifest = build_here(
        tmp_path / "raw.parquet",
        tmp_path / "slow",
        tiny_tokenizer,
        val_fraction=0.0,
        shard_tokens=5_000,
        engine="gigatoken",
    )
    assert manifest.engine["name"] == "gigatoken"
    assert [json.loads(path.read_text())["engine"] for path in receipts[:3]] == ["hf", "gigatoken", "hf"]
    assert files_of(tmp_path / "fast") == files_of(tmp_path / "slow")


def check_build(tmp_path: Path, tokenizer: Path, texts: list[str], **options: Any) -> dict[str, Any]:
    """Build with `--engine gigatoken` and the reference, compare, and return what the manifest says of the engine."""
    raw = write_parquet(tmp_path / "raw.parquet", texts)
    options = {"val_fraction": 0.1, **options}
    fast = build_here(raw, tmp_path / "fast", tokenizer, engine="gigatoken", **options)
    build_here(raw, tmp_path / "slow", tokenizer, engine="hf", **options)
    assert files_of(tmp_path / "fast") == files_of(tmp_path / "slow")
    assert rows_of(tmp_path / "fast") == rows_of(tmp_path / "slow")
    return dict(fast.engine)


def test_which_documents_are_compared_depends_on_task_and_place_only() -> None:
    assert compared(0, 0, 100)[:64].tolist() == list(range(64))
    whole = compared(3, 0, 100_000)
    assert 60 < len(whole) < 140
    parts = [start + compared(3, start, 777) for start in range(0, 100_000, 777)]
    assert np.concatenate(parts)[: len(whole)].tolist() == whole.tolist()
    assert whole.tolist() != compared(4, 0, 100_000).tolist()


# ---- which engine


def test_auto_takes_the_first_that_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_tokenizer: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(engine_check, "make_screen", lambda *_: NONE)
    content = (tiny_tokenizer / "tokenizer.json").read_bytes()

    def refuse(*_: object) -> Encode:
        raise ValueError("not mine")

    said: list[str] = []
    choose = partial(load_encoder, tokenizer_json=content, parse_special=False, say=said.append)
    assert choose("hf").name == "hf"
    assert choose("auto", small_input=True).name == "hf"
    assert "so little text" in said[-1]
    assert choose("auto").name == "gigatoken"
    assert choose("auto", small_input=True).name == "gigatoken", "its screen is kept"
    absent = Engine(package="no_such_package", load=refuse, batch_bytes=1)
    second = Engine(package="numpy", load=wrong_on("never there"), batch_bytes=1)
    monkeypatch.setitem(ENGINES, "gigatoken", absent)
    monkeypatch.setitem(ENGINES, "fastokens", second)
    assert choose("auto").name == "fastokens"
    monkeypatch.setitem(ENGINES, "fastokens", Engine(package="numpy", load=refuse, batch_bytes=1))
    assert choose("auto").name == choose("fastokens").name == "hf"
    assert "fastokens is not used: it cannot serve this tokenizer (not mine)" in said
    with pytest.raises(UsageError, match="pip install no_such_package"):
        engine_check.require_installed("gigatoken")


# ---- in processes


@pytest.mark.parametrize("engine", FAST)
def test_a_build_in_processes_is_the_references(tmp_path: Path, tiny_tokenizer: Path, engine: str) -> None:
    """Threads allowed or not, one worker or three: the loader forks after it has loaded the engine."""
    content = (tiny_tokenizer / "tokenizer.json").read_bytes()
    fast, reference = load(engine, content), load("hf", content)
    raw = write_parquet(tmp_path / "raw.parquet", [text * 10 for text in some_texts(2000)])
    key = screen_key(engine, content, False)
    write_screen(
        tmp_path / "cache/flame" / user_cache(SCREEN_KIND, key).name,
        make_screen(fast, reference, range(0x80, 0x700)),
        key,
    )
    built = []
    for number, (workers, parallel) in enumerate([(1, "true"), (3, "false")]):
        env = fresh_environment(XDG_CACHE_HOME=str(tmp_path / "cache"), TOKENIZERS_PARALLELISM=parallel)
        out = tmp_path / f"fast{number}"
        result = run_build(raw, out, tiny_tokenizer, env=env, engine=engine, num_workers=workers)
        assert result.returncode == 0, result.stderr
        assert json.loads((out / "manifest.json").read_text())["engine"]["name"] == engine
        built.append(files_of(out))
    build_here(raw, tmp_path / "slow", tiny_tokenizer, engine="hf")
    assert built[0] == built[1] == files_of(tmp_path / "slow")
