"""Megatron's and datatrove's token files, both ways: their bytes, their damage, and that no id or boundary moves."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.config import options_of
from flame.errors import CorpusError, FlameError, InputError, UsageError
from flame.files import exclusive_lock, publish
from flame.preprocess.convert import convert
from flame.preprocess.convert_config import ConvertOptions
from flame.preprocess.exports import boundaries
from flame.preprocess.exports import export as exporting
from flame.preprocess.exports.formats import EXPORTS
from flame.preprocess.plan import Piece, cut_file
from flame.preprocess.readers.columns import Columns
from flame.preprocess.sources import indexed
from flame.preprocess.sources.datatrove import LAYOUT as DATATROVE
from flame.preprocess.sources.formats import SOURCES
from flame.preprocess.sources.megatron import LAYOUT as MEGATRON
from flame.shards.format import TOKEN_DTYPE, npy_header
from flame.shards.manifest import Manifest, read_manifest
from tests.builds import build_here, documents_of, files_of, rows_of, some_texts, write_parquet
from tests.tokenizers import write_tiny_tokenizer

EOS_ID = 0
FORMATS = ("megatron", "datatrove")
NO_COLUMNS = Columns(text="", kept=pa.schema([]))
Documents = Sequence[Sequence[int]]


@pytest.fixture(scope="module")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("indexed") / "tok")


def write_megatron(prefix: Path, documents: Sequence[Documents], dtype: str = "uint16") -> Path:
    """Write documents, each a list of sequences; returns the token file."""
    code = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}[dtype]
    sequences = [sequence for document in documents for sequence in document]
    ids = np.array([token for sequence in sequences for token in sequence], dtype=dtype)
    lengths = np.array([len(sequence) for sequence in sequences], dtype="<i4")
    pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * ids.itemsize
    indices = np.cumsum([0, *map(len, documents)], dtype="<i8")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(prefix.name + ".bin").write_bytes(ids.tobytes())
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(indices))
    prefix.with_name(prefix.name + ".idx").write_bytes(
        head + lengths.tobytes() + pointers.astype("<i8").tobytes() + indices.tobytes()
    )
    return prefix.with_name(prefix.name + ".bin")


def write_datatrove(prefix: Path, documents: Documents, dtype: str = "uint16", metadata: str | None = None) -> Path:
    """Write documents; returns the token file."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    tokens = prefix.with_name(prefix.name + ".ds")
    tokens.write_bytes(np.array([token for document in documents for token in document], dtype=dtype).tobytes())
    tokens.with_name(tokens.name + ".index").write_bytes(np.cumsum([*map(len, documents)], dtype="<u8").tobytes())
    if metadata is not None:
        tokens.with_name(tokens.name + ".metadata").write_text(metadata)
    return tokens


def write(form: str, prefix: Path, documents: Documents, dtype: str = "uint16") -> Path:
    if form == "megatron":
        return write_megatron(prefix, [[document] for document in documents], dtype)
    return write_datatrove(prefix, documents, dtype)


def run(form: str, place: Path, output: Path, tok: Path, **options: Any) -> Manifest:
    chosen = {"no_shuffle": True, "num_workers": 1, **options}
    assert convert(ConvertOptions(from_=form, input=place, tokenizer=tok, output=output, **chosen)) == 0
    return read_manifest(output)


def leave(form: str, corpus: Path, output: Path, **options: Any) -> None:
    assert convert(ConvertOptions(to=form, corpus=corpus, output=output, **options)) == 0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, tok: Path) -> Path:
    """A corpus of several shards with a held-out split."""
    folder = tmp_path_factory.mktemp("corpus")
    write_parquet(folder / "raw/a.parquet", some_texts(500))
    build_here(folder / "raw", folder / "web", tok, val_fraction=0.1, shard_tokens=3000, shuffle_block_tokens=2000)
    return folder / "web"


# ---- from


@pytest.mark.parametrize("form", FORMATS)
def test_several_files_of_a_folder_give_their_documents_in_natural_order(tmp_path: Path, tok: Path, form: str) -> None:
    write(form, tmp_path / "in/part_10", [[72, 0]])
    write(form, tmp_path / "in/part_2", [[70, 0], [71]], "uint16")
    write(form, tmp_path / "in/sub/x", [[], [73, 74]])
    manifest = run(form, tmp_path / "in", tmp_path / "out", tok)
    assert documents_of(tmp_path / "out") == [[70, 0], [71, 0], [72, 0], [73, 74, 0]]
    assert manifest.rejects == {"empty": 1}
    (rows,) = rows_of(tmp_path / "out").values()
    ending = {"megatron": ".bin", "datatrove": ".ds"}[form]
    assert [(row["source_file"], row["row"]) for row in rows] == [
        (str(tmp_path / f"in/part_2{ending}"), 0),
        (str(tmp_path / f"in/part_2{ending}"), 1),
        (str(tmp_path / f"in/part_10{ending}"), 0),
        (str(tmp_path / f"in/sub/x{ending}"), 1),
    ]


