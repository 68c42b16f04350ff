"""`flame-mix` as it is typed: manifests made, shown and checked, samples listed, wrong calls refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flame.cli.mix import main
from flame.sampling.mixture import Mixture
from flame.sampling.mixture_file import read_mixture
from flame.sampling.sampler import Sampler
from flame.sampling.sources import open_mixture
from tests.corpora import make_corpus

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two corpora: `web` of 300 documents of 10 tokens, `code` of 10 of 100; the working directory beside them."""
    make_corpus(tmp_path / "corpora/web", [[1 + i % 200] * 9 for i in range(300)], val=[[7] * 9] * 20)
    make_corpus(tmp_path / "corpora/code", [[1 + i] * 99 for i in range(10)])
    monkeypatch.chdir(tmp_path)
    return tmp_path


WEB_AND_CODE = ["--source", "web=corpora/web:0.7", "--source", "code=corpora/code@train:0.3"]
UNWEIGHTED = ["--source", "web=corpora/web", "--source", "code=corpora/code"]


def mix(*words: object) -> int:
    return main([str(word) for word in words])


def create(*words: object, output: str = "mix.json") -> int:
    return mix("create", *words, "--output", output)


def refused(capsys: Capture, code: int, *words: object) -> str:
    """Run what is to be refused, and return its one paragraph."""
    capsys.readouterr()
    assert mix(*words) == code
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("flame-mix: "), said
    return said


def proportions(path: str) -> list[float]:
    stage = read_mixture(Path(path)).stages[0]
    return [weight / sum(stage.weights) for weight in stage.weights]


def cells(table: str) -> dict[str, list[str]]:
    """The last cells of each row of a table by its first."""
    return {line.split()[0]: line.split()[1:] for line in table.splitlines() if line.strip()}


# ---- create


def test_a_mixture_by_hand(folder: Path, capsys: Capture) -> None:
    assert create(*WEB_AND_CODE, "--tokens", "4K", "--seed", 7, output="mixes/mix.json") == 0
    value = json.loads((folder / "mixes/mix.json").read_text())
    assert list(value) == ["format_version", "data_seed", "parent", "sources", "stages"]
    assert (value["format_version"], value["data_seed"], value["parent"]) == (1, 7, None)
    assert [source["corpus"] for source in value["sources"]] == ["../corpora/web", "../corpora/code"]
    assert value["stages"] == [{"start_tokens": 0, "weights": [2936013, 1258291]}]
    out, err = capsys.readouterr()
    assert cells(out)["web"] == ["3,000", "0.700000", "0.958904", "2,800", "0.933", "-"]  # 0.07 to 0.003 documents
    assert cells(out)["code"] == ["1,000", "0.300000", "0.041096", "1,200", "1.200", "-"]
    assert "mixes/mix.json" in err and "mixes/mix.json" not in out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--natural"], [0.75, 0.25]),
        (["--natural", "--min_proportion", "0.4"], [0.6, 0.4]),
        (["--natural", "--min-proportion=0.5"], [0.5, 0.5]),
        (["--temperature", "1"], [0.75, 0.25]),
        (["--temperature", "2"], [3**0.5 / (1 + 3**0.5), 1 / (1 + 3**0.5)]),
        (["--temperature", "1e9", "--min_proportion", "0.1"], [0.5, 0.5]),
    ],
)
def test_weights_after_tokens(folder: Path, options: list[str], expected: list[float]) -> None:
    assert create(*UNWEIGHTED, *options) == 0
    assert proportions("mix.json") == pytest.approx(expected, abs=1e-6)


def test_weights_need_not_sum_to_1(folder: Path) -> None:
    for number, (web, code) in enumerate([("0.21", "0.09"), ("70", "30")]):
        assert (
            create("--source", f"web=corpora/web:{web}", "--source", f"c=corpora/code:{code}", output=f"{number}") == 0
        )
        assert proportions(f"{number}") == pytest.approx([0.7, 0.3], abs=1e-6)


def test_a_weight_of_zero_is_never_drawn(folder: Path, capsys: Capture) -> None:
    assert create("--source", "web=corpora/web:1", "--source", "code=corpora/code:0") == 0
    capsys.readouterr()
    assert mix("samples", "mix.json", "--window_len", 8, "--count", 2000, "--json") == 0
    assert {json.loads(line)["source"] for line in capsys.readouterr().out.splitlines()} == {"web"}


