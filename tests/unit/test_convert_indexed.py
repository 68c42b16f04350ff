"""Megatron's and datatrove's token files as inputs: every id and boundary is read, and their damage told."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.errors import FlameError, InputError, UsageError
from flame.preprocess.plan import Piece, cut_file
from flame.preprocess.readers.columns import Columns
from flame.preprocess.sources import indexed
from flame.preprocess.sources.datatrove import LAYOUT as DATATROVE
from flame.preprocess.sources.formats import SOURCES
from flame.preprocess.sources.megatron import LAYOUT as MEGATRON
from tests.builds import documents_of, rows_of
from tests.indexed import FORMATS, put, run, write, write_datatrove, write_megatron
from tests.tokenizers import write_tiny_tokenizer

NO_COLUMNS = Columns(text="", kept=pa.schema([]))


@pytest.fixture(scope="module")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("indexed") / "tok")


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
