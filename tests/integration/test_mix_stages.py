"""Mixtures in stages: from a recipe, and as edits of a mixture that a run is drawing from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flame.cli.mix import main as flame_mix
from flame.errors import UsageError
from flame.sampling.interleave import TABLE_SLOTS, integer_weights
from flame.sampling.mixture_file import read_mixture
from flame.sampling.recipe import read_recipe
from flame.sampling.sampler import Sampler
from flame.sampling.sources import open_mixture
from flame.train.__main__ import main as flame_train
from tests.corpora import make_corpus
from tests.runs import PROJECT, VOCABULARY, arguments, make_training_folder, random_documents, read_metrics

RECIPE = """
tokens = "1000"
[sources.web]
corpus = "corpora/web"
max_epochs = 2.5
[sources.code]
corpus = "corpora/code"
[[stages]]
weights = { web = 3, code = 1 }
[[stages]]
start = "40%"
ramp = "20%"
ramp_steps = 4
weights = { web = 1, code = 3 }
[[stages]]
start = "80%"
weights = "natural"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two corpora, `web` of 3,000 tokens and `code` of 1,000; the working directory beside them."""
    make_corpus(tmp_path / "corpora/web", [[1 + i % 200] * 9 for i in range(300)])
    make_corpus(tmp_path / "corpora/code", [[1 + i] * 99 for i in range(10)])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mix(*words: object) -> int:
    return flame_mix([str(word) for word in words])


def shares(path: str) -> list[tuple[int, float]]:
    """Each stage's start, and the share of the first source."""
    return [(stage.start_tokens, stage.weights[0] / TABLE_SLOTS) for stage in read_mixture(Path(path)).stages]


# ---- recipes


def test_a_recipe_becomes_stages(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mix.toml").write_text(RECIPE)
    assert mix("create", "--recipe", "mix.toml", "--output", "mix.json") == 0
    expected = [(0, 0.75), (400, 0.6875), (450, 0.5625), (500, 0.4375), (550, 0.3125), (600, 0.25), (800, 0.75)]
    assert shares("mix.json") == [(start, pytest.approx(share, abs=1e-6)) for start, share in expected]
    assert read_mixture(folder / "mix.json").sources[0].max_epochs == 2.5
    # The options win over what the recipe says; percentages are of them.
    assert mix("create", "--recipe", "mix.toml", "--tokens", 2000, "--seed", 7, "--output", "other.json") == 0
    assert shares("other.json")[1] == (800, pytest.approx(0.6875, abs=1e-6))
    assert read_mixture(folder / "other.json").data_seed == 7
    capsys.readouterr()
    assert mix("create", "--recipe", "mix.toml", "--tokens", 30_000, "--output", "long.json") == 1
    assert "max_epochs" in capsys.readouterr().err and not (folder / "long.json").exists()


def test_unimax_from_both_doors(folder: Path) -> None:
    sources = ["--source", "web=corpora/web", "--source", "code=corpora/code"]
    assert mix("create", *sources, "--unimax", 2, "--tokens", 6000, "--output", "a.json") == 0
    assert shares("a.json") == [(0, pytest.approx(4 / 6, abs=1e-6))]  # code twice, the rest is web's
    text = RECIPE.partition("[[stages]]")[0].replace("1000", "6000")
    (folder / "mix.toml").write_text(text + "[[stages]]\nweights = { unimax_epochs = 2 }\n")
    assert mix("create", "--recipe", "mix.toml", "--output", "b.json") == 0
    assert shares("b.json") == shares("a.json")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("ramp_steps = 4", "rampsteps = 4", "stages[1].rampsteps"),
        ('start = "40%"', "", "stages[1].start"),
        ('tokens = "1000"', "", "how long the run is"),
        ("web = 3", "web = -3", "'web' is no weight, at stages[0].weights"),
        ("web = 3", "wbe = 3", "Did you mean web?"),
        ('"natural"', '"neutral"', "stages[2].weights (in mix.toml; got 'neutral'; expected weights by name"),
        ('ramp = "20%"', 'ramp = "50%"', "stages[1].ramp"),
        ("ramp_steps = 4", "ramp_steps = 0", "stages[1].ramp_steps"),
        ("ramp_steps = 4", "ramp_steps = 201", "stages[1].ramp (in mix.toml; got '20%'"),
        ('ramp = "20%"', "", "stages[1].ramp_steps"),
        ('start = "80%"', "start = 300", "stages[2].start"),
        ('start = "80%"', 'start = "8.0.0%"', "stages[2].start (in mix.toml; got '8.0.0%'"),
        ('start = "80%"', 'start = "180%"', "stages[2].start (in mix.toml; got '180%'"),
        ('start = "80%"', 'start = "1K"', "less than the 1,000 tokens of the run"),
        ('start = "80%"', "start = -5", "stages[2].start (in mix.toml; got -5"),
        ('tokens = "1000"', 'tokens = "lots"', "wrong at tokens (in mix.toml; got 'lots'"),
        ('tokens = "1000"', "tokens = 0", "wrong at tokens"),
        ('corpus = "corpora/web"', "corpus = 3", "sources.web.corpus"),
        ('corpus = "corpora/web"', 'corpus = "corpora/wbe"', "sources.web.corpus (in mix.toml; got 'corpora/wbe'"),
        ('corpus = "corpora/code"', 'corpus = "corpora/code"\nsplit = 3', "sources.code.split"),
        ("[sources.web]", "[sources.web", "no TOML"),
        ("max_epochs = 2.5", "max_epochs = 0", "sources.web.max_epochs"),
        ("weights = { web = 3, code = 1 }", "start = 5\nweights = { web = 3, code = 1 }", "stages[0].start"),
    ],
)
def test_what_a_recipe_says_wrong_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, told: str
) -> None:
    assert RECIPE.count(old) == 1
    (folder / "mix.toml").write_text(RECIPE.replace(old, new))
    assert mix("create", "--recipe", "mix.toml", "--output", "mix.json") == 2
    said = capsys.readouterr().err
    assert told in said and "mix.toml" in said and said.count("\n") == 1
    assert not (folder / "mix.json").exists()


