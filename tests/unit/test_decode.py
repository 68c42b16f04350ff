"""`decode` gives back the texts that were encoded, all of them and nothing else."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from flame.cli.preprocess import main
from flame.errors import CorpusError, TokenizerError, UsageError
from flame.preprocess.decode import DecodeOptions, decode
from flame.shards.manifest import TokenizerInfo, read_manifest, write_manifest
from flame.shards.tokenizer import document_text, load_tokenizer
from tests.corpora import make_corpus
from tests.tokenizers import EOS

TEXTS = [
    f"a {EOS} b",
    " leading and trailing \n",
    "日本語のテキスト — “quotes” 🙂",
    "\n\n",
    "x",
    "tab\there\r\nline",
    "ẍ\u0301 \x00",
]


@pytest.fixture
def tokenizer(tiny_tokenizer: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.fixture
def corpus(tmp_path: Path, tiny_tokenizer: Path, tokenizer: Tokenizer) -> Path:
    lists = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    eos_id = tokenizer.token_to_id(EOS)
    assert eos_id not in lists[0]
    return make_corpus(tmp_path / "c", lists, val=lists[:2], eos_id=eos_id, shard_tokens=10, tokenizer=tiny_tokenizer)


def test_a_document_is_printed_as_it_was(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for document, text in enumerate(TEXTS):
        assert decode(DecodeOptions(corpus=corpus, document=(document,))) == 0
        assert capsys.readouterr().out == text + "\n"


def test_several_documents_have_headings(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decode(DecodeOptions(corpus=corpus, document=(4, 0)))
    assert capsys.readouterr().out == (
        "--- train document 4, 2 tokens, train.jsonl row 4\nx\n"
        f"--- train document 0, {len(encoded(corpus, TEXTS[0])) + 1} tokens, train.jsonl row 0\na {EOS} b\n"
    )


def encoded(corpus: Path, text: str) -> list[int]:
    ids: list[int] = load_tokenizer(corpus).encode(text, add_special_tokens=False).ids
    return ids


def test_a_stretch_as_json_lines(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decode(DecodeOptions(corpus=corpus, start=1, count=4, json=True))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == TEXTS[1:5]
    num_tokens = len(encoded(corpus, TEXTS[1]))
    assert lines[0] == {
        "split": "train",
        "document": 1,
        "num_tokens": num_tokens + 1,
        "text": TEXTS[1],
        "source_file": "train.jsonl",
        "row": 1,
        "num_bytes": num_tokens,
    }


def test_which_split_is_read(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decode(DecodeOptions(corpus=corpus, split="val", start=1, json=True))
    assert json.loads(capsys.readouterr().out)["split"] == "val"
    manifest = read_manifest(corpus)
    write_manifest(corpus, dataclasses.replace(manifest, splits={"val": manifest.splits["val"]}))
    decode(DecodeOptions(corpus=corpus, json=True))
    assert json.loads(capsys.readouterr().out)["split"] == "val"
    splits = {"val": manifest.splits["val"], "test": manifest.splits["val"]}
    write_manifest(corpus, dataclasses.replace(manifest, splits=splits))
    with pytest.raises(CorpusError, match=r"several splits.*--split"):
        decode(DecodeOptions(corpus=corpus))


def test_stretches_of_documents(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def documents(*asked: str) -> list[int]:
        words = [word for text in asked for word in ("--document", text)]
        assert main(["decode", str(corpus), "--json", *words]) == 0
        return [json.loads(line)["document"] for line in capsys.readouterr().out.splitlines()]

    assert documents("2:5") == [2, 3, 4]
    assert documents("5:", "1", ":2") == [5, 6, 1, 0, 1]
    assert documents(":") == list(range(7))
    assert main(["decode", str(corpus), "--document", "6:7"]) == 0
    assert capsys.readouterr().out == TEXTS[6] + "\n"  # one document has no heading
    for asked, code, message in (
        ("6:8", 1, "no such document"),
        ("7:", 1, "no such document"),
        ("3:3", 2, "it holds no document"),
        ("x:3", 2, "it is no count"),
        ("1:2:3", 2, "it is no count"),
    ):
        assert main(["decode", str(corpus), "--document", asked]) == code
        out, err = capsys.readouterr()
        assert out == "" and message in err


# ---- looking for text


def matches(corpus: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[tuple[int, int, str]]:
    assert main(["decode", str(corpus), "--json", "--grep", *words]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for match in found:
        text = TEXTS[match["document"]]
        assert text[match["start"] :].startswith(match["match"])
        assert match["before"] + match["match"] + match["after"] in text
        assert "text" not in match and match["source_file"].endswith(".jsonl")
    return [(match["document"], match["start"], match["match"]) for match in found]


def test_places_that_match(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = [
        (number, place, "i") for number, text in enumerate(TEXTS) for place, letter in enumerate(text) if letter == "i"
    ]
    assert len(every) == 4
    assert matches(corpus, capsys, "i") == every
    assert matches(corpus, capsys, "i", "--count", "3") == every[:3]
    assert matches(corpus, capsys, "i", "--start", "2") == [match for match in every if match[0] >= 2]
    assert matches(corpus, capsys, "i", "--document", "5", "--document", "0:2") == [
        *(match for match in every if match[0] == 5),
        *(match for match in every if match[0] < 2),
    ]
    assert matches(corpus, capsys, "i", "--split", "val", "--count", "1") == every[:1]
    capsys.readouterr()
    assert main(["decode", str(corpus), "--grep", "none"]) == 0  # a text, not the absence of one
    assert capsys.readouterr() == ("", "nothing in 7 documents of train matches 'none'\n")
    assert matches(corpus, capsys, "z*") == []  # an empty place is none
    assert matches(corpus, capsys, "(?i)LEADING") == [(1, 1, "leading")]


def test_a_match_is_a_line_with_its_surroundings(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", str(corpus), "--grep", "here\\r\\n", "--context", "3"]) == 0
    assert capsys.readouterr().out == "train 5, train.jsonl row 5: ab here lin\n"
    assert main(["decode", str(corpus), "--grep", "trailing", "--context", "0", "--split", "val"]) == 0
    assert capsys.readouterr().out == "val 1, val.jsonl row 1: trailing\n"


def test_batches_change_nothing(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = matches(corpus, capsys, ".")
    monkeypatch.setattr("flame.preprocess.decode.BATCH_DOCUMENTS", 2)
    assert matches(corpus, capsys, ".") == found
    monkeypatch.setattr("flame.preprocess.decode.BATCH_TOKENS", 5)
    assert matches(corpus, capsys, ".") == found


def test_a_wrong_expression_is_a_wrong_call(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", str(corpus), "--grep", "("]) == 2
    assert capsys.readouterr().err == (
        "flame-preprocess: --grep cannot be '(': it is no regular expression: missing ), unterminated subpattern at "
        "position 0.\n"
    )
    assert main(["decode", str(corpus), "--grep", "x", "--start", "7"]) == 1
    assert "no such document" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--document", ":"], ["--grep", "x"]], ids=["text", "matches"])
def test_a_reader_that_has_enough_ends_it(tmp_path: Path, tiny_tokenizer: Path, words: list[str]) -> None:
    ids = Tokenizer.from_file(str(tiny_tokenizer / "tokenizer.json")).encode("x y " * 100).ids
    corpus = make_corpus(tmp_path / "c", [ids] * 2000, shard_tokens=10**6, tokenizer=tiny_tokenizer)
    command = [sys.executable, "-m", "flame.cli.preprocess", "decode", str(corpus), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith((b"--- train document 0", b"train 0"))
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.parametrize(
    "asked", [{"document": (3, 99)}, {"start": 5, "count": 3}, {"start": 7}, {"document": (10**15,)}], ids=str
)
def test_an_absent_document_is_an_error_before_anything_is_printed(
    corpus: Path, capsys: pytest.CaptureFixture[str], asked: dict[str, object]
) -> None:
    with pytest.raises(CorpusError, match=r"no such document.*expected a number from 0 to 6"):
        decode(DecodeOptions(corpus=corpus, **asked))  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""


def test_no_documents_are_no_lines(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decode(DecodeOptions(corpus=corpus, count=0)) == 0
    assert capsys.readouterr().out == ""


def test_wrong_calls(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two ways"):
        DecodeOptions(corpus=corpus, document=(1,), count=2)
    with pytest.raises(UsageError, match="--start cannot be -1"):
        DecodeOptions(corpus=corpus, start=-1)
    with pytest.raises(UsageError, match="no such corpus folder"):
        decode(DecodeOptions(corpus=tmp_path / "absent"))
    with pytest.raises(CorpusError, match="no split 'test'"):
        decode(DecodeOptions(corpus=corpus, split="test"))


def test_a_lost_tokenizer_is_named(corpus: Path) -> None:
    path = corpus / "tokenizer" / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be loaded"):
        decode(DecodeOptions(corpus=corpus))
    path.unlink()
    with pytest.raises(TokenizerError, match="has lost its tokenizer") as caught:
        decode(DecodeOptions(corpus=corpus))
    assert str(path) in str(caught.value)


def test_from_the_command_line(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["flame-preprocess", "decode", str(corpus), "--document", "4", "--document", "3", "--json"]
    )
    assert main() == 0
    assert [json.loads(line)["document"] for line in capsys.readouterr().out.splitlines()] == [4, 3]
    monkeypatch.setattr("sys.argv", ["flame-preprocess", "decode", str(corpus), "--document", "99"])
    assert main() == 1


def test_any_text_is_printed_under_any_locale(corpus: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "flame.cli.preprocess", "decode", str(corpus), "--document", "2"],
        capture_output=True,
        env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PATH": "/usr/bin:/bin"},
    )
    assert (run.returncode, run.stderr.decode(), run.stdout.decode("utf-8")) == (0, "", TEXTS[2] + "\n")


@given(text=st.text(max_size=40))
def test_any_text_survives(tiny_tokenizer: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for bos, bos_id in (("never", None), ("always", 7), ("always", 0)):
        info = TokenizerInfo(
            fingerprint="sha256:0", vocab_size=512, bos_id=bos_id, eos_id=0, bos=bos, special_text="plain"
        )
        start = [] if bos_id is None else [bos_id]
        assert document_text(tokenizer, [*start, *ids, 0], info) == text
        if 0 not in ids[-1:]:
            assert document_text(tokenizer, [*start, *ids], info) == text


def test_only_the_outer_bos_and_eos_are_left_out(tokenizer: Tokenizer) -> None:
    info = TokenizerInfo(fingerprint="x", vocab_size=512, bos_id=0, eos_id=0, bos="always", special_text="parsed")
    ids = tokenizer.encode("a", add_special_tokens=False).ids
    assert document_text(tokenizer, [0, *ids, 0, 0, *ids, 0], info) == f"a{EOS}{EOS}a"
    assert document_text(tokenizer, [0, 0], info) == ""
    assert document_text(tokenizer, [0], info) == ""
    assert document_text(tokenizer, [], info) == ""
    never = dataclasses.replace(info, bos="never")
    assert document_text(tokenizer, [0, *ids, 0], never) == f"{EOS}a"