@pytest.mark.parametrize("form", FORMATS)
def test_one_file_is_named_by_itself_its_index_or_its_name_without_an_ending(
    tmp_path: Path, tok: Path, form: str
) -> None:
    tokens = write(form, tmp_path / "in/a.b", [[70, 0], [71, 0]])
    write(form, tmp_path / "in/other", [[72, 0]])
    index = {"megatron": "a.b.idx", "datatrove": "a.b.ds.index"}[form]
    for number, place in enumerate((tokens, tmp_path / "in" / index, tmp_path / "in/a.b")):
        run(form, place, tmp_path / f"out{number}", tok)
        assert documents_of(tmp_path / f"out{number}") == [[70, 0], [71, 0]]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "int32", "int64"])
def test_megatron_ids_of_every_width_and_documents_of_several_sequences(tmp_path: Path, tok: Path, dtype: str) -> None:
    documents = [[[70], [71, 72]], [], [[73], [], [74, 0]], [[75, 76]]]
    manifest = run("megatron", write_megatron(tmp_path / "in/a", documents, dtype), tmp_path / "out", tok)
    assert documents_of(tmp_path / "out") == [[70, 71, 72, 0], [73, 74, 0], [75, 76, 0]]
    assert manifest.rejects == {"empty": 1}


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_datatrove_ids_of_both_widths_with_and_without_metadata(tmp_path: Path, tok: Path, dtype: str) -> None:
    width = np.dtype(dtype).itemsize
    for number, metadata in enumerate(
        (None, f"gpt2|{width}\n4\n4 T", f"Unknown Tokenizer|{width}|{width}\n4\n4 T", "", "gpt2\n4")
    ):
        write_datatrove(tmp_path / f"in{number}/a", [[70, 0], [71, 72]], dtype, metadata)
        run("datatrove", tmp_path / f"in{number}", tmp_path / f"out{number}", tok)
        assert documents_of(tmp_path / f"out{number}") == [[70, 0], [71, 72, 0]]


@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 60000), max_size=4), max_size=4), max_size=30),
    form=st.sampled_from(FORMATS),
    wide=st.booleans(),
    sizes=st.tuples(*[st.integers(1, 6)] * 3),
)
@settings(max_examples=60, deadline=None)
def test_every_document_is_read_once_whole_whatever_the_cut(
    documents: list[list[list[int]]], form: str, wide: bool, sizes: tuple[int, int, int]
) -> None:
    flat = [[token for sequence in document for token in sequence] for document in documents]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("GROUP_DOCUMENTS", "BATCH_DOCUMENTS", "BATCH_TOKENS"), sizes, strict=True):
            patch.setattr(indexed, name, size)
        layout = {"megatron": MEGATRON, "datatrove": DATATROVE}[form]
        if form == "megatron":
            path = write_megatron(Path(folder, "a"), documents, "int32" if wide else "uint16")
        else:
            path = write_datatrove(Path(folder, "a"), flat, "uint32" if wide else "uint16")
        (file, index), _ = SOURCES[form].find(path, None, ())
        assert index.groups == () and sum(rows for rows, _ in file.groups) == len(flat)
        found: list[list[int]] = []
        row = 0
        for number, (rows, size_bytes) in enumerate(file.groups):
            piece = Piece(
                path=file.path,
                format=form,
                compression=None,
                size_bytes=file.size_bytes,
                mtime_ns=file.mtime_ns,
                start=number,
                stop=number + 1,
                num_bytes=size_bytes,
                first_row=row,
            )
            for batch in indexed.read_rows(layout, piece):
                assert batch.first_row == len(found) and batch.lengths.sum() == len(batch.ids)
                assert len(batch.lengths) <= sizes[1]
                assert len(batch.ids) <= sizes[2] or len(batch.lengths) == 1
                found += [part.tolist() for part in np.split(batch.ids, np.cumsum(batch.lengths)[:-1])]
            row += rows
            assert row == len(found)
        assert found == flat


