"""`verify` names every kind of damage by its file, once, and finds none where there is none."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.cli.preprocess import main
from flame.errors import CorpusError, UsageError
from flame.preprocess.verify import Finding, VerifyOptions, find_damage, verify
from flame.shards.format import HEADER_BYTES, docs_path, ends_path, npy_header, tokens_path
from flame.shards.manifest import read_manifest
from tests.corpora import make_corpus
from tests.damage import DOCUMENTS, findings, path_of, poke, sealed_corpus


@pytest.fixture
def corpus(tmp_path: Path, tiny_tokenizer: Path) -> Path:
    return sealed_corpus(tmp_path / "corpus", tiny_tokenizer)


# ---- the command


def test_a_whole_corpus_has_no_findings(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(VerifyOptions(corpus=corpus)) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "train is as it was sealed: 3 shards, 120 documents" in err and "val is as it was sealed" in err


def test_a_finding_is_a_line_and_exit_code_3(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path_of(corpus, tokens_path).unlink()
    (corpus / "train" / "notes.txt").touch()
    assert verify(VerifyOptions(corpus=corpus, num_workers=2)) == 3
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "train/shard-00000-001.tokens.npy: a file of the corpus is absent",
        "train/notes.txt: the manifest does not name it",
    ]
    assert err == f"{corpus}: 2 findings\n"


def test_findings_as_json(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(VerifyOptions(corpus=corpus, json=True)) == 0
    fingerprint = read_manifest(corpus).fingerprint
    assert json.loads(capsys.readouterr().out) == {"corpus": str(corpus), "fingerprint": fingerprint, "findings": []}
    (corpus / "train" / "notes.txt").touch()
    assert verify(VerifyOptions(corpus=corpus, json=True)) == 3
    found = json.loads(capsys.readouterr().out)["findings"]
    nowhere = {"start_byte": None, "stop_byte": None}
    assert found == [{"path": "train/notes.txt", "problem": "the manifest does not name it", **nowhere}]
    path = path_of(corpus, tokens_path)
    size_bytes = path.stat().st_size
    os.truncate(path, 200)
    assert verify(VerifyOptions(corpus=corpus, json=True)) == 3
    found = json.loads(capsys.readouterr().out)["findings"][0]
    assert (found["start_byte"], found["stop_byte"]) == (200, size_bytes)


def test_progress_is_told_where_there_is_no_terminal(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flame.preprocess.verify.SECONDS_BETWEEN_LINES", 0)
    assert verify(VerifyOptions(corpus=corpus, num_workers=1)) == 0
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("verify: ")]
    assert len(lines) == 8 and lines[-1].startswith("verify: 100.0% of ") and out == ""


def test_from_the_command_line(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["flame-preprocess", "verify", str(corpus), "--num-workers", "1"])
    assert main() == 0
    os.truncate(path_of(corpus, tokens_path), 200)
    assert main() == 3
    assert capfd.readouterr().out.startswith("train/shard-00000-001.tokens.npy: a file of the corpus was cut short")
    (corpus / "manifest.json").unlink()
    assert main() == 1
    monkeypatch.setattr("sys.argv", ["flame-preprocess", "verify", str(corpus / "absent")])
    assert main() == 2


def test_what_is_no_corpus_is_an_error_and_no_finding(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such corpus folder"):
        verify(VerifyOptions(corpus=tmp_path / "absent"))
    with pytest.raises(CorpusError, match="is no corpus"):
        verify(VerifyOptions(corpus=tmp_path))
    with pytest.raises(UsageError, match="--num_workers cannot be 0"):
        VerifyOptions(corpus=tmp_path, num_workers=0)


def test_a_changed_manifest_is_a_finding(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (corpus / "manifest.json").read_text().replace('"eos_id": 0', '"eos_id": 1')
    (corpus / "manifest.json").write_text(text)
    assert verify(VerifyOptions(corpus=corpus)) == 3
    assert capsys.readouterr().out.startswith("manifest.json: the corpus manifest was changed after")
    (corpus / "manifest.json").write_text("{")
    assert verify(VerifyOptions(corpus=corpus, json=True)) == 3
    assert json.loads(capsys.readouterr().out)["findings"][0]["path"] == "manifest.json"


def test_nothing_is_written(corpus: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in [corpus, *corpus.rglob("*")]}
    verify(VerifyOptions(corpus=corpus))
    assert {path: path.stat().st_mtime_ns for path in [corpus, *corpus.rglob("*")]} == before


# ---- files


FILES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "tokens absent": (lambda c: path_of(c, tokens_path).unlink(), ["tokens.npy: a file of the corpus is absent"]),
    "ends absent": (lambda c: path_of(c, ends_path).unlink(), ["ends.npy: a file of the corpus is absent"]),
    "docs absent": (lambda c: path_of(c, docs_path).unlink(), ["docs.parquet: a file of the corpus is absent"]),
    "tokens cut": (lambda c: os.truncate(path_of(c, tokens_path), 500), ["tokens.npy: a file of the corpus was cut"]),
    "ends cut": (lambda c: os.truncate(path_of(c, ends_path), 130), ["ends.npy: a file of the corpus was cut"]),
    "docs cut": (lambda c: os.truncate(path_of(c, docs_path), 300), ["docs.parquet: it cannot be read"]),
    "a header": (
        lambda c: poke(path_of(c, tokens_path), -10, 0),
        ["tokens.npy: a file of the corpus does not begin with a header"],
    ),
    "a token": (lambda c: poke(path_of(c, tokens_path), 17, 9), ["tokens.npy: its checksum is xxh3:"]),
    "a folder for a file": (
        lambda c: (path_of(c, ends_path).unlink(), path_of(c, ends_path).mkdir()),
        ["ends.npy: a file of the corpus cannot be read (got Is a directory)"],
    ),
    "docs of another shard": (
        lambda c: shutil.copy(docs_path(c, "val", "shard-00000-000"), path_of(c, docs_path)),
        ["docs.parquet: it has 1 row,", "docs.parquet: its num_bytes sum to 2"],
    ),
}


@pytest.mark.usefixtures("shard_chunks")
@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_named(corpus: Path, kind: str) -> None:
    harm, expected = FILES[kind]
    harm(corpus)
    found = findings(corpus)
    assert len(found) == len(expected)
    for line, start in zip(found, expected, strict=True):
        assert line.startswith(f"train/shard-00000-001.{start}")


def test_a_flipped_bit_anywhere_is_found(corpus: Path) -> None:
    for kind in (tokens_path, ends_path):
        path = path_of(corpus, kind)
        whole = path.read_bytes()
        for place in range(0, len(whole), 61):
            damaged = bytearray(whole)
            damaged[place] ^= 0x10
            path.write_bytes(damaged)
            assert findings(corpus), f"byte {place} of {path.name}"
        path.write_bytes(whole)
    assert findings(corpus) == []


def test_a_flipped_bit_of_provenance_is_found_or_changes_no_row(corpus: Path) -> None:
    path = path_of(corpus, docs_path)
    whole, rows = path.read_bytes(), pq.read_table(path_of(corpus, docs_path))
    unnoticed = 0
    for place in range(4, len(whole), 11):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        if not findings(corpus):
            unnoticed += 1
            assert pq.read_table(path, columns=rows.column_names).equals(rows), f"byte {place}"
    assert unnoticed < len(whole) / 11 / 2


def test_two_shards_of_equal_counts_swapped(tmp_path: Path, tiny_tokenizer: Path, eos_id: int) -> None:
    documents = [[5] * 4, [6] * 5, [7] * 5, [8] * 4]
    corpus = make_corpus(tmp_path / "c", documents, eos_id=eos_id, shard_tokens=11, tokenizer=tiny_tokenizer)
    assert findings(corpus) == []
    first, second = path_of(corpus, ends_path, 0), path_of(corpus, ends_path, 1)
    first.rename(corpus / "aside")
    second.rename(first)
    (corpus / "aside").rename(second)
    lines = findings(corpus)
    for shard in ("shard-00000-000", "shard-00000-001"):
        assert [line.split(":")[0] for line in lines if shard in line] == [
            f"train/{shard}.ends.npy",
            f"train/{shard}.tokens.npy",
            f"train/{shard}.tokens.npy",
        ]
    assert sum("its checksum is" in line for line in lines) == 2


def test_strays_are_named(corpus: Path) -> None:
    for name in (
        "train/shard-00009-000.tokens.npy",
        "train/shard-00000-000.ends.npy.tmp",
        "val/x",
        "manifest.json.tmp",
    ):
        (corpus / name).touch()
    (corpus / "test").mkdir()
    (corpus / "test" / "shard-00000-000.tokens.npy").touch()
    for harmless in ("README.md", ".gitattributes", "build", "rejects", "figures"):
        (corpus / harmless).mkdir()
    assert findings(corpus) == [
        "train/shard-00000-000.ends.npy.tmp: the manifest does not name it",
        "train/shard-00009-000.tokens.npy: the manifest does not name it",
        "val/x: the manifest does not name it",
        "manifest.json.tmp: it is the unfinished file of something that was stopped",
        "test: it holds shards, and the manifest names no such split",
    ]


def test_provenance_is_for_all_shards_or_none(tmp_path: Path, tiny_tokenizer: Path, eos_id: int) -> None:
    corpus = make_corpus(
        tmp_path / "c", DOCUMENTS, eos_id=eos_id, shard_tokens=200, tokenizer=tiny_tokenizer, provenance=False
    )
    assert findings(corpus) == []
    value = json.loads((corpus / "manifest.json").read_text())
    (corpus / "manifest.json").write_text(json.dumps({**value, "options": {"provenance": True}}))
    assert [line.split(": ")[1] for line in findings(corpus)] == ["a file of the corpus is absent"] * 3


# ---- the tokenizer


def test_the_tokenizer_is_the_one_of_the_manifest(corpus: Path) -> None:
    path = corpus / "tokenizer" / "tokenizer.json"
    value = json.loads(path.read_text())
    path.write_text(json.dumps(value, indent=7))
    assert findings(corpus) == []
    value["model"]["merges"].pop()
    path.write_text(json.dumps(value))
    assert [line.split(" is ")[0] for line in findings(corpus)] == ["tokenizer/tokenizer.json: its fingerprint"]
    path.write_text("{")
    assert findings(corpus)[0].startswith("tokenizer/tokenizer.json: tokenizer.json is no JSON")
    path.unlink()
    assert findings(corpus) == ["tokenizer/tokenizer.json: a file of the corpus is absent"]
    path.mkdir()
    assert findings(corpus) == ["tokenizer/tokenizer.json: it cannot be read: Is a directory"]


def test_the_files_beside_the_tokenizer_are_those_that_were_sealed(corpus: Path) -> None:
    path, added = (corpus / "tokenizer" / name for name in ("tokenizer_config.json", "special_tokens_map.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "x"}))
    added.write_text('{"eos_token": "x"}')
    (corpus / "tokenizer" / "README.md").touch()
    strange, changed = findings(corpus)
    assert strange == "tokenizer/special_tokens_map.json: the manifest does not name it"
    assert changed.startswith("tokenizer/tokenizer_config.json: its checksum is xxh3:")
    added.unlink()
    path.unlink()
    assert findings(corpus) == ["tokenizer/tokenizer_config.json: a file of the corpus is absent"]
    path.mkdir()
    assert findings(corpus) == ["tokenizer/tokenizer_config.json: it cannot be read: Is a directory"]
    manifest = json.loads((corpus / "manifest.json").read_text())
    (corpus / "manifest.json").write_text(json.dumps(manifest | {"tokenizer_files": {}}))
    assert findings(corpus) == []  # built before they were noted


def test_findings_come_in_the_manifests_order(corpus: Path) -> None:
    for shard in (0, 1, 2):
        path = path_of(corpus, tokens_path, shard)
        path.write_bytes(npy_header(np.dtype("<u4"), 3) + bytes(12))
    (corpus / "tokenizer" / "tokenizer.json").unlink()
    manifest = read_manifest(corpus)
    found = list(find_damage(corpus, manifest, num_workers=3))
    assert [finding.path for finding in found] == [
        "tokenizer/tokenizer.json",
        *[f"train/shard-00000-{shard:03d}.tokens.npy" for shard in (0, 1, 2)],
    ]
    assert found[1] == Finding(
        path="train/shard-00000-000.tokens.npy",
        problem=f"it holds 3 values, and the manifest says {manifest.splits['train'].shards[0].num_tokens}",
        start_byte=140,
        stop_byte=128 + 4 * manifest.splits["train"].shards[0].num_tokens,
    )


# ---- any damage to any file is found, and the file named


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A corpus that the tests below damage one file of, and mend."""
    return sealed_corpus(tmp_path_factory.mktemp("sealed") / "corpus", tiny_tokenizer)


