"""`flame-mix create`: corpora and weights to a mixture manifest, and what a run of it would draw."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flame.config import by_name, option, parse_count
from flame.errors import MixtureError, UsageError
from flame.sampling.interleave import integer_weights
from flame.sampling.mixture import DEFAULT_DATA_SEED, PACKINGS, WINDOWS, Mixture, Source, Stage
from flame.sampling.mixture_file import mixture_to_json, write_mixture
from flame.sampling.plan import check_epochs
from flame.sampling.recipe import read_recipe
from flame.sampling.show import mixture_table
from flame.sampling.sources import open_mixture, source_of, split_corpus_text
from flame.sampling.weights import floored, tempered, unimax


@dataclass(frozen=True, kw_only=True)
class SourceText:
    """One `--source` as typed: NAME=PATH[@SPLIT][:WEIGHT]."""

    name: str
    corpus: Path
    split: str
    weight: float | None


def parse_source(text: str) -> SourceText:
    """Return the source that NAME=PATH[@SPLIT][:WEIGHT] stands for; what follows the last colon is the weight."""
    name, equals, rest = text.partition("=")
    if not equals or not name or not rest:
        raise UsageError("it names no source", expected="NAME=PATH[@SPLIT][:WEIGHT], such as web=corpora/web:0.7")
    path, colon, weight = rest.rpartition(":")
    if not colon or "/" in weight:
        path, weight = rest, ""
    folder, split = split_corpus_text(path)
    if not folder:
        raise UsageError("it names no corpus", expected="NAME=PATH[@SPLIT][:WEIGHT], such as web=corpora/web:0.7")
    try:
        value = float(weight) if colon and weight else None
    except ValueError:
        raise UsageError(
            f"its weight {weight!r} is no number", expected="NAME=PATH[@SPLIT][:WEIGHT], such as web=corpora/web:0.7"
        ) from None
    return SourceText(name=name, corpus=Path(folder), split=split, weight=value)


def parse_cap(text: str) -> tuple[str | None, float]:
    """Return (source, epochs) of `NAME=N`, or (None, epochs) of one number for all."""
    name, equals, number = text.rpartition("=")
    try:
        epochs = float(number)
    except ValueError:
        raise UsageError("it is no number of epochs", expected="NAME=N or N, such as code=4") from None
    if not math.isfinite(epochs) or epochs <= 0:
        raise UsageError("it is no number of epochs", expected="a finite number above 0")
    return (name if equals else None), epochs


@dataclass(frozen=True, kw_only=True)
class CreateOptions:
    """The options of `flame-mix create`."""

    recipe: Path | None = option(
        None, help="a TOML file of sources and stages, instead of --source and its weights (docs/mixtures.md)"
    )
    source: tuple[SourceText, ...] = option(
        (),
        help="a source of the mixture, once for each: its name, its corpus folder, the split (train where left out), "
        "and its weight, a share of tokens; weights need not sum to 1",
        metavar="NAME=PATH[@SPLIT][:WEIGHT]",
        parse=parse_source,
        repeat=True,
    )
    natural: bool = option(False, help="weigh sources by their tokens, as if they were one corpus")
    temperature: float | None = option(
        None, help="weigh sources by tokens to the power of 1/temperature: 1 is natural, more evens them out"
    )
    unimax: float | None = option(
        None,
        help="spread --tokens evenly over the sources, but repeat none more often than this",
        unit="epochs",
    )
    min_proportion: float = option(
        0.0, help="where sources are weighed by size: none gets less than this share of tokens"
    )
    packing: str = option(
        WINDOWS,
        choices=PACKINGS,
        help="how all sources are sampled: best_fit takes the packs that flame-preprocess pack made, for --context_len",
    )
    context_len: int | None = option(
        None, help="with --packing best_fit: tokens of a pack, the run's training.window_len", unit="tokens"
    )
    max_epochs: tuple[tuple[str | None, float], ...] = option(
        (),
        help="how often a source may be seen at most: NAME=N, or N for all",
        metavar="[NAME=]N",
        parse=parse_cap,
        repeat=True,
    )
    tokens: int | None = option(
        None, help="how many tokens the run will train on, to plan for", unit="tokens", parse=parse_count
    )
    seed: int | None = option(
        None,
        help=f"data seed: with the weights, it alone decides the order of samples; {DEFAULT_DATA_SEED} where neither "
        "this nor the recipe says one",
    )
    output: Path = option(help="the mixture manifest to write, a .json file")
    overwrite: bool = option(False, help="replace a mixture manifest that is there and differs")

    def __post_init__(self) -> None:
        chosen = [name for name in ("natural", "temperature", "unimax") if getattr(self, name) not in (None, False)]
        if self.tokens == 0:
            raise UsageError("--tokens 0 is no run", expected="1 or more")
        if (self.packing == WINDOWS) != (self.context_len is None):
            raise UsageError(
                "--packing best_fit and --context_len go together",
                got=f"--packing {self.packing}"
                + ("" if self.context_len is None else f" --context_len {self.context_len}"),
            )
        if self.recipe is not None:
            self._check_recipe(
                [*(["source"] if self.source else []), *(["packing"] if self.context_len else []), *chosen]
            )
            return
        if not self.source:
            raise UsageError("create needs --source or --recipe", expected="NAME=PATH[@SPLIT]:WEIGHT for each source")
        if len(chosen) > 1:
            raise UsageError(f"--{chosen[0]} and --{chosen[1]} exclude each other", fix="--temperature 1 is natural")
        for name, kind in (("temperature", "temperature"), ("unimax", "number of epochs")):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"--{name} is no {kind}", got=value, expected="a number above 0")
        if self.unimax is not None and self.tokens is None:
            raise UsageError("--unimax spreads the run's tokens over the sources", fix="Say how many: --tokens 100B")
        by_tokens = bool(chosen)
        if self.min_proportion and not by_tokens:
            raise UsageError("--min_proportion goes with --natural, --temperature or --unimax", fix="Raise the weight")
        if not 0 <= self.min_proportion * len(self.source) <= 1:
            raise UsageError(
                "--min_proportion leaves no room",
                got=f"{self.min_proportion} for each of {len(self.source)} sources",
                expected=f"from 0 to {1 / len(self.source):g}",
            )
        for source in self.source:
            _check_weight(source, by_tokens=by_tokens)
        names = [source.name for source in self.source]
        _check_names(names)
        check_caps(self.max_epochs, names)

    def _check_recipe(self, others: Sequence[str]) -> None:
        if self.max_epochs or self.min_proportion:
            others = [*others, "max_epochs" if self.max_epochs else "min_proportion"]
        if others:
            raise UsageError(f"--recipe says itself what --{others[0]} says", fix="Write it into the recipe")


def create(options: CreateOptions) -> int:
    """Write the manifest and print its plan; one that is there already is left alone where it says the same."""
    if options.recipe is not None:
        recipe = read_recipe(options.recipe, tokens=options.tokens, data_seed=options.seed)
        mixture, tokens = recipe.mixture, recipe.tokens
    else:
        mixture, tokens = mixture_of(options), options.tokens
    splits = open_mixture(mixture)
    print("\n".join(mixture_table(mixture, [split.num_documents for split in splits], tokens)))
    if tokens is not None:
        check_epochs(mixture, tokens)
    if check_output(options.output, mixture, overwrite=options.overwrite):
        print(f"flame-mix create: {options.output} is there already and says the same", file=sys.stderr)
    else:
        write_mixture(options.output, mixture)
        print(f"flame-mix create: wrote {options.output}", file=sys.stderr)
    return 0


def mixture_of(options: CreateOptions) -> Mixture:
    """Return the mixture that the options describe. Opens the corpora's manifests."""
    caps = by_name(options.max_epochs, "--max_epochs")
    sources = [
        source_of(
            text.name,
            text.corpus,
            text.split,
            max_epochs=caps.get(text.name, caps.get(None)),
            packed_len=options.context_len,
        )
        for text in options.source
    ]
    stage = Stage(start_tokens=0, weights=_slots(options, sources))
    seed = DEFAULT_DATA_SEED if options.seed is None else options.seed
    return Mixture(data_seed=seed, sources=tuple(sources), stages=(stage,))


