"""One corpus by several processes that share a folder: array jobs, raced, killed, sealed. The bytes never change."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flame.config import parse_flat
from flame.errors import CorpusError, InputError, UsageError
from flame.preprocess.build import build
from flame.preprocess.claims import claimed
from flame.preprocess.config import BuildOptions
from flame.preprocess.executors import EXECUTORS
from flame.preprocess.folder import CLAIMS, COPIES, HASHES, TASKS, shards_of
from flame.preprocess.ranges import TaskRange, parse_range, stretches, unfinished
from flame.shards.manifest import read_manifest
from tests.builds import (
    InlineExecutor,
    build_here,
    command,
    environment,
    run_build,
    same_corpus,
    some_texts,
    write_jsonl,
    write_parquet,
    write_parts,
)
from tests.processes import SECONDS_TO_WAIT, processes_of, receipts, until
from tests.tokenizers import write_tiny_tokenizer

OPTIONS = {"val_fraction": 0.05, "shard_tokens": 20_000, "shuffle_block_tokens": 30_000, "num_workers": 1}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with inputs, a tokenizer, and the corpus as one process makes it."""
    folder = tmp_path_factory.mktemp("scale")
    write_tiny_tokenizer(folder / "tok")
    write_parts(folder / "raw", 4, 700)
    build_here(folder / "raw", folder / "expected", folder / "tok", **OPTIONS)
    return folder


