"""A mixture as a TOML recipe: sources once, then stages that say what is drawn of them and from where on.

tokens = "10B"                       # how long the run will be: what "60%" is of, and what unimax spreads
data_seed = 42

[sources.web]
corpus = "../corpora/web"            # relative to the recipe
max_epochs = 4
[sources.code]
corpus = "../corpora/code"
split = "train"
packing = "best_fit"                 # by packs of context_len tokens (flame-preprocess pack); or "windows"
context_len = 4096

[[stages]]                           # the first starts at 0
weights = { web = 0.9, code = 0.1 }
[[stages]]
start = "60%"                        # or tokens: "6B"
ramp = "10%"                         # linearly from the weights before, over this long, in
ramp_steps = 8                       # as many level steps (8)
weights = "unimax"                   # or "natural", { temperature = 3, min_proportion = 0.01 }
"""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from flame.config import parse_count
from flame.errors import MixtureError, UsageError
from flame.sampling.interleave import integer_weights
from flame.sampling.mixture import DEFAULT_DATA_SEED, PACKINGS, WINDOWS, Mixture, Source, Stage
from flame.sampling.mixture_file import paths_base
from flame.sampling.sources import source_of
from flame.sampling.weights import floored, ramp, tempered, unimax

RAMP_STEPS = 8
UNIMAX_EPOCHS = 4.0
_TOP = ("tokens", "data_seed", "sources", "stages")
_SOURCE = ("corpus", "split", "max_epochs", "packing", "context_len")
_STAGE = ("start", "ramp", "ramp_steps", "weights")
_WEIGHTS = 'weights by name, "natural", "unimax", or {temperature = 3}'
_BY_SIZE = ("temperature", "min_proportion", "unimax_epochs")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe as read. `tokens` is the length of the run that it plans for, where it says one."""

    mixture: Mixture
    tokens: int | None


def read_recipe(path: Path, *, tokens: int | None = None, data_seed: int | None = None) -> Recipe:
    """Read a recipe and open its corpora's manifests; `tokens` and `data_seed` win over what it says.

    Raises `UsageError` where the file is absent and, naming the key, for what it says.
    """
    if not path.is_file():
        raise UsageError("there is no such recipe", got=path, expected="a TOML file (docs/mixtures.md)")
    try:
        value = tomllib.loads(path.read_text("utf-8"))
        _check_keys(value, _TOP, "")
        length = _tokens(value["tokens"], "tokens") if tokens is None and "tokens" in value else tokens
        if length == 0:
            _wrong("tokens", 0, "1 or more")
        seed = data_seed if data_seed is not None else value.get("data_seed", DEFAULT_DATA_SEED)
        if type(seed) is not int:
            raise UsageError("the recipe is wrong at data_seed", got=repr(seed), expected="a whole number")
        sources = _sources(value.get("sources"), paths_base(path.parent))
        stages = _stages(value.get("stages"), sources, length)
        return Recipe(mixture=Mixture(data_seed=seed, sources=sources, stages=stages), tokens=length)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the recipe is no TOML: {error}", where=path) from error
    except (MixtureError, UsageError) as error:
        if error.where is not None:
            raise
        raise UsageError(error.what, where=path, got=error.got, expected=error.expected, fix=error.fix) from error


def _sources(value: Any, folder: Path) -> tuple[Source, ...]:
    if not isinstance(value, dict) or not value:
        _wrong("sources", value, "a table of sources, such as [sources.web]")
    sources = []
    for name, table in value.items():
        table = _table(table, f"sources.{name}")
        _check_keys(table, _SOURCE, f"sources.{name}.")
        corpus, split, cap = table.get("corpus"), table.get("split", "train"), table.get("max_epochs")
        if not isinstance(corpus, str):
            _wrong(f"sources.{name}.corpus", corpus, "the path of a corpus folder")
        if not isinstance(split, str):
            _wrong(f"sources.{name}.split", split, "the name of a split, such as train")
        if cap is not None and not (_is_number(cap) and 0 < cap < math.inf):
            _wrong(f"sources.{name}.max_epochs", cap, "a number above 0")
        packed_len = _packed_len(table, f"sources.{name}")
        max_epochs = None if cap is None else float(cap)
        path = Path(os.path.normpath(folder / corpus))
        if not path.exists():
            _wrong(f"sources.{name}.corpus", corpus, f"a corpus folder: there is no {path}")
        sources.append(source_of(name, path, split, max_epochs=max_epochs, packed_len=packed_len))
    return tuple(sources)


def _packed_len(table: Mapping[str, Any], where: str) -> int | None:
    packing, context_len = table.get("packing", WINDOWS), table.get("context_len")
    if packing not in PACKINGS:
        _wrong(f"{where}.packing", packing, "one of " + ", ".join(PACKINGS))
    if packing != WINDOWS and context_len is None:
        _wrong(f"{where}.context_len", None, "the length of its packs, such as 4096")
    if packing == WINDOWS and context_len is not None:
        _wrong(f"{where}.context_len", context_len, 'packing = "best_fit" beside it')
    if context_len is not None and not (type(context_len) is int and context_len > 0):
        _wrong(f"{where}.context_len", context_len, "a whole number of tokens")
    return context_len


def _stages(value: Any, sources: Sequence[Source], tokens: int | None) -> tuple[Stage, ...]:
    if not isinstance(value, list) or not value:
        _wrong("stages", value, "at least one [[stages]]")
    tables = [_table(table, f"stages[{i}]") for i, table in enumerate(value)]
    starts = [_start(table, i, tokens) for i, table in enumerate(tables)]
    for i, (earlier, start) in enumerate(itertools.pairwise(starts), start=1):
        if start <= earlier:
            _wrong(f"stages[{i}].start", tables[i]["start"], f"more than the {earlier:,} tokens of the stage before it")
        if tokens is not None and start >= tokens:
            _wrong(f"stages[{i}].start", tables[i]["start"], f"less than the {tokens:,} tokens of the run")
    ends = [*starts[1:], tokens]
    stages: list[Stage] = []
    for i, (table, start, end) in enumerate(zip(tables, starts, ends, strict=True)):
        _check_keys(table, _STAGE, f"stages[{i}].")
        wanted = _proportions(table.get("weights"), sources, None if end is None else end - start, f"stages[{i}]")
        ramp = _ramp(table, f"stages[{i}]", tokens)
        if ramp is not None:
            length, num_steps = ramp
            if i == 0 or (end is not None and start + length > end):
                _wrong(f"stages[{i}].ramp", table["ramp"], "a stage before it, and to end within its own")
            before = stages[-1].weights
            stages += ramp_stages(sources, before, wanted, start=start, length=length, num_steps=num_steps)
            start += length
        stages.append(Stage(start_tokens=start, weights=integer_weights([s.name for s in sources], wanted)))
    return tuple(stages)


def ramp_stages(
    sources: Sequence[Source],
    before: Sequence[float],
    after: Sequence[float],
    *,
    start: int,
    length: int,
    num_steps: int,
) -> list[Stage]:
    """Return the stages of a ramp of `length` tokens from `start` on, in `num_steps` level steps.

    `before` and `after` are weights: each counts as its share of their sum.
    """
    assert 0 < num_steps <= length, "a ramp has a token a step"
    names = [source.name for source in sources]
    before, after = ([weight / math.fsum(weights) for weight in weights] for weights in (before, after))
    return [
        Stage(start_tokens=start + length * step // num_steps, weights=integer_weights(names, proportions))
        for step, proportions in enumerate(ramp(before, after, num_steps))
    ]


def _ramp(table: Mapping[str, Any], where: str, tokens: int | None) -> tuple[int, int] | None:
    """Return how many tokens and level steps a stage's ramp has, where it has one."""
    if "ramp" not in table:
        if "ramp_steps" in table:
            _wrong(f"{where}.ramp_steps", table["ramp_steps"], "a ramp beside it")
        return None
    length = _position(table["ramp"], tokens, f"{where}.ramp")
    num_steps = table.get("ramp_steps", RAMP_STEPS)
    if type(num_steps) is not int or num_steps < 1:
        _wrong(f"{where}.ramp_steps", num_steps, "a whole number of level steps, 1 or more")
    if length < num_steps:
        _wrong(f"{where}.ramp", table["ramp"], f"a token or more for each of its {num_steps} steps")
    return length, num_steps