@pytest.mark.parametrize("form", FORMATS)
def test_an_id_that_the_tokenizer_lacks_and_eos_inside_are_told_with_their_document(
    tmp_path: Path, tok: Path, form: str
) -> None:
    tokens = write(form, tmp_path / "in/a", [[70, 0], [71, 423, 72, 0]])
    with pytest.raises(InputError, match=rf"{tokens.name}, document 1; got id 423; expected 0 to 422"):
        run(form, tokens, tmp_path / "out", tok)
    tokens = write(form, tmp_path / "eos/a", [[70, 0], [71, 0, 72, 0]])
    with pytest.raises(InputError, match=rf"{tokens.name}, document 1; got EOS 0 at 1"):
        run(form, tokens, tmp_path / "out2", tok)
    run(form, tokens, tmp_path / "out3", tok, parse_special=True)
    assert documents_of(tmp_path / "out3") == [[70, 0], [71, 0, 72, 0]]


@pytest.mark.parametrize("form", FORMATS)
def test_what_lies_in_a_folder_but_is_half_or_nothing_is_named(
    tmp_path: Path, tok: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="no such file or folder"):
        run(form, tmp_path / "absent", out, tok)
    (tmp_path / "none").mkdir()
    (tmp_path / "none/a.parquet").touch()
    with pytest.raises(InputError, match=r"no token file.*got a\.parquet"):
        run(form, tmp_path / "none", out, tok)
    tokens = write(form, tmp_path / "in/a", [[70, 0]])
    (tmp_path / "in/notes.txt").touch()
    run(form, tmp_path / "in", tmp_path / "first", tok)
    assert "passed over 1 other files: notes.txt" in capsys.readouterr().err
    index = next(path for path in tokens.parent.iterdir() if path.suffix in (".idx", ".index"))
    for gone, left, held in ((index, tokens, "where documents end"), (tokens, index, "the ids")):
        data = gone.read_bytes()
        gone.unlink()
        for place in (tmp_path / "in", left):
            with pytest.raises(InputError, match=rf"in {left}; expected {gone}") as told:
                run(form, place, out, tok)
            assert held in told.value.what
        gone.write_bytes(data)
    with pytest.raises(UsageError, match="no splits"):
        run(form, tmp_path / "in", out, tok, dataset_split="train")
    with pytest.raises(UsageError, match="no columns to keep"):
        run(form, tmp_path / "in", out, tok, keep_columns=("url",))
    assert not out.exists()


@pytest.mark.parametrize("form", FORMATS)
def test_every_cut_of_either_file_is_told(tmp_path: Path, tok: Path, form: str) -> None:
    tokens = write(form, tmp_path / "in/a", [[70, 71, 0], [72, 0], [73, 0]])
    files = sorted(tokens.parent.iterdir())
    if form == "datatrove":  # a file of twice the size would be one of wider ids, but for what is told here
        tokens.with_name("a.ds.metadata").write_text("gpt2|2\n7\n7 T")
    for path in files:
        whole = path.read_bytes()
        for damaged in (*(whole[:cut] for cut in range(len(whole))), whole + b"\0", whole + whole):
            path.write_bytes(damaged)
            with pytest.raises(InputError, match=r"in/a\.") as told:
                SOURCES[form].find(tokens, None, ())
            assert "Copy both files again" in str(told.value)
        path.write_bytes(whole)
    SOURCES[form].find(tokens, None, ())


def put(path: Path, offset: int, kind: str, value: int) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into(kind, data, offset, value)
    path.write_bytes(data)