def _slots(options: CreateOptions, sources: Sequence[Source]) -> tuple[int, ...]:
    names = [source.name for source in sources]
    given = [text.weight for text in options.source if text.weight is not None]
    if given:
        return integer_weights(names, given)
    tokens = [source.num_tokens for source in sources]
    if options.unimax is not None:
        assert options.tokens is not None, "checked when the options were made"
        proportions = unimax(tokens, options.tokens, options.unimax)
    else:
        proportions = tempered(tokens, options.temperature or 1.0)
    weights = floored(proportions, options.min_proportion)
    try:
        return integer_weights(names, weights)
    except UsageError as error:  # the corpora's sizes are at fault, not the command line
        raise MixtureError(
            error.what,
            got=error.got,
            expected=error.expected,
            fix="Give --min_proportion 0.000001, or leave the source out",
        ) from error


def _check_weight(source: SourceText, *, by_tokens: bool) -> None:
    if by_tokens and source.weight is not None:
        raise UsageError(
            "--natural, --temperature and --unimax make the weights: none can be given",
            got=f"--source {source.name} with the weight {source.weight:g}",
            fix="Leave the weights out, or what makes them",
        )
    if not by_tokens and source.weight is None:
        raise UsageError(
            "a source has no weight",
            got=f"--source {source.name}={source.corpus}",
            expected="NAME=PATH[@SPLIT]:WEIGHT",
            fix="Give every source a weight, or --natural to weigh them by their tokens",
        )


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if not re.fullmatch(r"[^=@:/,\s]+", name) or names.count(name) > 1:
            raise UsageError(
                "--source needs a name of its own", got=repr(name), expected="each once, without = @ : / , or spaces"
            )


def check_caps(caps: Sequence[tuple[str | None, float]], names: Sequence[str]) -> None:
    """Raise `UsageError` where `--max_epochs` names none of the sources."""
    for capped, _ in caps:
        if capped is not None and capped not in names:
            raise UsageError("--max_epochs names no source", got=capped, expected="one of " + ", ".join(names))


def check_output(path: Path, mixture: Mixture, *, overwrite: bool) -> bool:
    """Return whether the output says the same already; raises unless what is there may be replaced."""
    if not path.exists():
        return False
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, OSError):
        found = None
    if found == mixture_to_json(mixture, path.parent):
        return True
    is_mixture = isinstance(found, dict) and "stages" in found and "data_seed" in found
    if is_mixture and overwrite:
        return False
    raise MixtureError(
        "the output is there already, and is " + ("another mixture" if is_mixture else "no mixture manifest"),
        where=path,
        fix="Choose another --output, or add --overwrite" if is_mixture else "Choose another --output",
    )