def _start(table: Mapping[str, Any], number: int, tokens: int | None) -> int:
    start = _position(table.get("start", 0), tokens, f"stages[{number}].start")
    if number == 0 and start != 0:
        _wrong("stages[0].start", table["start"], "0: the first stage begins with the run")
    if number > 0 and "start" not in table:
        _wrong(f"stages[{number}].start", None, "where the stage begins, such as 6B or 60%")
    return start


def _position(value: Any, tokens: int | None, where: str) -> int:
    """Return a number of tokens: `6B`, or `60%` of the run."""
    if not isinstance(value, str) or not value.strip().endswith("%"):
        return _tokens(value, where)
    percent = value.strip().removesuffix("%").strip()
    if not re.fullmatch(r"\d+(\.\d+)?", percent) or float(percent) > 100:
        _wrong(where, value, 'tokens, such as "6B", or a part of the run from "0%" to "100%"')
    if tokens is None:
        _wrong(where, value, "tokens, as the recipe does not say how long the run is (tokens = …)")
    return round(tokens * float(percent) / 100)


def _tokens(value: Any, where: str) -> int:
    if type(value) is int and value >= 0:
        return value
    try:
        return parse_count(value if isinstance(value, str) else "")
    except UsageError:
        _wrong(where, value, 'a number of tokens, such as "10B" or 10_000_000_000')