def share(work: Path, output: Path, name: str, **options: Any) -> subprocess.Popen[str]:
    dataset = options.pop("dataset", work / "raw")
    words = command(dataset, output, work / "tok", task_range=name, **OPTIONS | options)
    return subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a share said, which must have ended well."""
    output, errors = process.communicate(timeout=SECONDS_TO_WAIT)
    assert process.returncode == 0, errors
    return output, errors


def seal(output: Path) -> int:
    return build(BuildOptions(output=output, seal=True))


def test_shares_at_once_in_any_order_and_a_killed_one_end_as_one_build_does(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    with pytest.raises(CorpusError, match="there is nothing to seal"):
        seal(output)
    # two shares at once, one of them twice: they race for the plan, and for tasks
    racing = [share(work, output, name) for name in ("2/3", "0/3", "0/3")]
    said = [ended(process) for process in racing]
    assert "share 0/3 of" in said[1][0] and "share 0/3 of" in said[2][0]
    tokens = [int(output.split(" tokens written now")[0].split()[-1].replace(",", "")) for output, _ in said]
    assert tokens[0] > 0
    finished = receipts(output)
    written = [json.loads(path.read_bytes()) for path in (output / TASKS).glob("task-*.json")]
    assert sum(tokens) == sum(shard["num_tokens"] for receipt in written for _, shard in shards_of(receipt))

    last = share(work, output, "1/3")
    assert until(lambda: receipts(output) > finished)
    last.send_signal(signal.SIGKILL)
    last.communicate()
    assert until(lambda: not processes_of(last.pid))
    with pytest.raises(CorpusError) as told:
        seal(output)
    assert "the build is not finished" in str(told.value)
    assert str(told.value).endswith("Run again --task_range 1/3, then --seal: finished tasks are kept.")
    assert not (output / "manifest.json").exists()

    output_text, errors = ended(share(work, output, "1/3"))
    assert "of them done before" in errors
    assert output_text.splitlines()[-1] == (
        f"every share is done: flame-preprocess build --seal --output {output} makes the corpus of them"
    )
    capsys.readouterr()
    assert seal(output) == 0
    assert "speed" not in capsys.readouterr().out, "nothing is tokenized"
    assert same_corpus(output, work / "expected")
    assert not list(output.rglob("*.tmp")) and not (output / CLAIMS).exists()
    assert seal(output) == 0, "again: nothing to do"
    assert run_build(work / "raw", output, work / "tok", **OPTIONS).returncode == 0, "nor for a build without shares"


def test_a_share_with_other_options_or_inputs_is_refused_and_a_whole_build_waits(work: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    ended(share(work, output, "0/50"))
    other = run_build(work / "raw", output, work / "tok", task_range="1/50", **OPTIONS | {"val_fraction": 0.1})
    assert other.returncode == 1
    assert "val_fraction was 0.05 and is 0.1" in other.stderr
    fewer = run_build(work / "raw/part-0.jsonl", output, work / "tok", task_range="1/50", **OPTIONS)
    assert fewer.returncode == 1
    assert f"{work}/raw/part-1.parquet is no longer an input" in fewer.stderr
    assert run_build(work / "raw", output, work / "tok", **OPTIONS).returncode == 0, "without a share it does the rest"
    assert same_corpus(output, work / "expected")


# ---- --dedup exact: every share is hashed before any is tokenized


@pytest.fixture(scope="module")
def copies(work: Path) -> Path:
    """A folder of inputs, two texts in five of them copies, some within a file; beside it what one process makes."""
    for part in range(4):
        texts = some_texts(400, seed=part // 2, longest=150)[part % 2 * 100 :]
        write = write_parquet if part % 2 else write_jsonl
        write(work / f"copies/part-{part}.{'parquet' if part % 2 else 'jsonl'}", [*texts, *texts[:50]])
    build_here(work / "copies", work / "expected-deduplicated", work / "tok", dedup="exact", **OPTIONS)
    assert read_manifest(work / "expected-deduplicated").rejects["duplicate"] == 800
    return work / "copies"


def run_here(patch: pytest.MonkeyPatch, copies: Path, output: Path, name: str, **options: Any) -> int:
    """Run a share in this process."""
    patch.setitem(EXECUTORS, "local", InlineExecutor)
    chosen = {"dedup": "exact", "task_range": parse_range(name), **OPTIONS, **options}
    return build(BuildOptions(dataset=(str(copies),), tokenizer=copies.parent / "tok", output=output, **chosen))


@pytest.mark.parametrize("count", [3, 40])
def test_shares_leave_out_the_copies_that_one_build_does(
    work: Path, copies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    output = tmp_path / "out"
    shares = [f"{index}/{count}" for index in range(count)]
    for name in (*reversed(shares), shares[0]):
        assert run_here(monkeypatch, copies, output, name, hash_only=True) == 0
    for name in shares:
        assert run_here(monkeypatch, copies, output, name) == 0
    assert run_here(monkeypatch, copies, output, shares[0], hash_only=True) == 0, "too late, and nothing to do"
    assert seal(output) == 0
    assert same_corpus(output, work / "expected-deduplicated")
    assert not any((output / name).exists() for name in (CLAIMS, HASHES, COPIES))


def test_a_share_that_is_to_be_tokenized_too_early_is_told_which_to_hash(
    work: Path, copies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    run_here(monkeypatch, copies, output, "1/3", hash_only=True)
    expected = "Run --hash_only with --task_range 0/3, 2/3; when these are done, all shares without --hash_only."
    for attempt in (lambda: run_here(monkeypatch, copies, output, "1/3"), lambda: seal(output)):
        with pytest.raises(CorpusError, match="not every share is hashed") as told:
            attempt()
        assert str(told.value).endswith(expected)
    with pytest.raises(CorpusError, match='dedup was "exact" and is null'):
        run_here(monkeypatch, copies, output, "0/3", dedup=None)
    build_here(copies, output, work / "tok", dedup="exact", **OPTIONS)
    assert same_corpus(output, work / "expected-deduplicated"), "without a share a build does the rest"


def test_copies_that_a_killed_process_did_not_tell_are_told_by_the_next(
    work: Path, copies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: Any) -> int:
        raise KeyboardInterrupt

    output = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("flame.preprocess.dedup_pass.merge", killed)
        run_here(patch, copies, output, "0/1", hash_only=True)
    assert not (output / COPIES).exists()
    assert run_here(monkeypatch, copies, output, "0/1") == 0
    assert seal(output) == 0
    assert same_corpus(output, work / "expected-deduplicated")


def test_shares_that_race_or_are_killed_leave_out_the_same_copies(
    work: Path, copies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    hashing = {"dataset": copies, "dedup": "exact", "hash_only": True}
    killed = share(work, output, "0/2", **hashing)
    assert until(lambda: len(list((output / HASHES).glob("task-*.json"))) > 1)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert until(lambda: not processes_of(killed.pid))
    racing = [share(work, output, name, **hashing) for name in ("0/2", "1/2", "1/2")]
    said = [ended(process)[0] for process in racing]
    assert any("every share is hashed and the copies are known" in text for text in said)
    assert (output / COPIES).is_dir() and not (output / HASHES).exists()
    for name in ("0/2", "1/2"):
        run_here(monkeypatch, copies, output, name)
    assert seal(output) == 0
    assert same_corpus(output, work / "expected-deduplicated")


@pytest.mark.parametrize("options", [{}, {"dedup": "exact"}, {"task_range": TaskRange(index=0, count=2)}])
def test_hash_only_is_for_shares_of_a_build_that_looks_for_copies(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--dedup exact and --task_range i/n with it"):
        BuildOptions(dataset=("a",), tokenizer=Path("t"), output=Path("o"), hash_only=True, **options)


# ---- what is malformed, claims, shares in words


def test_errors_of_all_shares_are_looked_at_when_they_are_sealed(work: Path, tmp_path: Path) -> None:
    raw = write_jsonl(tmp_path / "raw.jsonl", some_texts(90))
    with open(raw, "a") as file:
        file.write("{\n" * 10)
    options = {"on_error": "skip", "max_error_fraction": 0.05, "task_range": TaskRange(index=0, count=1)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EXECUTORS, "local", InlineExecutor)
        build(BuildOptions(dataset=(str(raw),), tokenizer=work / "tok", output=tmp_path / "out", **options))
    with pytest.raises(InputError, match=r"got 10 of 100 documents, 10%; refused until now: 10 malformed_json"):
        seal(tmp_path / "out")
    assert build(BuildOptions(output=tmp_path / "out", seal=True, max_error_fraction=0.2)) == 0


def test_a_claim_dies_with_its_owner_and_is_waited_for(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from flame.preprocess.claims import claimed
for task in map(int, sys.argv[3:]):
    with claimed(Path(sys.argv[1]), task, wait=False) as ours:
        print(ours, flush=True)
        if sys.argv[2] == "die":
            os.kill(os.getpid(), 9)
"""

    def elsewhere(how: str, *tasks: int) -> list[str]:
        words = [sys.executable, "-c", code, str(tmp_path), how, *map(str, tasks)]
        return subprocess.run(words, env=environment(), stdout=subprocess.PIPE, text=True).stdout.split()

    with claimed(tmp_path, 7, wait=True) as ours:
        assert ours
        assert elsewhere("end", 7, 8) == ["False", "True"]
    assert elsewhere("die", 7) == ["True"]
    with claimed(tmp_path, 7, wait=False) as ours:
        assert ours