def test_a_plan_beyond_a_cap_is_shown_and_refused(folder: Path, capsys: Capture) -> None:
    caps = ["--max_epochs", "3", "--max_epochs", "code=1.1"]
    assert create(*WEB_AND_CODE, *caps, "--tokens", "4K") == 1
    out, err = capsys.readouterr()
    assert cells(out)["code"][-2:] == ["1.200", "1.1"]
    assert "'code': 1.200 epochs of at most 1.1" in err and "at most 3,666 tokens" in err
    assert not (folder / "mix.json").exists()
    assert create(*WEB_AND_CODE, *caps, "--tokens", 3666) == 0
    assert [source.max_epochs for source in read_mixture(Path("mix.json")).sources] == [3.0, 1.1]


def test_an_output_that_is_there(folder: Path, capsys: Capture) -> None:
    assert create(*WEB_AND_CODE) == 0
    before = (folder / "mix.json").stat().st_mtime_ns
    assert create(*WEB_AND_CODE) == 0
    assert (folder / "mix.json").stat().st_mtime_ns == before
    other = ["create", *UNWEIGHTED, "--natural", "--output", "mix.json"]
    assert "another mixture" in refused(capsys, 1, *other)
    assert mix(*other, "--overwrite") == 0
    assert proportions("mix.json") == [0.75, 0.25]
    (folder / "mix.json").write_text("a diary")
    assert "no mixture manifest" in refused(capsys, 1, *other, "--overwrite")
    assert (folder / "mix.json").read_text() == "a diary"


@pytest.mark.parametrize(
    ("code", "words", "message"),
    [
        (2, [], "needs --source"),
        (2, ["--source", "web=corpora/web"], "has no weight"),
        (2, ["--source", "corpora/web:1"], "names no source"),
        (2, ["--source", "web=:1"], "names no corpus"),
        (2, ["--source", "web=corpora/web:much"], "'much' is no number"),
        (2, ["--source", "web=corpora/wbe:1"], "no such corpus folder"),
        (1, ["--source", "web=corpora:1"], "no corpus"),
        (1, ["--source", "web=corpora/web@test:1"], "no split 'test'"),
        (2, ["--source", "a/b=corpora/web:1"], "a/b"),
        (2, ["--source", "web=corpora/web:-0.1"], "no weight"),
        (2, ["--source", "web=corpora/web:nan"], "no weight"),
        (2, ["--source", "web=corpora/web:inf"], "no weight"),
        (2, ["--source", "web=corpora/web:0"], "above 0"),
        (2, ["--source", "web=corpora/web:1", "--source", "code=corpora/code:1e-9"], "'code' is too small"),
        (1, ["--source", "a=corpora/web:1", "--source", "b=corpora/web:1"], "the same corpus and split"),
        (2, ["--source", "a=corpora/web:1", "--source", "a=corpora/code:1"], "name of its own"),
        (2, [*WEB_AND_CODE, "--natural"], "none can be given"),
        (2, [*UNWEIGHTED, "--natural", "--temperature", "2"], "exclude each other"),
        (2, [*UNWEIGHTED, "--temperature", "0"], "no temperature"),
        (2, [*UNWEIGHTED, "--natural", "--min_proportion", "0.6"], "leaves no room"),
        (2, [*WEB_AND_CODE, "--min_proportion", "0.1"], "goes with"),
        (2, [*WEB_AND_CODE, "--max_epochs", "cod=2"], "names no source"),
        (2, [*WEB_AND_CODE, "--max_epochs", "0"], "no number of epochs"),
        (2, [*WEB_AND_CODE, "--max_epochs", "2", "--max_epochs", "3"], "--max_epochs speaks of all twice"),
        (2, [*WEB_AND_CODE, "--tokens", "1.5"], "no whole count"),
        (2, [*WEB_AND_CODE, "--tokens", "0"], "no run"),
        (2, [*WEB_AND_CODE, "--sede", "3"], "seed"),
    ],
)
def test_wrong_calls_are_refused(folder: Path, capsys: Capture, code: int, words: list[str], message: str) -> None:
    assert message in refused(capsys, code, "create", *words, "--output", "mix.json")
    assert not (folder / "mix.json").exists()


def test_corpora_of_two_tokenizers_are_refused(folder: Path, capsys: Capture) -> None:
    make_corpus(folder / "other", [[1, 2]], eos_id=3)
    assert "another tokenizer" in refused(
        capsys, 1, "create", *UNWEIGHTED, "--source", "other=other", "--natural", "--output", "mix.json"
    )