def _proportions(value: Any, sources: Sequence[Source], tokens: int | None, where: str) -> list[float]:
    """Return the proportions that `weights` stands for; `tokens` is how long the stage is, where that is known."""
    if isinstance(value, str) and value in ("natural", "unimax"):
        value = {"temperature": 1.0} if value == "natural" else {"unimax_epochs": UNIMAX_EPOCHS}
    if not isinstance(value, dict):
        _wrong(f"{where}.weights", value, _WEIGHTS)
    table: dict[str, Any] = value
    names = [source.name for source in sources]
    if table and table.keys() <= set(_BY_SIZE) and not table.keys() & set(names):
        return _by_size(table, [source.num_tokens for source in sources], tokens, where)
    _check_keys(table, names, f"{where}.weights.")
    if not table or not all(_is_number(weight) for weight in table.values()):
        _wrong(f"{where}.weights", value, _WEIGHTS)
    weights = [float(table.get(name, 0)) for name in names]
    try:
        integer_weights(names, weights)  # names the one that is no weight
    except UsageError as error:
        what = f"{error.what}, at {where}.weights"
        raise UsageError(what, got=error.got, expected=error.expected, fix=error.fix) from None
    return weights


def _by_size(table: Mapping[str, Any], sizes: Sequence[int], tokens: int | None, where: str) -> list[float]:
    if not all(_is_number(number) and 0 <= number < math.inf for number in table.values()):
        _wrong(f"{where}.weights", dict(table), "numbers of at least 0")
    least = table.get("min_proportion", 0.0)
    if least * len(sizes) > 1:
        _wrong(f"{where}.weights.min_proportion", least, f"at most {1 / len(sizes):g}")
    if "unimax_epochs" in table:
        if tokens is None or "temperature" in table or table["unimax_epochs"] == 0:
            _wrong(f"{where}.weights.unimax_epochs", dict(table), "the run's tokens, a cap above 0, and no temperature")
        return floored(unimax(sizes, tokens, table["unimax_epochs"]), least)
    if table.get("temperature", 1.0) == 0:
        _wrong(f"{where}.weights.temperature", 0, "a number above 0")
    return floored(tempered(sizes, table.get("temperature", 1.0)), least)


def _check_keys(value: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise UsageError(
                f"the recipe has an unknown key {where}{name}",
                expected="one of " + ", ".join(known),
                fix=f"Did you mean {near[0]}?" if near else None,
            )


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _wrong(where, value, "a table")
    table: dict[str, Any] = value
    return table


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wrong(where: str, got: Any, expected: str) -> NoReturn:
    raise UsageError(f"the recipe is wrong at {where}", got=repr(got)[:100], expected=expected)
