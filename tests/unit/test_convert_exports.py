"""Corpora as Megatron's and datatrove's token files: their bytes, and that nothing half-written or changed is left."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flame.config import options_of
from flame.errors import CorpusError, FlameError, UsageError
from flame.files import exclusive_lock, publish
from flame.preprocess.convert_config import ConvertOptions
from flame.preprocess.exports import boundaries
from flame.preprocess.exports import export as exporting
from flame.preprocess.exports.formats import EXPORTS
from flame.shards.format import TOKEN_DTYPE, npy_header
from tests.builds import build_here, documents_of, files_of, some_texts, write_parquet
from tests.indexed import FORMATS, leave, put, run, write, write_datatrove, write_megatron
from tests.tokenizers import write_tiny_tokenizer


@pytest.fixture(scope="module")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("indexed") / "tok")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tok: Path) -> Path:
    """A corpus of several shards with a held-out split."""
    folder = tmp_path_factory.mktemp("corpus")
    write_parquet(folder / "raw/a.parquet", some_texts(500))
    build_here(folder / "raw", folder / "web", tok, val_fraction=0.1, shard_tokens=3000, shuffle_block_tokens=2000)
    return folder / "web"


def test_the_bytes_of_megatron(tmp_path: Path, tok: Path) -> None:
    run("megatron", write_megatron(tmp_path / "in/a", [[[70, 71]], [[72]]]), tmp_path / "web", tok)
    leave("megatron", tmp_path / "web", tmp_path / "out/web")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["web.bin", "web.idx"]
    assert (tmp_path / "out/web.bin").read_bytes() == struct.pack("<5H", 70, 71, 0, 72, 0)
    assert (tmp_path / "out/web.idx").read_bytes() == (
        b"MMIDIDX\0\0" + struct.pack("<QBQQ2i2q3q", 1, 8, 2, 3, 3, 2, 0, 6, 0, 1, 2)
    )
    leave("megatron", tmp_path / "web", tmp_path / "out/wide.bin", dtype="int32")
    assert (tmp_path / "out/wide.bin").read_bytes() == struct.pack("<5i", 70, 71, 0, 72, 0)
    assert (tmp_path / "out/wide.idx").read_bytes() == (
        b"MMIDIDX\0\0" + struct.pack("<QBQQ2i2q3q", 1, 4, 2, 3, 3, 2, 0, 12, 0, 1, 2)
    )


def test_the_bytes_of_datatrove(tmp_path: Path, tok: Path) -> None:
    run("datatrove", write_datatrove(tmp_path / "in/a", [[70, 71], [72]]), tmp_path / "web", tok)
    for name, options, kind in (("web", {}, "H"), ("wide", {"dtype": "uint32"}, "I")):
        leave("datatrove", tmp_path / "web", tmp_path / "out" / name / name, **options)
        found = {path.name: path.read_bytes() for path in (tmp_path / "out" / name).iterdir()}
        tokenizer = tmp_path / "web/tokenizer/tokenizer.json"
        assert found.pop(f"{name}.ds.metadata").decode().splitlines()[:2] == [
            f"{tokenizer}|{struct.calcsize(kind)}",
            "5",
        ]
        assert found == {
            f"{name}.ds": struct.pack(f"<5{kind}", 70, 71, 0, 72, 0),
            f"{name}.ds.index": struct.pack("<2Q", 3, 5),
        }


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("split", ["train", "val"])
def test_there_and_back_every_document_is_the_same(
    tmp_path: Path, tok: Path, corpus: Path, form: str, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "CHUNK_TOKENS", 700)
    monkeypatch.setattr(boundaries, "STRETCH_TOKENS", 37)  # shorter than most documents: many stretches hold no end
    leave(form, corpus, tmp_path / "out/web", split=split)
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix in (".tmp", ".lock")]
    run(form, tmp_path / "out", tmp_path / "back", tok)
    assert documents_of(tmp_path / "back") == documents_of(corpus, split)


@pytest.mark.parametrize("form", FORMATS)
def test_where_shards_are_cut_alike_the_fingerprint_comes_back(tmp_path: Path, tok: Path, form: str) -> None:
    write_parquet(tmp_path / "raw/a.parquet", some_texts(300), rows_a_group=300)
    built = build_here(tmp_path / "raw", tmp_path / "web", tok, no_shuffle=True)
    leave(form, tmp_path / "web", tmp_path / "out/web")
    manifest = run(form, tmp_path / "out/web", tmp_path / "back", tok)
    assert manifest.fingerprint == built.fingerprint
    assert files_of(tmp_path / "back") == files_of(tmp_path / "web")


def test_the_vocabulary_decides_how_wide_an_id_is(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(form: str, *, vocab_size: int, largest: int = 400, dtype: str = "auto") -> str:
        manifest = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=vocab_size))
        split = SimpleNamespace(
            max_token_id=largest, name="train", corpus=SimpleNamespace(path=Path("web"), manifest=manifest)
        )
        options = ConvertOptions(to=form, corpus=corpus, output=tmp_path / "x", dtype=dtype)
        return exporting.choose_dtype(EXPORTS[form], options, split)  # type: ignore[arg-type]

    for form, wide in (("megatron", "int32"), ("datatrove", "uint32")):
        assert chosen(form, vocab_size=65536) == "uint16"
        assert chosen(form, vocab_size=65537) == wide
        assert chosen(form, vocab_size=65536, largest=65536) == wide
        assert chosen(form, vocab_size=10, dtype=wide) == wide
        assert chosen(form, vocab_size=65537, dtype="uint16") == "uint16"
        with pytest.raises(CorpusError, match=r"largest id of 65536; expected at most 65535"):
            chosen(form, vocab_size=10, largest=65536, dtype="uint16")
    with pytest.raises(UsageError, match="expected uint16 or int32"):
        chosen("megatron", vocab_size=10, dtype="uint32")
    with pytest.raises(UsageError, match="expected uint16 or uint32"):
        chosen("datatrove", vocab_size=10, dtype="int32")


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_is_written_over_and_a_part_is_told_as_such(tmp_path: Path, corpus: Path, form: str) -> None:
    leave(form, corpus, tmp_path / "out/web")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(FlameError, match="the output is there already"):
        leave(form, corpus, tmp_path / "out/web")
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    index = next(path for path in before if path.suffix in (".idx", ".index"))
    index.unlink()
    with pytest.raises(FlameError, match="a part of the output is there already"):
        leave(form, corpus, tmp_path / "out/web")
    with pytest.raises(UsageError, match=r"--output is a folder.*expected .*out/NAME"):
        leave(form, corpus, tmp_path / "out")
    with pytest.raises(CorpusError, match="no split 'test'"):
        leave(form, corpus, tmp_path / "new", split="test")


@pytest.mark.parametrize("form", FORMATS)
def test_an_empty_split_is_refused(tmp_path: Path, tok: Path, form: str) -> None:
    run(form, write(form, tmp_path / "in/a", [[70, 71]]), tmp_path / "web", tok, val_fraction=0.001)
    with pytest.raises(CorpusError, match=r"no documents.*--split val"):
        leave(form, tmp_path / "web", tmp_path / "out/web", split="val")


@pytest.mark.parametrize("form", FORMATS)
def test_a_damaged_shard_leaves_no_file_behind(tmp_path: Path, tok: Path, form: str) -> None:
    run("datatrove", write_datatrove(tmp_path / "in/a", [[70, 71], [72]]), tmp_path / "web", tok)
    (shard,) = (tmp_path / "web/train").glob("*.tokens.npy")
    put(shard, 128 + 4, "<I", 75)
    with pytest.raises(CorpusError, match=r"not those that were sealed.*tokens\.npy"):
        leave(form, tmp_path / "web", tmp_path / "out/web")
    shard.write_bytes(npy_header(TOKEN_DTYPE, 4) + bytes(16))
    with pytest.raises(CorpusError, match=r"not the one in the manifest.*got 4 tokens; expected 5 tokens"):
        leave(form, tmp_path / "web", tmp_path / "out/web")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CorpusError, match=r"cut short.*tokens\.npy"):
        leave(form, tmp_path / "web", tmp_path / "out/web")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("form", FORMATS)
def test_one_that_is_stopped_leaves_nothing_and_the_leavings_of_a_killed_one_do_no_harm(
    tmp_path: Path, corpus: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(exporting.os, "fsync", stop)
        leave(form, corpus, tmp_path / "out/web")
    assert not list((tmp_path / "out").iterdir())
    leave(form, corpus, tmp_path / "whole/web")
    expected = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    for name in (*(f"{name}.tmp" for name in expected), "web.lock"):
        (tmp_path / "out" / name).write_bytes(b"of a process that was killed" * 1000)
    leave(form, corpus, tmp_path / "out/web")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == expected


@pytest.mark.parametrize("form", FORMATS)
def test_two_at_a_time_do_not_write_one_output(tmp_path: Path, corpus: Path, form: str) -> None:
    with (
        exclusive_lock(tmp_path / "out/web.lock", what="this output"),
        pytest.raises(FlameError, match="another process is already working on this output"),
    ):
        leave(form, corpus, tmp_path / "out/web")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["web.lock"]


@pytest.mark.parametrize("form", FORMATS)
def test_the_index_appears_last(tmp_path: Path, corpus: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[str] = []

    def record(temporary: Path, final: Path) -> None:
        publish(temporary, final)
        published.append(final.name)

    monkeypatch.setattr(exporting, "publish", record)
    leave(form, corpus, tmp_path / "out/web")
    first, last = {"megatron": ("web.bin", "web.idx"), "datatrove": ("web.ds", "web.ds.index")}[form]
    assert (published[0], published[-1]) == (first, last)


# ---- the call


def test_the_two_directions_do_not_mix(tmp_path: Path) -> None:
    def refused(shown: str, **options: Any) -> None:
        with pytest.raises(UsageError, match=shown):
            ConvertOptions(output=tmp_path / "x", **options)

    refused("--from or --to, not both", from_="megatron", to="megatron")
    refused("expected --from FORMAT --input PATH --tokenizer PATH, or --to FORMAT --corpus PATH")
    refused("--from megatron needs --input and --tokenizer", from_="megatron")
    refused("--to datatrove needs --corpus", to="datatrove")
    refused("--to datatrove does not take --val_fraction", to="datatrove", corpus=tmp_path, val_fraction=0.5)
    refused(
        "--from megatron does not take --dtype", from_="megatron", input=tmp_path, tokenizer=tmp_path, dtype="int32"
    )


def test_the_formats_that_may_be_asked_for_are_those_that_there_are() -> None:
    options = {option.name: option for option in options_of(ConvertOptions)}
    assert options["to"].info.choices == tuple(EXPORTS)
    dtypes = dict.fromkeys(dtype for export in EXPORTS.values() for dtype in export.dtypes)
    assert options["dtype"].info.choices == ("auto", *dtypes)