def damageable(corpus: Path) -> list[Path]:
    return sorted(path for path in corpus.rglob("*") if path.is_file())


def found_with(path: Path, content: bytes, corpus: Path) -> list[Finding]:
    """What is found while the file has this content."""
    whole = path.read_bytes()
    path.write_bytes(content)
    try:
        return list(find_damage(corpus, read_manifest(corpus), num_workers=1))
    except CorpusError as error:
        return [Finding(path=Path(str(error.where)).name, problem=str(error))]
    finally:
        path.write_bytes(whole)


@settings(max_examples=60)
@given(data=st.data())
def test_any_byte_changed_is_found_in_its_file(sealed: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([path for path in damageable(sealed) if path.suffix == ".npy"]))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    found = found_with(path, bytes(content), sealed)
    assert {finding.path for finding in found} >= {path.relative_to(sealed).as_posix()}
    ranges = [
        range(finding.start_byte, finding.stop_byte)
        for finding in found
        if finding.path == path.relative_to(sealed).as_posix()
        and finding.start_byte is not None
        and finding.stop_byte is not None
    ]
    assert any(place in bytes_ for bytes_ in ranges) or place < HEADER_BYTES


@settings(max_examples=40)
@given(data=st.data())
def test_any_file_cut_or_grown_is_found(sealed: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(damageable(sealed)))
    whole = path.read_bytes()
    last = len(whole) if path.suffix != ".json" else len(whole.rstrip())  # JSON may end in any space
    length = data.draw(st.integers(0, last - 1))
    name = path.relative_to(sealed).as_posix()
    assert name in {finding.path for finding in found_with(path, whole[:length], sealed)}
    more = whole + data.draw(st.binary(min_size=1, max_size=9))
    if path.suffix == ".npy":
        finding = next(finding for finding in found_with(path, more, sealed) if finding.path == name)
        assert (finding.start_byte, finding.stop_byte) == (len(whole), len(more))