def test_the_recipe_that_is_shipped_is_one(folder: Path) -> None:
    text = (PROJECT / "configs" / "mix" / "three_stages.toml").read_text()
    (folder / "a" / "b").mkdir(parents=True)
    for number, name in enumerate(("web", "math", "code")):
        make_corpus(folder / "a" / "corpora" / name, [[5 + number] * 9] * 100)
    (folder / "a" / "b" / "mix.toml").write_text(text.replace("../../corpora", "../corpora"))
    recipe = read_recipe(folder / "a" / "b" / "mix.toml")
    assert len(recipe.mixture.stages) == 1 + 8 + 1 + 1 and recipe.tokens == 100 * 10**9
    with pytest.raises(UsageError, match="no such recipe"):
        read_recipe(folder / "absent.toml")


# ---- edits


def test_an_edit_keeps_what_was_drawn_and_adds_a_source(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_corpus(folder / "corpora/math", [[300] * 49] * 40)
    assert mix("create", "--source", "web=corpora/web:3", "--source", "code=corpora/code:1", "--output", "a.json") == 0
    new = ["--add", "math=corpora/math:0.5", "--ramp", 400, "--ramp_steps", 2]
    assert mix("edit", "a.json", "--start", 2000, *new, "--output", "b.json") == 0
    old, edited = read_mixture(folder / "a.json"), read_mixture(folder / "b.json")
    assert edited.parents == (old.fingerprint,)
    assert [stage.start_tokens for stage in edited.stages] == [0, 2000, 2200, 2400]
    assert edited.stages[-1].weights == integer_weights("wcm", [0.375, 0.125, 0.5])
    assert edited.stages[0].weights == (*old.stages[0].weights, 0)
    assert f"\nedited from {old.fingerprint}\n" in capsys.readouterr().out
    # Every sample before the start is the old one; after it, each source's windows go on where they were.
    ks = np.arange(600)
    before, after = (Sampler(m, open_mixture(m), 8).locate(ks) for m in (old, edited))
    for name in ("source", "epoch", "window", "offset"):
        assert np.array_equal(getattr(before, name)[:250], getattr(after, name)[:250])
    longer = Sampler(old, open_mixture(old), 8).locate(np.arange(2000))
    for source in (0, 1):
        mine, straight = after.source == source, longer.source == source
        for name in ("epoch", "window", "offset"):
            count = int(mine.sum())
            assert np.array_equal(getattr(after, name)[mine], getattr(longer, name)[straight][:count])
    # A second edit names both ancestors.
    weights = ["--weight", "web=0", "--weight", "code=1", "--weight", "math=1", "--max_epochs", "math=9"]
    assert mix("edit", "b.json", "--start", 3000, *weights, "--output", "c.json") == 0
    third = read_mixture(folder / "c.json")
    assert third.parents == (edited.fingerprint, old.fingerprint)
    assert [source.max_epochs for source in third.sources] == [None, None, 9]
    assert third.is_continuation_of(old, consumed_samples=250, window_len=8)
    assert third.is_continuation_of(edited, consumed_samples=375, window_len=8)
    assert not third.is_continuation_of(edited, consumed_samples=376, window_len=8)
    assert mix("edit", "b.json", "--start", 3000, *weights, "--output", "c.json") == 0, "the same again is no change"
    capsys.readouterr()
    assert mix("edit", "b.json", "--start", 3000, *weights, "--tokens", "1M", "--output", "d.json") == 1, "beyond a cap"
    assert "'math': " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--start", 0, "--weight", "web=1"], "beginning"),
        (["--start", 10], "nothing changes"),
        (["--start", 10, "--weight", "web=1"], "leaves sources out"),
        (["--start", 10, "--weight", "wbe=1"], "no such source"),
        (["--start", 10, "--weight", "web"], "no weight"),
        (["--start", 10, "--weight", "web=1", "--weight", "code=1", "--tokens", 10], "before the new stage begins"),
        (
            ["--start", 10, "--weight", "web=1", "--weight", "code=1", "--weight", "web=2"],
            "--weight speaks of web twice",
        ),
        (["--start", 10, "--weight", "web=1", "--weight", "code=1", "--max_epochs", "wbe=2"], "names no source"),
        (["--start", 10, "--weight", "web=1", "--weight", "code=1", "--ramp", 7], "for each of its 8 steps"),
        (["--start", 10, "--weight", "web=1", "--weight", "code=1", "--ramp", 7, "--ramp_steps", 0], "--ramp_steps"),
        (["--start", 10, "--add", "web=corpora/code@train:0.1"], "one name"),
        (["--start", 10, "--weight", "web=1", "--weight", "code=-1"], "'code'"),
        (["--start", 10, "--add", "m=corpora/web:0.5"], "same corpus"),
        (["--start", 10, "--add", "m=corpora/absent:0.5"], "absent"),
        (["--start", 10, "--add", "m=corpora/web"], "no weight"),
        (["--start", 10, "--add", "m=corpora/code:1"], "leave nothing"),
        (["--start", 10, "--weight", "web=1", "--weight", "code=1", "--ramp", 0], "no length"),
        (["--start", 10, "--weight", "web=1", "--weight", "code=1", "--run", "corpora"], "no run"),
    ],
)
def test_edits_that_cannot_be_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[Any], told: str
) -> None:
    assert mix("create", "--source", "web=corpora/web:3", "--source", "code=corpora/code:1", "--output", "a.json") == 0
    capsys.readouterr()
    assert mix("edit", "a.json", *words, "--output", "b.json") in (1, 2)
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1 and not (folder / "b.json").exists()


