"""manifest.json: what is written, what is read back, and every way in which it can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flame.errors import CorpusError
from flame.shards.manifest import DamagedManifestError, read_manifest, write_manifest
from tests.corpora import make_corpus

GOLDEN = {
    "format_version": 1,
    "fingerprint": "sha256:24b6ac5c81dde34251aa1d571fe3a5535ddba150193604af8073ce72cfb3e6cc",
    "tokenizer": {
        "fingerprint": "sha256:6c3cd3870cf344bc658514f167f862b46958a959f96d7abf2e44e337ece648ed",
        "vocab_size": 512,
        "bos_id": None,
        "eos_id": 0,
        "bos": "never",
        "special_text": "plain",
    },
    "splits": {
        "train": {
            "num_tokens": 8,
            "num_documents": 3,
            "num_bytes": 5,
            "max_token_id": 70000,
            "shards": [
                {
                    "name": "shard-00000-000",
                    "num_tokens": 5,
                    "num_documents": 2,
                    "num_bytes": 3,
                    "max_token_id": 7,
                    "tokens_checksum": "xxh3:e4201f8fac4e83554215ec679c0c7de3",
                    "ends_checksum": "xxh3:8a6f12bd7e2e1d9b53ac00f45034b4be",
                },
                {
                    "name": "shard-00000-001",
                    "num_tokens": 3,
                    "num_documents": 1,
                    "num_bytes": 2,
                    "max_token_id": 70000,
                    "tokens_checksum": "xxh3:9d60a92fc40ce7b2aa9cfc9fa94756cc",
                    "ends_checksum": "xxh3:bb6f4149b62a32b6e619cdeae4a4a0f4",
                },
            ],
        }
    },
    "tokenizer_files": {},
    "rejects": {},
    "engine": {},
    "options": {},
    "inputs": {},
    "built": {},
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return make_corpus(tmp_path / "corpus", [[5, 6], [7], [70000, 2]], shard_tokens=5)


def change(corpus: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = corpus / "manifest.json"
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def test_the_manifest_is_this_object(corpus: Path) -> None:
    text = (corpus / "manifest.json").read_text("utf-8")
    assert json.loads(text) == GOLDEN
    assert text == json.dumps(GOLDEN, indent=2) + "\n"


def test_a_manifest_is_read_back_as_it_was_written(corpus: Path, tmp_path: Path) -> None:
    manifest = read_manifest(corpus)
    assert manifest.to_json() == GOLDEN
    assert manifest.fingerprint == GOLDEN["fingerprint"]
    write_manifest(tmp_path / "other", manifest)
    assert (tmp_path / "other" / "manifest.json").read_bytes() == (corpus / "manifest.json").read_bytes()


def test_how_it_was_built_is_no_part_of_the_fingerprint(corpus: Path) -> None:
    before = read_manifest(corpus)
    change(corpus, lambda value: value.update(built={"host": "elsewhere"}, options={"seed": 1}, rejects={"null": 2}))
    after = read_manifest(corpus)
    assert after.fingerprint == before.fingerprint
    assert (after.built, after.options, after.rejects) == ({"host": "elsewhere"}, {"seed": 1}, {"null": 2})


def test_every_split_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", [[5, 6]], val=[[7]])
    change(corpus, lambda value: value["splits"]["val"]["shards"][0].update(ends_checksum="xxh3:" + "0" * 32))
    with pytest.raises(DamagedManifestError, match="was changed after the corpus was sealed"):
        read_manifest(corpus)


def test_names_that_a_later_version_adds_are_passed_over(corpus: Path) -> None:
    change(corpus, lambda value: value.update(licence="CC0"))
    change(corpus, lambda value: value["splits"]["train"]["shards"][0].update(docs_checksum="xxh3:0"))
    assert read_manifest(corpus).fingerprint == GOLDEN["fingerprint"]


def set_shard(**fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda value: value["splits"]["train"]["shards"][1].update(fields)


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a fingerprint": (lambda v: v.update(fingerprint="sha256:0"), "was changed after the corpus was sealed"),
    "no fingerprint": (lambda v: v.pop("fingerprint"), "expected a fingerprint"),
    "a checksum": (set_shard(tokens_checksum="xxh3:" + "0" * 32), "was changed after the corpus was sealed"),
    "eos": (lambda v: v["tokenizer"].update(eos_id=1), "was changed after the corpus was sealed"),
    "tokenizer": (lambda v: v["tokenizer"].update(fingerprint="sha256:1"), "was changed after"),
    "no version": (lambda v: v.pop("format_version"), "has no format_version"),
    "no tokenizer": (lambda v: v.pop("tokenizer"), "damaged at tokenizer .*expected an object"),
    "no vocab_size": (
        lambda v: v["tokenizer"].pop("vocab_size"),
        r"tokenizer\.vocab_size .*got None; expected a count",
    ),
    "bos no text": (lambda v: v["tokenizer"].update(bos=None), r"tokenizer\.bos .*expected a text"),
    "no splits": (lambda v: v.pop("splits"), "damaged at splits"),
    "splits a list": (lambda v: v.update(splits=[]), r"damaged at splits .*got \[\]"),
    "split outside": (lambda v: v["splits"].update({"../x": v["splits"].pop("train")}), r"splits\.\.\./x"),
    "split reserved": (lambda v: v["splits"].update(build=v["splits"].pop("train")), r"splits\.build"),
    "no shards": (lambda v: v["splits"]["train"].pop("shards"), r"splits\.train\.shards"),
    "shard a text": (lambda v: v["splits"]["train"].update(shards=["x"]), r"splits\.train\.shards\[0\]"),
    "shard outside": (set_shard(name="../../shard-00000-001"), r"shards\[1\]\.name"),
    "shard twice": (set_shard(name="shard-00000-000"), "each shard once"),
    "checksum of another kind": (set_shard(ends_checksum="md5:0"), r"shards\[1\]\.ends_checksum"),
    "count a text": (set_shard(num_tokens="3"), r"shards\[1\]\.num_tokens .*got '3'"),
    "count a truth": (set_shard(num_tokens=True), r"shards\[1\]\.num_tokens .*got True"),
    "count below 0": (set_shard(num_bytes=-2), r"shards\[1\]\.num_bytes .*got -2"),
    "no documents": (set_shard(num_documents=0), r"shards\[1\]\.num_documents"),
    "more documents than tokens": (set_shard(num_documents=4), r"shards\[1\]\.num_documents .*from 1 to 3"),
    "another count": (set_shard(num_tokens=4), r"splits\.train\.num_tokens .*got 8; expected 9, as its shards make it"),
    "a sum": (lambda v: v["splits"]["train"].update(num_bytes=6), r"splits\.train\.num_bytes .*expected 5"),
    "a largest id": (set_shard(max_token_id=70001), r"splits\.train\.max_token_id"),
    "a shard less": (lambda v: v["splits"]["train"]["shards"].pop(), r"splits\.train\.num_tokens"),
    "rejects a list": (lambda v: v.update(rejects=[1]), "damaged at rejects"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_changed_manifest_is_refused_by_the_part_that_is_wrong(corpus: Path, kind: str) -> None:
    edit, message = DAMAGE[kind]
    change(corpus, edit)
    with pytest.raises(DamagedManifestError, match=message) as caught:
        read_manifest(corpus)
    assert str(corpus / "manifest.json") in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[1]", b"null"])
def test_what_is_no_manifest_is_refused(corpus: Path, content: bytes) -> None:
    (corpus / "manifest.json").write_bytes(content)
    with pytest.raises(DamagedManifestError):
        read_manifest(corpus)


def test_another_version_is_told_from_damage(corpus: Path) -> None:
    change(corpus, lambda value: value.update(format_version=2))
    with pytest.raises(CorpusError, match="got format_version 2; expected format_version 1") as caught:
        read_manifest(corpus)
    assert not isinstance(caught.value, DamagedManifestError)


def test_a_folder_without_a_manifest_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no such corpus folder"):
        read_manifest(tmp_path / "absent")
    (tmp_path / "texts").mkdir()
    with pytest.raises(CorpusError, match="the folder is no corpus"):
        read_manifest(tmp_path / "texts")
    (tmp_path / "begun" / "build").mkdir(parents=True)
    with pytest.raises(CorpusError, match=r"not finished.*same flame-preprocess build command again"):
        read_manifest(tmp_path / "begun")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CorpusError, match="is no corpus"):
        read_manifest(tmp_path / "file")


def test_a_manifest_that_could_not_be_read_back_is_not_sealed(corpus: Path, tmp_path: Path) -> None:
    manifest = read_manifest(corpus)
    with pytest.raises(DamagedManifestError, match="damaged at splits"):
        write_manifest(
            tmp_path / "other", type(manifest)(tokenizer=manifest.tokenizer, splits={"a/b": manifest.splits["train"]})
        )
    assert not (tmp_path / "other").exists()