# ---- show


def test_show_says_what_create_said(folder: Path, capsys: Capture) -> None:
    create(*WEB_AND_CODE, "--tokens", "4K")
    created = capsys.readouterr().out
    assert mix("show", "mix.json", "--tokens", "4000") == 0
    assert capsys.readouterr().out == created
    assert mix("show", "mix.json") == 0
    assert cells(capsys.readouterr().out)["web"] == ["3,000", "0.700000", "0.958904", "-", "-", "-"]


def test_show_as_json(folder: Path, capsys: Capture) -> None:
    create(*WEB_AND_CODE)
    capsys.readouterr()
    assert mix("show", "mix.json", "--json", "--tokens", "4K") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["fingerprint"] == read_mixture(Path("mix.json")).fingerprint
    assert [row["tokens_drawn"] for row in shown["plan"][0]] == [2800, 1200]
    assert shown["stages"] == [{"start_tokens": 0, "weights": [2936013, 1258291]}]


def test_show_works_without_the_corpora(folder: Path, capsys: Capture) -> None:
    create(*WEB_AND_CODE)
    shutil.rmtree("corpora")
    capsys.readouterr()
    assert mix("show", "mix.json") == 0
    assert cells(capsys.readouterr().out)["code"] == ["1,000", "0.300000", "-", "-", "-", "-"]


# ---- check


def test_check_finds_nothing_wrong(folder: Path, capsys: Capture) -> None:
    create(*WEB_AND_CODE)
    capsys.readouterr()
    assert mix("check", "mix.json") == 0
    assert "2 sources" in capsys.readouterr().out


def truncate_a_shard(folder: Path) -> None:
    path = folder / "corpora/web/train/shard-00000-001.tokens.npy"
    os.truncate(path, path.stat().st_size - 2)


def lose_two_files(folder: Path) -> None:
    (folder / "corpora/web/train/shard-00000-000.ends.npy").unlink()
    (folder / "corpora/code/train/shard-00000-000.tokens.npy").unlink()


def rebuild_a_corpus(folder: Path) -> None:
    shutil.rmtree(folder / "corpora/code")
    make_corpus(folder / "corpora/code", [[5] * 99] * 10)


def lose_a_corpus(folder: Path) -> None:
    shutil.rmtree(folder / "corpora/web")


def break_the_manifest(folder: Path) -> None:
    (folder / "mix.json").write_text('{"format_version": 1}')


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (truncate_a_shard, [("web", "shard-00000-001.tokens.npy")]),
        (lose_two_files, [("web", "shard-00000-000.ends.npy"), ("code", "shard-00000-000.tokens.npy")]),
        (rebuild_a_corpus, [("code", "another corpus")]),
        (lose_a_corpus, [("web", "no such corpus folder")]),
        (break_the_manifest, [(None, "wrong at sources")]),
    ],
)
def test_check_names_what_is_wrong(
    folder: Path, capsys: Capture, damage: Callable[[Path], None], expected: list[tuple[str | None, str]]
) -> None:
    create(*WEB_AND_CODE)
    damage(folder)
    capsys.readouterr()
    assert mix("check", "mix.json") == 3
    lines = capsys.readouterr().out.splitlines()
    assert mix("check", "mix.json", "--json") == 3
    findings = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == len(findings) == len(expected)
    for (source, text), line, finding in zip(expected, lines, findings, strict=True):
        assert line.startswith(f"{source or 'mix.json'}: ") and text in line
        assert finding["source"] == source and text in finding["problem"]


@pytest.mark.parametrize("kind", ["tokens", "ends"])
def test_a_full_check_reads_every_byte(folder: Path, capsys: Capture, kind: str) -> None:
    create(*WEB_AND_CODE)
    assert mix("check", "mix.json", "--full") == 0
    assert "checksums" in capsys.readouterr().out
    path = folder / f"corpora/web/train/shard-00000-002.{kind}.npy"
    data = bytearray(path.read_bytes())
    data[-12] ^= 1  # neither the last token nor the last end
    path.write_bytes(data)
    assert mix("check", "mix.json") == 0
    capsys.readouterr()
    assert mix("check", "mix.json", "--full") == 3
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("web: the bytes of a file of the corpus changed") and path.name in line


