"""Any damage to any file of a build: the next command ends well with the right bytes, or names what is wrong."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from flame.cli.preprocess import main as flame_preprocess
from flame.preprocess.executors import EXECUTORS
from tests.builds import InlineExecutor, rows_of, some_texts, write_jsonl, write_parquet
from tests.tokenizers import write_tiny_tokenizer

OPTIONS = ("--val_fraction=0.1", "--on_error=skip", "--engine=hf", "--shard_tokens=4000", "--keep_columns=url")

# What is drawn is small as it is, and an example too dear to be tried again and again.
FUZZ = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate], report_multiple_bugs=False)


class PowerCutError(BaseException):
    """The end of a process in the middle of its work."""


@dataclass
class Cut:
    """Which kind of task is cut short, by the name of what it is told, and how many of those run before."""

    told: str = ""
    tasks: int = 10**9


CUT = Cut()


@dataclass
class CuttableExecutor(InlineExecutor):
    """Runs tasks in this process, until `CUT` says that the power fails."""

    def run(self, tasks: Any, told: Any, **more: Any) -> None:  # type: ignore[override]
        mine = type(told).__name__ == CUT.told
        super().run(tasks[-CUT.tasks :] if mine else tasks, told, **more)
        if mine:
            raise PowerCutError


@dataclass(frozen=True)
class Ran:
    """How a command ended, and what it said."""

    code: int
    told: str


def run(*words: str | Path) -> Ran:
    """Run a command in this process."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = flame_preprocess([str(word) for word in words])
    return Ran(code, errors.getvalue())


@dataclass(frozen=True)
class Work:
    """Inputs, the corpus as it must be, and folders of builds that were cut short, or not, by name."""

    folder: Path

    def build(self, output: Path, *more: str) -> Ran:
        words = ("--dataset", self.folder / "raw", "--tokenizer", self.folder / "tok", "--output", output)
        return run("build", *words, "--dedup=exact", *OPTIONS, *more)

    def share(self, output: Path, share: str) -> Ran:
        words = ("--dataset", self.folder / "raw", "--tokenizer", self.folder / "tok", "--output", output)
        return run("build", *words, "--task_range", share, *OPTIONS)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Work]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EXECUTORS, "local", CuttableExecutor)  # type: ignore[arg-type]
        patch.setattr("os.fsync", lambda descriptor: None)  # no power fails for the disk here
        work = Work(tmp_path_factory.mktemp("damage"))
        write_tiny_tokenizer(work.folder / "tok")
        for part in range(4):
            texts = [*some_texts(60, seed=part % 3), None, ""]
            urls = [f"http://{part}/{number}" for number in range(len(texts))]
            write_parquet(work.folder / f"raw/{part}.parquet", texts, url=urls)
        bad = write_jsonl(work.folder / "raw/bad.jsonl", some_texts(60, seed=9))
        bad.write_bytes(bad.read_bytes() + b"{half\n")
        assert work.build(work.folder / "finished").code == 0
        for name, kind in {"hashing": "HashSettings", "tokenizing": "TokenizeSettings"}.items():
            CUT.told, CUT.tasks = kind, 2
            with pytest.raises(PowerCutError):
                work.build(work.folder / name)
        CUT.told = ""
        with pytest.MonkeyPatch.context() as sealing, pytest.raises(PowerCutError):
            sealing.setattr("flame.preprocess.build.seal_build", _cut)
            work.build(work.folder / "unsealed")
        for share in ("0/2", "1/2"):
            assert work.share(work.folder / "shares", share).code == 0
        shutil.copytree(work.folder / "shares", work.folder / "of shares")
        assert run("build", "--seal", "--output", work.folder / "of shares").code == 0
        yield work


def _cut(*arguments: Any) -> None:
    raise PowerCutError


def built_files(folder: Path, *, of_build: bool) -> list[Path]:
    """The files of a build's folder, but for its locks; of those that only the build reads, or of all others."""
    locks = {"lock", "workers.lock", "plan.lock", "claims"}
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in locks]
    return [path for path in files if ("build" in path.relative_to(folder).parts) == of_build]