def test_later_stages_are_dropped_only_on_purpose(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mix.toml").write_text(RECIPE)
    assert mix("create", "--recipe", "mix.toml", "--output", "a.json") == 0
    change = ["--start", 450, "--weight", "web=1", "--weight", "code=0"]
    assert mix("edit", "a.json", *change, "--output", "b.json") == 2
    assert "--replace_later" in capsys.readouterr().err
    assert mix("edit", "a.json", *change, "--replace_later", "--output", "b.json") == 0
    assert [start for start, _ in shares("b.json")] == [0, 400, 450]


def test_a_run_resumes_onto_an_edited_mixture(
    tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = make_training_folder(tmp_path, tiny_tokenizer), tmp_path / "run"
    make_corpus(folder / "math", random_documents(200, seed=8), vocab_size=VOCABULARY, tokenizer=tiny_tokenizer)
    sources = ["--source", f"web={folder / 'web'}:3", "--source", f"code={folder / 'code'}:1"]
    assert mix("create", *sources, "--output", folder / "a.json") == 0
    options = {"training__batch_size": 4, "checkpoint__interval": 4}

    def train(mixture: str, steps: int) -> int:
        argv = arguments(folder, run, training__dataset=folder / mixture, training__steps=steps, **options)
        return flame_train([word for word in argv if "data_probs" not in word])

    assert train("a.json", 4) == 0
    add = ["--add", f"math={folder / 'math'}:0.9", "--output", folder / "b.json"]
    assert mix("edit", folder / "a.json", "--run", run, "--start", 128 * 4 * 4 - 1, *add) == 2
    assert "passed --start" in capsys.readouterr().err
    late = ["--start", 128 * 4 * 4 - 128, "--weight", "web=1", "--weight", "code=1", "--output", folder / "late.json"]
    assert mix("edit", folder / "a.json", *late) == 0
    capsys.readouterr()
    assert train("late.json", 8) == 1
    assert "an edit from token 1,920 on, 2,048 tokens consumed" in capsys.readouterr().err
    assert mix("edit", folder / "a.json", "--run", run, "--start", 128 * 4 * 5, *add) == 0
    assert train("b.json", 8) == 0
    lines = read_metrics(run)
    assert [line["stage"] for line in lines] == [0] * 5 + [1] * 3
    assert [line.get("tokens/math", 0) > 0 for line in lines] == [False] * 5 + [True] * 3
    assert [line["consumed_samples"] for line in lines] == [4 * step for step in range(1, 9)]
    # It goes on from there by the same command, and never back to the mixture before.
    assert train("b.json", 9) == 0
    capsys.readouterr()
    assert train("a.json", 10) == 1
    assert "'math' is not the run's" in capsys.readouterr().err
    starts = [json.loads(line) for line in (run / "segments.jsonl").read_text().splitlines()]
    assert len({start["mixture_fingerprint"] for start in starts}) == 2
    assert {start["data_segment"] for start in starts} == {0}


def test_a_run_finds_a_corpus_that_was_moved(
    tmp_path: Path, tiny_tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = make_training_folder(tmp_path, tiny_tokenizer), tmp_path / "run"
    sources = ["--source", f"web={folder / 'web'}:3", "--source", f"code={folder / 'code'}:1"]
    assert mix("create", *sources, "--output", folder / "mix.json") == 0
    argv = arguments(folder, run, training__dataset=folder / "mix.json", training__steps=2)
    argv = [word for word in argv if "data_probs" not in word]
    assert flame_train(argv) == 0
    (folder / "web").rename(folder / "moved")
    longer = [*argv, "--training.steps=3"]
    capsys.readouterr()
    assert flame_train(longer) == 2
    assert "--source web=PATH" in capsys.readouterr().err
    assert flame_train([*longer, "--source", f"web={folder / 'code'}"]) == 1, "another corpus is not it"
    assert flame_train([*longer, "--source", f"wbe={folder / 'moved'}"]) == 2
    assert flame_train([*longer, "--source", f"web={folder / 'moved'}"]) == 0
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 3]
    capsys.readouterr()
    assert mix("trace", "--run", run, "--step", 3, "--json") == 0, "the run's own manifest says where it is now"
    assert flame_train([*arguments(folder, tmp_path / "other"), "--source", "web=x"]) == 2