def test_check_of_nothing_is_a_wrong_call(folder: Path, capsys: Capture) -> None:
    assert "no such mixture manifest" in refused(capsys, 2, "check", "mix.json")


def test_a_corpus_that_moved(folder: Path, capsys: Capture) -> None:
    create(*WEB_AND_CODE)
    (folder / "corpora/web").rename(folder / "moved")
    assert mix("check", "mix.json") == 3
    assert mix("check", "mix.json", "--source", "web=moved") == 0
    assert mix("samples", "mix.json", "--window_len", 8, "--source", "web=moved") == 0
    twice = ["--source", "web=moved", "--source", "web=corpora/code"]
    assert "--source speaks of web twice" in refused(capsys, 2, "check", "mix.json", *twice)
    assert "not the corpus" in refused(
        capsys, 1, "samples", "mix.json", "--window_len", 8, "--source", "web=corpora/code"
    )


# ---- samples


def samples(capsys: Capture, *words: object) -> list[dict[str, object]]:
    capsys.readouterr()
    assert mix("samples", "mix.json", "--window_len", 64, *words, "--json") == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_samples_are_what_the_trainer_reads(folder: Path, capsys: Capture) -> None:
    create(*WEB_AND_CODE)
    mixture: Mixture = read_mixture(Path("mix.json"))
    splits = open_mixture(mixture)
    located = Sampler(mixture, splits, 64).locate(np.arange(5, 105))
    found = samples(capsys, "--start", 5, "--count", 100)
    assert len(found) == 100
    for i, sample in enumerate(found):
        split, offset = splits[located.source[i]], int(located.offset[i])
        shard, start = split.locate(offset)
        name = split.shards[shard].name
        tokens = np.load(split.corpus.path / f"train/{name}.tokens.npy")
        assert sample == {
            "k": 5 + i,
            "source": ["web", "code"][located.source[i]],
            "epoch": int(located.epoch[i]),
            "window": int(located.window[i]),
            "offset": offset,
            "shard": f"train/{name}",
            "first_token_id": int(tokens[start]),
        }
        assert list(sample) == ["k", "source", "epoch", "window", "offset", "shard", "first_token_id"]


def test_any_stretch_is_a_part_of_the_whole(folder: Path, capsys: Capture) -> None:
    create(*WEB_AND_CODE)
    whole = samples(capsys, "--count", "9000")  # more than are located at once
    assert [sample["k"] for sample in whole] == list(range(9000))
    assert samples(capsys, "--start", 4000, "--count", 200) == whole[4000:4200]
    assert samples(capsys) == whole[:16]
    assert samples(capsys, "--count", 0) == []


def test_samples_as_a_table(folder: Path, capsys: Capture) -> None:
    create(*WEB_AND_CODE)
    capsys.readouterr()
    assert mix("samples", "mix.json", "--window_len", 64, "--count", 3) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["k", "source", "epoch", "window", "offset", "shard", "first_token_id"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("code", "words", "message"),
    [
        (2, [], "needs --window_len"),
        (2, ["--window_len", 0], "no length"),
        (2, ["--window_len", 64, "--start", "-1"], "no whole count"),
        (2, ["--window_len", 64, "--start", 2**62], "beyond the last sample"),
        (1, ["--window_len", 1000], "'code' is too small for one window"),
    ],
)
def test_wrong_stretches_are_refused(
    folder: Path, capsys: Capture, code: int, words: list[object], message: str
) -> None:
    create(*WEB_AND_CODE)
    assert message in refused(capsys, code, "samples", "mix.json", *words)


# ---- the program


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "flame.cli.mix", *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["create", "show", "check", "samples", "trace", "find"])
def test_help_names_every_option(command: str) -> None:
    shown = run(command, "-h")
    assert shown.returncode == 0 and shown.stderr == ""
    assert "--source" in shown.stdout


def test_commands_load_neither_arrow_nor_torch(folder: Path) -> None:
    create(*WEB_AND_CODE)
    script = (
        "import sys; from flame.cli.mix import main;"
        "code = main(['samples', 'mix.json', '--window_len', '8', '--count', '1']);"
        "sys.exit(code or any(name in sys.modules for name in ('pyarrow', 'torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_reader_that_stops_reading_ends_it_quietly(folder: Path) -> None:
    create(*WEB_AND_CODE)
    words = [sys.executable, "-m", "flame.cli.mix", "samples", "mix.json", "--window_len", "8", "--json"]
    with subprocess.Popen([*words, "--count", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