@settings(max_examples=25)
@given(data=st.data())
def test_files_that_changed_places_are_found(sealed: Path, data: st.DataObject) -> None:
    files = [path for path in damageable(sealed) if "shard-" in path.name]
    first, second = data.draw(st.lists(st.sampled_from(files), min_size=2, max_size=2, unique=True))
    content = second.read_bytes()
    found = found_with(first, content, sealed)
    assert first.relative_to(sealed).as_posix() in {finding.path for finding in found}


def test_a_row_group_of_provenance_is_named_with_its_bytes(
    tmp_path: Path, tiny_tokenizer: Path, eos_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flame.shards.provenance.ROW_GROUP_ROWS", 40)
    corpus = make_corpus(tmp_path / "c", DOCUMENTS, eos_id=eos_id, tokenizer=tiny_tokenizer)
    path = path_of(corpus, docs_path, 0)
    column = pq.read_metadata(path).row_group(1).column(1)
    start = column.dictionary_page_offset or column.data_page_offset
    stop = start + column.total_compressed_size
    content = bytearray(path.read_bytes())
    content[stop - 2] ^= 0x10
    path.write_bytes(content)
    (finding,) = find_damage(corpus, read_manifest(corpus))
    assert finding.path == f"train/{path.name}" and finding.problem.startswith("rows 40 to 79: it cannot be read")
    assert finding.start_byte is not None and finding.stop_byte is not None
    assert 4 < finding.start_byte <= start < stop <= finding.stop_byte < len(content)


def test_all_faults_are_told_at_any_number_of_workers(corpus: Path) -> None:
    for shard in (0, 1, 2):
        os.truncate(path_of(corpus, tokens_path, shard), 300)
        path_of(corpus, docs_path, shard).unlink()
    manifest = dataclasses.replace(read_manifest(corpus), options={"provenance": True})
    found = [list(find_damage(corpus, manifest, num_workers=number)) for number in (1, 4)]
    assert len(found[0]) == 6 and found[0] == found[1]