def places_in(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, as the keys that lead there."""
    yield place
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places_in(value[key], (*place, key))


def with_another_value(data: st.DataObject, content: bytes) -> bytes:
    """A JSON file in which one value is another, of another type, or gone."""
    whole = json.loads(content)
    place = data.draw(st.sampled_from(list(places_in(whole))), "place")
    other = data.draw(st.sampled_from([None, True, 0, -1, 3.5, "x", [], {}, 10**30]), "value")
    if not place:
        return json.dumps(other).encode()
    holder = whole
    for key in place[:-1]:
        holder = holder[key]
    if data.draw(st.booleans(), "gone"):
        del holder[place[-1]]
    else:
        holder[place[-1]] = other
    return json.dumps(whole).encode()


def damage(data: st.DataObject, content: bytes, *, is_json: bool) -> bytes:
    """What a file may have become: empty, cut, a bit or a digit of it another, or another JSON value."""
    digits = [place for place, byte in enumerate(content) if chr(byte).isdigit()]
    kinds = ["empty", "cut", "flipped", *["digit"] * bool(digits), *["value", "value"] * is_json]
    kind = data.draw(st.sampled_from(kinds), "kind")
    if kind == "empty" or not content:
        return b""
    if kind == "value":
        return with_another_value(data, content)
    place = data.draw(st.sampled_from(digits) if kind == "digit" else st.integers(0, len(content) - 1), "byte")
    if kind == "cut":
        return content[:place]
    byte = content[place] ^ (1 if kind == "digit" else 1 << data.draw(st.integers(0, 7), "bit"))
    return content[:place] + bytes([byte]) + content[place + 1 :]


def damaged_copy(data: st.DataObject, folder: Path, files: list[Path]) -> tuple[Path, str]:
    """A copy of the folder in which one of the files is damaged, and the file's name."""
    path = data.draw(st.sampled_from([path for path in files if path.stat().st_size]), "file")
    content = path.read_bytes()
    changed = damage(data, content, is_json=path.suffix == ".json")
    assume(changed != content)
    copy = folder.parent / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    (copy / path.relative_to(folder)).write_bytes(changed)
    return copy, path.name


def is_told(ran: Ran, name: str) -> str:
    """The command failed with one paragraph that names the file, or the task that lost it, and what to do."""
    (paragraph,) = (line for line in ran.told.splitlines() if line.startswith("flame-preprocess: "))
    assert ran.code == 1 and "unexpected" not in paragraph, paragraph
    lost = re.fullmatch(r"(?:shard|task)-(\d+)[-.].*", name)
    told = [name] if lost is None else [name, f"tasks {int(lost[1])} are missing"]
    told += ["the tokenizer"] if "tokenizer" in name else []
    assert any(words in paragraph for words in told), paragraph
    return paragraph


def as_advised(work: Work, state: str, corpus: Path, name: str) -> bool:
    """Go on with a build, doing what its errors say; whether it came to an end without giving the folder up."""
    for _ in range(4):
        ran = run("build", "--seal", "--output", corpus) if state == "shares" else work.build(corpus)
        if ran.code == 0:
            return True
        paragraph = is_told(ran, name)
        if share := re.search(r"Run again --task_range (./2),", paragraph):
            assert work.share(corpus, share[1]).code == 0
        elif "Run one share again" in paragraph:
            assert work.share(corpus, "1/2").code == 0
        elif other := re.search(r" Delete (/\S+) and run the same command again", paragraph):
            shutil.rmtree(other[1]) if Path(other[1]).is_dir() else Path(other[1]).unlink()
        elif "Delete this file and run the same command again" in paragraph:
            next(path for path in corpus.rglob(name) if str(path) in paragraph).unlink()
        else:
            assert "Name a new folder in --output" in paragraph or "Finish it with that version" in paragraph
            return False
    raise AssertionError("what the errors advise does not end")


def finished(work: Work, state: str) -> Path:
    """The corpus that a folder must become."""
    return work.folder / ("of shares" if state == "shares" else "finished")


@settings(FUZZ, max_examples=60)
@given(data=st.data(), state=st.sampled_from(["hashing", "tokenizing", "unsealed", "shares"]))
def test_damage_to_what_a_build_keeps_is_named_with_what_mends_it(work: Work, data: st.DataObject, state: str) -> None:
    corpus, name = damaged_copy(data, work.folder / state, built_files(work.folder / state, of_build=True))
    if as_advised(work, state, corpus, name):
        assert same_files(corpus, finished(work, state))
        assert run("verify", corpus).code == 0
    else:
        assert name == "plan.json"


@settings(FUZZ, max_examples=30)
@given(data=st.data(), state=st.sampled_from(["tokenizing", "unsealed", "shares"]))
def test_damage_to_what_becomes_the_corpus_is_mended_or_found_by_verify(
    work: Work, data: st.DataObject, state: str
) -> None:
    corpus, name = damaged_copy(data, work.folder / state, built_files(work.folder / state, of_build=False))
    assert as_advised(work, state, corpus, name)
    if not same_files(corpus, finished(work, state)):
        # of a page's header not every bit matters; settings and samples decide no bytes
        assert (
            run("verify", corpus).code == 3
            or name.startswith("task-")
            or name == "tokenizer_config.json"
            or (name.endswith("docs.parquet") and rows_of(corpus) == rows_of(finished(work, state)))
        )


@settings(FUZZ, max_examples=30)
@given(data=st.data(), state=st.sampled_from(["finished", "of shares"]), of_build=st.booleans())
def test_no_look_into_a_damaged_corpus_ends_in_an_unexpected_error(
    work: Work, data: st.DataObject, state: str, of_build: bool
) -> None:
    corpus, name = damaged_copy(data, work.folder / state, built_files(work.folder / state, of_build=of_build))
    again = work.share(corpus, "0/2") if state == "of shares" else work.build(corpus)
    if again.code != 0:
        is_told(again, name)
    looks = [("verify",), ("inspect",), ("stats",), ("decode", "--document=1"), ("decode", "--grep=fox")]
    codes = {}
    for command, *words in looks:
        ran = run(command, corpus, *words)
        assert ran.code in (0, 1, 3) and "unexpected" not in ran.told, (command, ran)
        codes[command] = ran.code
    if name.startswith("shard-"):
        assert codes["verify"] == 3 or rows_of(corpus) == rows_of(work.folder / state)


def same_files(one: Path, other: Path) -> bool:
    """Whether two corpora hold the same for their readers: shards, provenance, tokenizer, rejects, manifest."""
    manifests = [json.loads((corpus / "manifest.json").read_bytes()) | {"built": None} for corpus in (one, other)]
    folders = ("train", "val", "tokenizer", "rejects")
    contents = [
        {path.relative_to(corpus): path.read_bytes() for folder in folders for path in (corpus / folder).iterdir()}
        for corpus in (one, other)
    ]
    return manifests[0] == manifests[1] and contents[0] == contents[1]


# ---- a disk that is full, at every place where a build writes


@dataclass
class FullDisk:
    """Stands in for `os.fsync`, which is where a disk over a network says that it is full: for files of one kind."""

    kind: str | None = None
    seen: dict[str, None] = field(default_factory=dict)

    def fsync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        kind = re.sub(r"\d+", "N", f"{path.parent.name}/{path.name}")
        if "corpus" in path.parts:
            self.seen[kind] = None
        if kind == self.kind:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("shares", [False, True])
def test_a_full_disk_is_told_wherever_a_build_writes_and_the_build_ends_well_with_room(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    disk = FullDisk()
    monkeypatch.setattr("os.fsync", disk.fsync)

    def build(output: Path) -> Ran:
        if not shares:
            return work.build(output)
        parts = [work.share(output, share) for share in ("0/2", "1/2")]
        return next((ran for ran in parts if ran.code), None) or run("build", "--seal", "--output", output)

    whole = tmp_path / "99/corpus"
    assert build(whole).code == 0
    kinds = list(disk.seen)
    assert len(kinds) > 15
    if shares:
        kinds = kinds[:3]  # the others are written as one process writes them
    for number, kind in enumerate(kinds):
        disk.kind = kind
        output = tmp_path / str(number) / "corpus"
        ran = build(output)
        assert ran.code == 1, kind
        paragraph = ran.told.splitlines()[-1]
        assert f"no space left on the device (in {output}" in paragraph, (kind, paragraph)
        assert re.search(r"expected (about|at least) [\d,]+ bytes", paragraph), (kind, paragraph)
        assert not (output / "manifest.json").exists() or kind == "N/corpus"
        disk.kind = None
        assert build(output).code == 0
        assert same_files(output, whole), kind
        assert not list(output.rglob("*.tmp")), kind