@given(st.integers(1, 50), st.integers(1, 300), st.data())
def test_shares_cover_every_task_once_and_name_what_is_missing(count: int, num_tasks: int, data: st.DataObject) -> None:
    shares = [TaskRange(index=index, count=count) for index in range(count)]
    assert [task for one in shares for task in one.tasks(num_tasks)] == list(range(num_tasks))
    sizes = [len(one.tasks(num_tasks)) for one in shares]
    assert max(sizes) - min(sizes) <= 1
    missing = data.draw(st.sets(st.integers(0, num_tasks - 1)))
    expected = [one for one in shares if missing & set(one.tasks(num_tasks))]
    assert unfinished(missing, num_tasks, count) == expected


def test_stretches_are_told_in_words() -> None:
    assert stretches([9, 3, 4, 5]) == "3 to 5, 9"
    assert stretches(range(0, 40, 2)).endswith("18 and 10 more stretches")


@pytest.mark.parametrize("text", ["4/4", "-1/4", "1", "1/0", "a/b", "1/2/3", "", "½/2"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="0 ≤ i < n: of four shares the first is 0/4, the last 3/4"):
        parse_flat(
            BuildOptions, ["--dataset", "a", "--tokenizer", "t", "--output", "o", f"--task_range={text}"], program="p"
        )
    assert parse_range(" 3/4 ") == TaskRange(index=3, count=4)


def test_what_a_build_needs_is_told_and_sealing_needs_only_the_folder() -> None:
    with pytest.raises(UsageError, match="build needs --dataset, --tokenizer"):
        BuildOptions(output=Path("o"))
    make: Callable[..., BuildOptions] = BuildOptions
    assert make(output=Path("o"), seal=True).seal