@pytest.mark.parametrize("at_once", [1, 2, 2**20])
@pytest.mark.parametrize(
    ("offset", "kind", "value", "shown"),
    [
        (0, "<B", ord("T"), "does not begin as Megatron's do"),
        (9, "<Q", 2, "got version 2; expected version 1"),
        (17, "<B", 7, r"got dtype code 7; expected 1 \(uint8\)"),
        (17, "<B", 9, "got dtype code 9"),
        (17, "<B", 4, "got byte 6; expected byte 12"),
        (34, "<i", -3, "sequence 0; got length -3"),
        (34, "<i", 2, "sequence 1; got byte 6; expected byte 4"),
        (34 + 12 + 8, "<q", 4, "sequence 1; got byte 4; expected byte 6"),
        (34 + 12 + 24, "<q", 1, "got 1 to 3; expected 0 to 3"),
        (34 + 12 + 24 + 8, "<q", 3, r"document 1; got sequences 3 to 2"),
        (34 + 12 + 24 + 24, "<q", 4, "got 0 to 4; expected 0 to 3"),
    ],
)
def test_a_false_index_of_megatron_is_told(
    tmp_path: Path, offset: int, kind: str, value: int, shown: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flame.preprocess.sources.megatron.CHECKED_AT_ONCE", at_once)
    tokens = write_megatron(tmp_path / "a", [[[70, 71, 0]], [[72, 0]], [[73, 0]]])
    SOURCES["megatron"].find(tokens, None, ())
    put(tmp_path / "a.idx", offset, kind, value)
    with pytest.raises(InputError, match=shown):
        SOURCES["megatron"].find(tokens, None, ())


def test_an_index_of_several_modalities_is_refused(tmp_path: Path) -> None:
    tokens = write_megatron(tmp_path / "a", [[[70, 71, 0]], [[72, 0]], [[73, 0]]])
    (tmp_path / "a.idx").write_bytes((tmp_path / "a.idx").read_bytes() + bytes(3))
    with pytest.raises(InputError, match="several modalities"):
        SOURCES["megatron"].find(tokens, None, ())


@pytest.mark.parametrize("at_once", [1, 2, 2**20])
def test_falling_ends_and_false_metadata_of_datatrove_are_told(
    tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flame.preprocess.sources.datatrove.CHECKED_AT_ONCE", at_once)
    tokens = write_datatrove(tmp_path / "a", [[70, 71, 0], [72, 0], [73, 0]])
    put(tmp_path / "a.ds.index", 8, "<Q", 2)
    with pytest.raises(InputError, match="document 1; got an end at 2 tokens; expected 3 or more"):
        SOURCES["datatrove"].find(tokens, None, ())
    put(tmp_path / "a.ds.index", 8, "<Q", 8)
    with pytest.raises(InputError, match="document 2; got an end at 7 tokens; expected 8 or more"):
        SOURCES["datatrove"].find(tokens, None, ())
    for metadata, shown in (("gpt2|4\n7\n", "got 4 bytes a token; expected 2"), ("gpt2|2\n8\n", "got 8 tokens")):
        tokens = write_datatrove(tmp_path / "b", [[70, 71, 0], [72, 0], [73, 0]], metadata=metadata)
        with pytest.raises(InputError, match=shown):
            SOURCES["datatrove"].find(tokens, None, ())
    (tmp_path / "b.ds.metadata").unlink()
    (tmp_path / "b.ds.loss").touch()
    with pytest.raises(InputError, match="loss mask"):
        SOURCES["datatrove"].find(tokens, None, ())


@pytest.mark.parametrize("form", FORMATS)
def test_an_index_that_changes_while_tasks_run_is_told(tmp_path: Path, form: str) -> None:
    tokens = write(form, tmp_path / "a", [[70] * 4, [71] * 2])
    (file, index), _ = SOURCES[form].find(tokens, None, ())
    (piece,) = cut_file(file, 2**20)
    assert sum(len(rows.lengths) for rows in SOURCES[form].read(piece, NO_COLUMNS)) == 2
    other = write(form, tmp_path / "b", [[70] * 3, [71] * 2])
    {"megatron": MEGATRON, "datatrove": DATATROVE}[form].index_path(other).replace(index.path)
    tokens.write_bytes(other.read_bytes())
    with pytest.raises(InputError, match=r"an index changed after the conversion was planned.*a\."):
        list(SOURCES[form].read(piece, NO_COLUMNS))
    Path(index.path).unlink()
    with pytest.raises(InputError, match="lacks its other half"):
        list(SOURCES[form].read(piece, NO_COLUMNS))


def test_another_index_is_another_input(tmp_path: Path, tok: Path) -> None:
    tokens = write_megatron(tmp_path / "in/a", [[[70]], [[71]]])
    run("megatron", tokens, tmp_path / "out", tok)
    write_megatron(tmp_path / "in/b", [[[70], [71]]])
    (tmp_path / "in/a.idx").write_bytes((tmp_path / "in/b.idx").read_bytes())
    with pytest.raises(FlameError, match="input"):
        run("megatron", tokens, tmp_path / "out", tok)


# ---- to


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
        class Split:
            max_token_id = largest
            name = "train"

            class corpus:  # noqa: N801
                path = Path("web")

                class manifest:  # noqa: N801
                    class tokenizer:  # noqa: N801
                        pass

        Split.corpus.manifest.tokenizer.vocab_size = vocab_size  # type: ignore[attr-defined]
        options = ConvertOptions(to=form, corpus=corpus, output=tmp_path / "x", dtype=dtype)
        return exporting.choose_dtype(EXPORTS[form], options, Split)  # type: ignore[arg-type]

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
