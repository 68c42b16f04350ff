"""Token files of other systems: what is found, what is refused and counted, and that no id is lost on the way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from flame.config import options_of
from flame.errors import FlameError, InputError, UsageError
from flame.preprocess.convert import convert
from flame.preprocess.convert_config import ConvertOptions
from flame.preprocess.convert_task import _one_eos_at_most
from flame.preprocess.sources import flame_v0
from flame.preprocess.sources.formats import SOURCES
from flame.shards.manifest import Manifest, read_manifest
from tests.builds import build_here, documents_of, rows_of, some_texts, texts_of, write_parquet
from tests.tokenizers import EOS, write_tiny_tokenizer

EOS_ID = 0


@pytest.fixture(scope="module")
def tok(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_tokenizer(tmp_path_factory.mktemp("convert") / "tok")


def encode(tok: Path, texts: Sequence[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(tok / "tokenizer.json"))
    return [list(encoding.ids) for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def save(folder: Path, *batches: pa.Array, **columns: pa.Array) -> Path:
    """Write a data set as `save_to_disk` does: a file, and in it a record batch for each array of ids."""
    folder.mkdir(parents=True)
    name = "data-00000-of-00001.arrow"
    tables = [pa.table({"input_ids": ids, **columns}) for ids in batches]
    with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def run(folder: Path, output: Path, tok: Path, **options: Any) -> Manifest:
    chosen = {"no_shuffle": True, "num_workers": 1, **options}
    assert convert(ConvertOptions(from_="flame-v0", input=folder, tokenizer=tok, output=output, **chosen)) == 0
    return read_manifest(output)


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int32()), pa.list_(pa.int64()), pa.large_list(pa.uint16()), pa.list_(pa.int32(), 2)], ids=str
)
def test_lists_of_any_whole_numbers_are_read(tmp_path: Path, tok: Path, kind: pa.DataType) -> None:
    batches = [pa.array(rows, kind) for rows in ([[70, 71], [72, 73]], [[74, 75]])]
    run(save(tmp_path / "v0", *batches), tmp_path / "out", tok)
    assert documents_of(tmp_path / "out") == [[70, 71, EOS_ID], [72, 73, EOS_ID], [74, 75, EOS_ID]]


def test_rows_end_by_one_eos_and_what_is_no_document_is_counted(tmp_path: Path, tok: Path) -> None:
    hello, blank = encode(tok, ["hello", " \n "])
    rows = [hello, [*hello, 0], None, [], [*hello, 0, 0, 0], [0], blank, hello[:1]]
    folder = save(tmp_path / "v0", pa.array(rows, pa.list_(pa.int32())), url=pa.array([f"u{i}" for i in range(8)]))
    manifest = run(folder, tmp_path / "out", tok, keep_columns=("url",))
    assert documents_of(tmp_path / "out") == [[*hello, 0]] * 3 + [[hello[0], 0]]
    assert manifest.rejects == {"empty": 2, "null": 1, "whitespace": 1}
    assert manifest.inputs["repaired"] == {"repeated_eos": 1}
    (provenance,) = rows_of(tmp_path / "out").values()
    assert [(row["row"], row["num_bytes"], row["url"]) for row in provenance] == [
        (0, 5, "u0"),
        (1, 5, "u1"),
        (4, 5, "u4"),
        (7, 2, "u7"),
    ]
    assert {row["source_file"] for row in provenance} == {str(folder / "data-00000-of-00001.arrow")}


def test_rows_without_a_document_are_told_in_words_of_convert(tmp_path: Path, tok: Path) -> None:
    with pytest.raises(InputError, match="the corpus would be empty") as caught:
        run(save(tmp_path / "v0", pa.array([[EOS_ID], [EOS_ID] * 2])), tmp_path / "out", tok)
    assert "--text_column" not in str(caught.value)


def test_nulls_among_sliced_rows_move_no_id(tmp_path: Path, tok: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flame_v0, "BATCH_ROWS", 3)
    monkeypatch.setattr(flame_v0, "BATCH_TOKENS", 5)
    rows = [[70 + n] * (n % 4) if n % 5 else None for n in range(40)]
    run(save(tmp_path / "v0", pa.array(rows, pa.list_(pa.int32()))), tmp_path / "out", tok)
    assert documents_of(tmp_path / "out") == [[*row, EOS_ID] for row in rows if row]
    assert [row["row"] for row in next(iter(rows_of(tmp_path / "out").values()))] == [
        n for n, row in enumerate(rows) if row
    ]


@pytest.mark.parametrize("bos", ["auto", "never"])
def test_bos_is_put_where_the_tokenizer_wants_it_and_never_twice(tmp_path: Path, bos: str) -> None:
    tok = write_tiny_tokenizer(tmp_path / "tok", bos="<s>")
    config = json.loads((tok / "tokenizer_config.json").read_text())
    (tok / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))
    first, eos = (Tokenizer.from_file(str(tok / "tokenizer.json")).token_to_id(token) for token in ("<s>", EOS))
    folder = save(tmp_path / "v0", pa.array([[70], [first, 70]], pa.list_(pa.int32())))
    manifest = run(folder, tmp_path / "out", tok, bos=bos)
    put = [first] if bos == "auto" else []
    assert documents_of(tmp_path / "out") == [[*put, 70, eos], [first, 70, eos]]
    assert manifest.splits["train"].num_bytes == (2 if bos == "auto" else 2 + len("<s>"))


@pytest.mark.parametrize(("bad", "shown"), [(-1, "id -1"), (423, "id 423"), (2**40, "id 1099511627776")])
def test_an_id_that_the_tokenizer_lacks_is_refused(tmp_path: Path, tok: Path, bad: int, shown: str) -> None:
    ids = pa.array([[70, 71], [], None, [72, bad, 73]], pa.list_(pa.int64()))
    with pytest.raises(InputError, match=rf"data-00000-of-00001\.arrow, row 3; got {shown}; expected 0 to 422") as told:
        run(save(tmp_path / "v0", ids), tmp_path / "out", tok)
    assert told.value.exit_code == 1
    assert not list(tmp_path.glob("out/train/*")) and not (tmp_path / "out/manifest.json").exists()


def test_windows_of_several_documents_are_refused_unless_special_tokens_were_parsed(tmp_path: Path, tok: Path) -> None:
    folder = save(tmp_path / "v0", pa.array([[70, 0], [71, 72, 0, 73]], pa.list_(pa.int32())))
    with pytest.raises(InputError, match="row 1; got EOS 0 at 2"):
        run(folder, tmp_path / "out", tok)
    manifest = run(folder, tmp_path / "other", tok, parse_special=True)
    assert documents_of(tmp_path / "other") == [[70, 0], [71, 72, 0, 73, 0]]
    assert manifest.tokenizer.special_text == "parsed"


@given(st.lists(st.lists(st.sampled_from([0, 0, 7, 8]), max_size=6), max_size=8))
def test_a_run_of_eos_at_the_end_becomes_one(rows: list[list[int]]) -> None:
    expected = [list(row) for row in rows]
    for row in expected:
        while row[-2:] == [0, 0]:
            row.pop()
    ids = np.array([token for row in rows for token in row], dtype=np.uint32)
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    found, found_lengths, shortened = _one_eos_at_most(ids, lengths, 0)
    assert found.tolist() == [token for row in expected for token in row]
    assert found_lengths.tolist() == [len(row) for row in expected]
    assert shortened == sum(row != old for row, old in zip(expected, rows, strict=True))


def test_it_is_the_corpus_that_a_build_of_the_text_makes(tmp_path: Path, tok: Path) -> None:
    texts = some_texts(400)
    write_parquet(tmp_path / "raw/a.parquet", texts, rows_a_group=400)
    build_here(tmp_path / "raw", tmp_path / "built", tok, no_shuffle=True, val_fraction=0.1)
    folder = save(tmp_path / "v0", pa.array(encode(tok, texts), pa.list_(pa.int32())))
    manifest = run(folder, tmp_path / "out", tok, val_fraction=0.1)
    built = read_manifest(tmp_path / "built")
    assert manifest.fingerprint == built.fingerprint, "the same shards, ends and tokenizer"
    assert manifest.splits == built.splits and manifest.splits["val"].num_documents > 20
    assert sorted(texts_of(tmp_path / "out") + texts_of(tmp_path / "out", "val")) == sorted(texts)


def test_a_shuffled_conversion_holds_the_same_documents_in_another_order(tmp_path: Path, tok: Path) -> None:
    ids = encode(tok, some_texts(200))
    folder = save(tmp_path / "v0", pa.array(ids, pa.list_(pa.int32())))
    run(folder, tmp_path / "out", tok, no_shuffle=False)
    found = documents_of(tmp_path / "out")
    assert found != [[*row, 0] for row in ids] and sorted(found) == sorted([*row, 0] for row in ids)


def test_a_finished_one_is_left_alone_and_another_is_refused_by_name(
    tmp_path: Path, tok: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path / "v0", pa.array([[70], [71]], pa.list_(pa.int32())))
    run(folder, tmp_path / "out", tok)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    run(folder, tmp_path / "out", tok)
    assert "nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    with pytest.raises(FlameError, match=r"val_fraction was 0\.0 and is 0\.5"):
        run(folder, tmp_path / "out", tok, val_fraction=0.5)
    write_parquet(tmp_path / "raw/a.parquet", ["text"])
    with pytest.raises(FlameError, match='from was "flame-v0" and is null'):
        build_here(tmp_path / "raw", tmp_path / "out", tok, no_shuffle=True)


def test_a_split_is_named_where_there_are_several(tmp_path: Path, tok: Path) -> None:
    for number, name in enumerate(("train", "validation")):
        save(tmp_path / "v0" / name, pa.array([[70 + number]], pa.list_(pa.int32())))
    (tmp_path / "v0/dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    with pytest.raises(InputError, match=r"train, validation.*--dataset_split"):
        run(tmp_path / "v0", tmp_path / "out", tok)
    with pytest.raises(InputError, match="got test; expected train or validation"):
        run(tmp_path / "v0", tmp_path / "out", tok, dataset_split="test")
    run(tmp_path / "v0", tmp_path / "out", tok, dataset_split="validation")
    assert documents_of(tmp_path / "out") == [[71, 0]]
    with pytest.raises(InputError, match="no splits"):
        run(tmp_path / "v0/train", tmp_path / "other", tok, dataset_split="train")


def test_what_is_no_data_set_of_ids_is_refused_and_nothing_written(tmp_path: Path, tok: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="no such folder"):
        run(tmp_path / "absent", out, tok)
    write_parquet(tmp_path / "raw/a.parquet", ["text"])
    with pytest.raises(InputError, match=r"no data set.*got a\.parquet"):
        run(tmp_path / "raw", out, tok)
    ids = pa.array([[70]], pa.list_(pa.int32()))
    folder = save(tmp_path / "texts", pa.array(["text"]), n=pa.array([1]))
    with pytest.raises(InputError, match=r"input_ids holds no lists.*string"):
        run(folder, out, tok)
    folder = save(tmp_path / "v0", ids, n=pa.array([1]))
    with pytest.raises(InputError, match=r"no column 'url'.*columns input_ids, n"):
        run(folder, out, tok, keep_columns=("url",))
    assert not out.exists()


def test_the_columns_found_are_named_where_input_ids_are_not(tmp_path: Path, tok: Path) -> None:
    folder = save(tmp_path / "v0", pa.array([[70]], pa.list_(pa.int32())))
    table = pa.table({"text": ["a"], "url": ["b"]})
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(InputError, match=r"no column input_ids.*columns text, url"):
        run(folder, tmp_path / "out", tok)


def test_a_cut_and_an_absent_file_are_told(tmp_path: Path, tok: Path) -> None:
    batches = [pa.array([[70] * 100] * 10, pa.list_(pa.int32())) for _ in range(2)]
    file = save(tmp_path / "v0", *batches) / "data-00000-of-00001.arrow"
    whole = file.read_bytes()
    cuts = [0, 3, 100, len(whole) // 2, len(whole) - 2000, len(whole) - 8, len(whole) - 1]
    for cut in cuts:
        file.write_bytes(whole[:cut])
        with pytest.raises(InputError, match="damaged"):
            run(tmp_path / "v0", tmp_path / "out", tok)
    file.unlink()
    with pytest.raises(InputError, match="absent"):
        run(tmp_path / "v0", tmp_path / "out", tok)


def test_the_formats_that_may_be_asked_for_are_those_that_there_are() -> None:
    options = {option.name: option for option in options_of(ConvertOptions)}
    assert options["from"].info.choices == tuple(SOURCES)
