"""A mixture of many stages as tables and as a picture: ramps found again, no line too wide, nothing lost."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flame.cli.mix import main
from flame.sampling.interleave import TABLE_SLOTS, integer_weights
from flame.sampling.mixture import Mixture, Source, Stage
from flame.sampling.mixture_file import write_mixture
from flame.sampling.mixture_plot import proportions_over_tokens
from flame.sampling.plan import plan_stages
from flame.sampling.recipe import ramp_stages
from flame.sampling.stages import ramps, short_count, stage_tables

NAMES = ["web", "code", "math"]
SOURCES = tuple(
    Source(name=name, corpus=Path(name), split="train", fingerprint=name, num_tokens=1000) for name in NAMES
)


def level(start: int, weights: list[float]) -> Stage:
    return Stage(start_tokens=start, weights=integer_weights(NAMES, weights))


def ramp(start: int, before: list[float], after: list[float], num_steps: int) -> list[Stage]:
    return [
        *ramp_stages(SOURCES, before, after, start=start, length=10**9, num_steps=num_steps),
        level(start + 10**9, after),
    ]


WEIGHTS = st.lists(st.integers(1, 1000), min_size=3, max_size=3).map(lambda given: [float(w) for w in given])


@settings(deadline=None)
@given(WEIGHTS, WEIGHTS, WEIGHTS, st.integers(2, 12), st.integers(2, 12))
def test_ramps_are_found_again(
    first: list[float], second: list[float], third: list[float], steps: int, more_steps: int
) -> None:
    shares = [[weight / sum(weights) for weight in weights] for weights in (first, second, third)]
    for before, after in (shares[:2], shares[1:]):
        if max(abs(a - b) for a, b in zip(before, after, strict=True)) < 1e-3:
            return  # rounding would hide it
    two_ramps = [
        level(0, first),
        *ramp(10**10, first, second, steps),
        *ramp(10**12, second, third, more_steps),
    ]
    end = steps + more_steps
    expected = [range(1), range(1, steps + 1), range(steps + 1, steps + 2), range(steps + 2, end + 2)]
    assert ramps(two_ramps) == [*expected, range(end + 2, end + 3)]


def test_level_stages_are_no_ramp() -> None:
    stages = [level(i * 1000, [1, 2, 3 + i * i]) for i in range(20)]
    assert ramps(stages) == [range(i, i + 1) for i in range(20)]
    cut = ramp(1000, [1, 0, 0], [0, 1, 0], 4)[:-2]  # an edit put another stage in its place
    stages = [level(0, [1, 0, 0]), *cut, level(10**10, [0, 0, 1])]
    assert ramps(stages) == [range(i, i + 1) for i in range(len(stages))]
    alike = [level(i * 1000, [1, 2, 3]) for i in range(5)]
    assert ramps(alike) == [range(i, i + 1) for i in range(5)]


def mixture_of(stages: list[Stage]) -> Mixture:
    return Mixture(data_seed=1, sources=SOURCES, stages=tuple(stages))


@pytest.mark.parametrize("num_tokens", [None, 10**7])
def test_twenty_stages_are_told_within_the_width(num_tokens: int | None) -> None:
    mixture = mixture_of([level(i * 500_000, [1 + i, 20, 3 * i]) for i in range(20)])
    plans = plan_stages(mixture, [10, 20, 30], num_tokens)
    tables = list(stage_tables(mixture, plans, 80))
    assert len(tables) > 1
    told: dict[str, list[str]] = {}
    for table in tables:
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        assert sum(widths) + 2 * (len(widths) - 1) <= 80
        title = ""
        for label, *cells in table:
            title = label if label and not label.startswith(" ") else title
            told.setdefault(title + label, []).extend(cells)
    assert told["stagestage"] == [str(i) for i in range(20)]
    expected = [f"{stage.weights[1] / TABLE_SLOTS:.4f}" for stage in mixture.stages]
    assert told["proportion  code"] == expected
    drawn = [plan[0].tokens_drawn for plan in plans]
    assert told["tokens drawn  web"] == ["-" if tokens is None else short_count(tokens) for tokens in drawn]


def test_a_ramp_is_one_column_of_all_that_it_draws() -> None:
    stages = [level(0, [1, 0, 0]), *ramp(10**9, [1, 0, 0], [0.5, 0.5, 0], 4)]
    mixture = mixture_of(stages)
    (table,) = stage_tables(mixture, plan_stages(mixture, [None] * 3, 3 * 10**9), 80)
    rows = [row[1:] for row in table]
    assert rows[:2] == [["0", "ramp 1-4", "5"], ["0", "1B", "2B"]]
    assert [row[0] for row in table[3:7]] == ["proportion", "  web", "  code", "  math"]
    assert rows[4] == ["1.0000", "0.7500", "0.5000"]
    assert rows[8:11] == [["", "", ""], ["1B", "750M", "500M"], ["0", "250M", "500M"]]


@pytest.mark.parametrize(
    ("value", "told"),
    [(0, "0"), (9999, "9999"), (10_000, "10K"), (12_345, "12.35K"), (57_500_000_000, "57.5B"), (10**13, "10T")],
)
def test_counts_are_told_short(value: int, told: str) -> None:
    assert short_count(value) == told


# ---- the picture


def test_what_is_drawn_is_the_stairs_of_the_stages() -> None:
    mixture = mixture_of([level(0, [3, 1, 0]), level(600, [1, 1, 2]), level(5000, [0, 0, 1])])
    edges, areas = proportions_over_tokens(mixture, 1000)
    assert edges == [0, 600, 600, 1000]
    assert areas == {"web": [0.75, 0.75, 0.25, 0.25], "code": [0.25] * 4, "math": [0, 0, 0.5, 0.5]}
    names = [f"s{i}" for i in range(100)]
    sources = tuple(Source(name=n, corpus=Path(n), split="train", fingerprint=n, num_tokens=9) for n in names)
    stage = Stage(start_tokens=0, weights=integer_weights(names, [1.0 + i for i in range(100)]))
    _, areas = proportions_over_tokens(Mixture(data_seed=1, sources=sources, stages=(stage,)), 1000)
    assert len(areas) == 20 and list(areas)[-1] == "81 others" and "s99" in areas and "s80" not in areas
    assert sum(area[0] for area in areas.values()) == pytest.approx(1)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    write_mixture(tmp_path / "mix.json", mixture_of([level(0, [3, 1, 0]), level(600, [1, 1, 2])]))
    return tmp_path / "mix.json"


def test_a_picture_is_written(manifest: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = manifest.with_name("mix.png")
    assert main(["show", str(manifest), "--tokens", "1000", "--plot", str(picture)]) == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 5000


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--plot", "{}/mix.png"], "--tokens"),
        (["--plot", "{}/mix.gif", "--tokens", "1000"], ".png, .svg or .pdf"),
        (["--plot", "{}/absent/mix.png", "--tokens", "1000"], "does not exist"),
        (["--plot", "{}/mix.png", "--tokens", "1000"], "flame[plot]"),
    ],
)
def test_pictures_that_cannot_be_drawn_are_refused(
    manifest: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], told: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["show", str(manifest), *(word.format(manifest.parent) for word in words)]) == 2
    assert told in capsys.readouterr().err
    assert not list(manifest.parent.glob("mix.png"))
