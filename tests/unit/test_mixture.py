"""Mixtures: what a manifest keeps, what is refused by name, what a resumed run may go on with."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flame.errors import CorpusError, FlameError, MixtureError, UsageError
from flame.sampling.interleave import TABLE_SLOTS
from flame.sampling.mixture import Mixture, Source, Stage
from flame.sampling.mixture_file import mixture_to_json, read_mixture, write_mixture
from flame.sampling.plan import check_epochs, longest_run, plan_stages
from flame.sampling.sources import mixture_of_corpora, open_mixture, source_of, split_corpus_text
from tests.corpora import make_corpus

HALF = TABLE_SLOTS // 2
FINGERPRINT = "sha256:7533a6009e154dbff75f7ecc71b257c6616daf127e9762ae6de1c3d92fb370e6"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_corpus(tmp_path / "corpora/web", [[1] * 9] * 30, val=[[2] * 9])
    make_corpus(tmp_path / "corpora/code", [[3] * 19] * 5)
    return tmp_path


def stage(start_tokens: int, *weights: int) -> Stage:
    return Stage(start_tokens=start_tokens, weights=weights)


def source(name: str, num_tokens: int = 1000, **values: Any) -> Source:
    return Source(
        name=name,
        corpus=Path("corpora") / name,
        split="train",
        num_tokens=num_tokens,
        **{"fingerprint": f"sha256:{name}", **values},
    )


def mixture(*stages: Stage, names: str = "ab", **values: Any) -> Mixture:
    return Mixture(
        **{"data_seed": 42, "sources": tuple(map(source, names)), "stages": stages or (stage(0, HALF, HALF),), **values}
    )


# ---- the manifest


def test_a_manifest_is_read_as_it_was_written(folder: Path) -> None:
    sources = (
        source_of("web", folder / "corpora/web", "train", max_epochs=4.0),
        source_of("code", folder / "corpora/code", "train"),
    )
    written = Mixture(
        data_seed=7,
        sources=sources,
        stages=(stage(0, HALF, HALF), stage(5000, TABLE_SLOTS, 0)),
        parents=("sha256:b", "sha256:a"),
    )
    write_mixture(folder / "mixes/deep/mix.json", written)
    value = json.loads((folder / "mixes/deep/mix.json").read_text())
    assert [given["corpus"] for given in value["sources"]] == ["../../corpora/web", "../../corpora/code"]
    assert value["parent"] == {"fingerprint": "sha256:b", "parent": {"fingerprint": "sha256:a", "parent": None}}
    assert set(value["sources"][0]) == {"name", "corpus", "split", "fingerprint", "num_tokens", "max_epochs"}
    assert read_mixture(folder / "mixes/deep/mix.json") == written
    assert [split.num_tokens for split in open_mixture(written)] == [300, 100]


def test_corpora_are_found_from_any_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mixture(folder / "mix.json", mixture_of_corpora([str(folder / "corpora/web")], None, 1))
    for start, path in ((folder, "mix.json"), (folder / "corpora", "../mix.json")):
        monkeypatch.chdir(start)
        assert len(open_mixture(read_mixture(Path(path)))) == 1


def test_corpora_are_found_through_a_linked_folder(folder: Path) -> None:
    (folder / "far/away").mkdir(parents=True)
    (folder / "link").symlink_to(folder / "far/away")
    write_mixture(folder / "link/mix.json", mixture_of_corpora([str(folder / "corpora/web")], None, 1))
    for path in ("link/mix.json", "far/away/mix.json"):
        assert len(open_mixture(read_mixture(folder / path))) == 1


def test_an_override_moves_a_source(folder: Path) -> None:
    write_mixture(folder / "mix.json", mixture_of_corpora([str(folder / "corpora/web")], None, 1))
    os.rename(folder / "corpora/web", folder / "elsewhere")
    moved = read_mixture(folder / "mix.json", overrides={"web": folder / "elsewhere"})
    assert open_mixture(moved)[0].num_tokens == 300
    with pytest.raises(MixtureError, match="'web' is not the corpus"):
        open_mixture(read_mixture(folder / "mix.json", overrides={"web": folder / "corpora/code"}))
    with pytest.raises(UsageError, match="no such source"):
        read_mixture(folder / "mix.json", overrides={"wbe": folder / "elsewhere"})


def break_json(value: dict[str, Any]) -> None:
    value["stages"] = "none"


def drop_seed(value: dict[str, Any]) -> None:
    del value["data_seed"]


def no_name(value: dict[str, Any]) -> None:
    value["sources"][1]["name"] = None


def no_cap(value: dict[str, Any]) -> None:
    value["sources"][0]["max_epochs"] = "4"


def half_weights(value: dict[str, Any]) -> None:
    value["stages"][0]["weights"] = [HALF + 0.5, HALF - 0.5]


def short_weights(value: dict[str, Any]) -> None:
    value["stages"][0]["weights"] = [HALF, HALF - 1]


def next_version(value: dict[str, Any]) -> None:
    value["format_version"] = 3


def no_number(value: dict[str, Any]) -> None:
    value["data_seed"] = "x"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_json, "wrong at stages .*a list"),
        (drop_seed, "wrong at data_seed"),
        (no_number, "wrong at data_seed .*'x'"),
        (half_weights, r"wrong at stages\[0\].weights .*whole numbers"),
        (short_weights, r"stages\[0\] do not fit .*sum to 4194303"),
        (no_name, r"wrong at sources\[1\].name"),
        (no_cap, r"wrong at sources\[0\].max_epochs .*got '4'"),
        (next_version, "format_version 3"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, damage: Callable[[dict[str, Any]], None], message: str) -> None:
    value = mixture_to_json(mixture())
    damage(value)
    (tmp_path / "mix.json").write_text(json.dumps(value))
    with pytest.raises(MixtureError, match=message):
        read_mixture(tmp_path / "mix.json")


def test_what_is_no_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such mixture manifest"):
        read_mixture(tmp_path / "mix.json")
    (tmp_path / "mix.json").write_text("{")
    with pytest.raises(MixtureError, match="no JSON"):
        read_mixture(tmp_path / "mix.json")


# ---- the fingerprint


def test_the_fingerprint_of_version_1() -> None:
    """Frozen: another value would refuse every run that was ever begun."""
    assert mixture().fingerprint == FINGERPRINT


def test_names_paths_and_caps_are_not_in_the_fingerprint() -> None:
    other = mixture(sources=(source("x", fingerprint="sha256:a"), source("b", max_epochs=2.0)), parents=("sha256:p",))
    assert other.fingerprint == mixture().fingerprint


@pytest.mark.parametrize(
    "other",
    [
        mixture(data_seed=43),
        mixture(stage(0, HALF + 1, HALF - 1)),
        mixture(stage(0, HALF, HALF), stage(1, HALF, HALF)),
        mixture(names="ba"),
        mixture(sources=(source("a"), replace(source("b"), split="val"))),
    ],
    ids=["seed", "weights", "stages", "sources", "split"],
)
def test_what_decides_the_order_is_in_the_fingerprint(other: Mixture) -> None:
    assert other.fingerprint != mixture().fingerprint


# ---- going on with another one

RUN = mixture(stage(0, HALF, HALF), stage(1000, TABLE_SLOTS, 0))


def edited(*stages: Stage, **values: Any) -> Mixture:
    return mixture(*stages, **{"parents": (RUN.fingerprint,), **values})


def goes_on(later: Mixture, consumed_samples: int) -> bool:
    return later.is_continuation_of(RUN, consumed_samples=consumed_samples, window_len=10)


def test_a_run_goes_on_with_its_own_mixture() -> None:
    assert goes_on(RUN, 0) and goes_on(RUN, 10**9)


@pytest.mark.parametrize(("consumed", "accepted"), [(0, True), (99, True), (100, True), (101, False), (500, False)])
def test_only_stages_to_come_may_change(consumed: int, accepted: bool) -> None:
    later = edited(stage(0, HALF, HALF), stage(1000, 0, TABLE_SLOTS))
    assert goes_on(later, consumed) is accepted


def test_a_stage_may_be_added_where_the_run_has_not_been() -> None:
    later = edited(*RUN.stages, stage(2001, HALF, HALF))
    assert goes_on(later, 201)
    assert not goes_on(later, 202)
    assert later.changes_from(RUN) == 2001 and edited(stage(0, HALF, HALF)).changes_from(RUN) == 1000


def test_sources_may_be_added_behind() -> None:
    added = (stage(0, HALF, HALF, 0), stage(1000, TABLE_SLOTS, 0, 0), stage(2000, HALF, 0, HALF))
    assert goes_on(edited(*added, names="abc"), 150)
    assert not goes_on(edited(*added, names="bac"), 150)
    never = edited(stage(0, HALF, HALF, 0), stage(1000, TABLE_SLOTS, 0, 0), names="abc")
    assert goes_on(never, 10**9) and never.changes_from(RUN) == math.inf
    assert not goes_on(edited(stage(0, TABLE_SLOTS), names="a"), 0)


def test_strangers_are_no_continuation() -> None:
    stages = (stage(0, HALF, HALF), stage(1000, 0, TABLE_SLOTS))
    assert goes_on(edited(*stages, parents=("sha256:x", RUN.fingerprint)), 5)
    assert not goes_on(edited(*stages, parents=()), 5)
    assert not goes_on(edited(*stages, data_seed=1), 5)
    assert edited(*stages, parents=()).changes_from(RUN) is None


# ---- what is refused


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sources": ()}, "1 to 65536 sources"),
        ({"names": "aa"}, "one name"),
        ({"names": "a/"}, "cannot be used"),
        ({"sources": (source("a"), source("b", fingerprint="sha256:a"))}, "'a' and 'b' are the same corpus and split"),
        ({"data_seed": -1}, "seed"),
        ({"stages": (stage(5, HALF, HALF),)}, "starts at token 0"),
        ({"stages": (stage(0, HALF, HALF), stage(0, HALF, HALF))}, "one after the other"),
        ({"stages": (stage(0, TABLE_SLOTS + 1, -1),)}, "at least 0"),
    ],
)
def test_what_makes_no_mixture_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(MixtureError, match=message):
        mixture(**values)


def test_one_corpus_under_two_paths_is_refused(folder: Path) -> None:
    (folder / "other").symlink_to(folder / "corpora/web")
    with pytest.raises(MixtureError, match="the same corpus and split"):
        mixture_of_corpora([str(folder / "corpora/web"), str(folder / "other")], [1, 1], 42)
    both = mixture_of_corpora([f"{folder}/corpora/web@val", str(folder / "other")], [1, 1], 42)
    assert [split.num_tokens for split in open_mixture(both)] == [10, 300]


def test_corpora_must_be_as_they_were(folder: Path) -> None:
    made = mixture_of_corpora([str(folder / "corpora/web")], None, 42)
    other = replace(made, sources=(replace(made.sources[0], num_tokens=299),))
    with pytest.raises(MixtureError, match="another number of tokens"):
        open_mixture(other)
    (folder / "corpora/web/manifest.json").unlink()
    with pytest.raises(CorpusError):
        open_mixture(made)


def test_corpora_of_two_tokenizers_are_refused(folder: Path) -> None:
    make_corpus(folder / "other", [[1, 2, 3]], eos_id=5)
    with pytest.raises(MixtureError, match="'other' was made with another tokenizer than 'web'"):
        open_mixture(mixture_of_corpora([str(folder / "corpora/web"), str(folder / "other")], [1, 1], 42))


# ---- corpora and probabilities on the command line


def test_probabilities_and_corpora(folder: Path) -> None:
    paths = [folder / "corpora/web", folder / "corpora/code"]
    made = mixture_of_corpora(paths, [70, 30], 3)
    assert [s.name for s in made.sources] == ["web", "code"]
    assert made.stages == (stage(0, 2936013, 1258291),) and made.data_seed == 3
    natural = mixture_of_corpora(paths, None, 3)  # 300 tokens and 100
    assert natural.stages == (stage(0, TABLE_SLOTS * 3 // 4, TABLE_SLOTS // 4),)


@pytest.mark.parametrize("weights", [[1.0], [1, 2, 3], [1, -0.1], [math.nan, 1], [math.inf, 1], [0, 0]])
def test_wrong_probabilities_are_refused(folder: Path, weights: list[float]) -> None:
    with pytest.raises(FlameError):
        mixture_of_corpora([str(folder / "corpora/web"), str(folder / "corpora/code")], weights, 3)


def test_folders_of_one_name_get_names_of_their_own(folder: Path) -> None:
    for number, name in enumerate(("a/web", "b/web-2", "c/we b", "d/we b")):
        make_corpus(folder / name, [[number + 1] * 4])
    paths = [folder / name for name in ("b/web-2", "corpora/web", "a/web", "c/we b", "d/we b")]
    assert [s.name for s in mixture_of_corpora(paths, None, 3).sources] == ["web-2", "web", "web-3", "we_b", "we_b-2"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/b", ("a/b", "train")),
        ("a/b@val", ("a/b", "val")),
        ("a@2/b", ("a@2/b", "train")),
        ("a@2/b@x", ("a@2/b", "x")),
    ],
)
def test_a_split_follows_the_last_at(text: str, expected: tuple[str, str]) -> None:
    assert split_corpus_text(text) == expected


# ---- plans


def test_a_plan_counts_tokens_documents_and_epochs() -> None:
    made = mixture(stage(0, HALF, HALF), sources=(source("a", 1000), source("b", 4000)))
    (plan,) = plan_stages(made, [10, 10], 6000)
    assert [(row.tokens_drawn, row.epochs, row.proportion) for row in plan] == [(3000, 3.0, 0.5), (3000, 0.75, 0.5)]
    # documents of 100 tokens and of 400: four of the first are drawn for each of the second
    assert [row.share_of_documents for row in plan] == pytest.approx([0.8, 0.2])
    assert [row.share_of_documents for row in plan_stages(made, [10, None], None)[0]] == [None, None]
    assert [row.tokens_drawn for row in plan_stages(made, [10, 10], None)[0]] == [None, None]


def test_what_a_plan_draws_sums_to_the_run() -> None:
    made = mixture(stage(0, HALF, HALF), stage(333, HALF + 1, HALF - 1))
    plans = plan_stages(made, [None, None], 666)
    assert [[row.tokens_drawn for row in plan] for plan in plans] == [[167, 166], [167, 166]]


def test_a_plan_adds_its_stages_up() -> None:
    made = mixture(stage(0, TABLE_SLOTS, 0), stage(500, 0, TABLE_SLOTS))
    first, second = plan_stages(made, [1, 1], 1500)
    assert [row.tokens_drawn for row in first] == [500, 0]
    assert [row.tokens_drawn for row in second] == [0, 1000]
    assert [row.epochs for row in second] == [0.5, 1.0]
    assert [row.tokens_drawn for row in plan_stages(made, [1, 1], 200)[1]] == [0, 0]


def test_a_plan_beyond_a_cap_is_refused() -> None:
    made = mixture(
        stage(0, HALF, HALF), stage(2000, TABLE_SLOTS, 0), sources=(source("a", max_epochs=1.5), source("b"))
    )
    assert longest_run(made, "a") == 2500
    check_epochs(made, 2500)
    with pytest.raises(MixtureError, match=r"'a': 1.501 epochs of at most 1.5; for 2,501 tokens.*at most 2,500 tokens"):
        check_epochs(made, 2501)
    barely = mixture(stage(0, HALF, HALF), sources=(source("a", 10**7, max_epochs=2.0), source("b")))
    with pytest.raises(MixtureError, match=r"'a': 2.0000001 epochs of at most 2; for 40,000,002 tokens"):
        check_epochs(barely, 4 * 10**7 + 2)
    never = mixture(stage(0, 0, TABLE_SLOTS), sources=(source("a", max_epochs=1.0), source("b")))
    assert longest_run(never, "a") == math.inf
