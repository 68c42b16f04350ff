"""`flame-mix edit`: the next stage of a mixture that a run may be drawing from: other weights, or new sources."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flame.config import by_name, option, parse_count
from flame.errors import MixtureError, UsageError
from flame.sampling.create import SourceText, check_caps, check_output, parse_cap, parse_source
from flame.sampling.history import consumed_of_run, mixture_name, read_segments
from flame.sampling.interleave import TABLE_SLOTS, integer_weights
from flame.sampling.mixture import Mixture, Source, Stage
from flame.sampling.mixture_file import write_mixture
from flame.sampling.plan import check_epochs
from flame.sampling.recipe import RAMP_STEPS, ramp_stages
from flame.sampling.show import MixtureOptions, mixture_table
from flame.sampling.sources import open_mixture, source_of


def parse_weight(text: str) -> tuple[str, float]:
    """Return (source, weight) of NAME=WEIGHT."""
    name, _, weight = text.partition("=")
    try:
        return name, float(weight)
    except ValueError:
        raise UsageError("it is no weight of a source", expected="NAME=WEIGHT, such as web=0.5") from None


@dataclass(frozen=True, kw_only=True)
class EditOptions(MixtureOptions):
    """The options of `flame-mix edit`."""

    start: int = option(
        help="first token of the new stage, counted over the whole run", unit="tokens", parse=parse_count
    )
    weight: tuple[tuple[str, float], ...] = option(
        (),
        help="weight of a source of the mixture from there on, once for each; 0: not drawn any more",
        metavar="NAME=WEIGHT",
        parse=parse_weight,
        repeat=True,
    )
    add: tuple[SourceText, ...] = option(
        (),
        help="a new source, drawn from there on; by its packs, if all sources of the mixture are",
        metavar="NAME=PATH[@SPLIT]:WEIGHT",
        parse=parse_source,
        repeat=True,
    )
    ramp: int | None = option(
        None, help="go over to the new weights linearly, over this long", unit="tokens", parse=parse_count
    )
    ramp_steps: int = option(RAMP_STEPS, help="with --ramp: in as many level steps")
    max_epochs: tuple[tuple[str | None, float], ...] = option(
        (),
        help="how often a source may be seen at most in the whole run: NAME=N, or N for all; else as it was",
        metavar="[NAME=]N",
        parse=parse_cap,
        repeat=True,
    )
    replace_later: bool = option(False, help="drop the stages that begin at --start or later")
    run: Path | None = option(
        None, help="the run that draws from it: refuse a mixture that is not its own, and a start that it has passed"
    )
    tokens: int | None = option(
        None, help="how many tokens the run will train on in all, to plan for", unit="tokens", parse=parse_count
    )
    output: Path = option(help="the new mixture manifest to write, a .json file")
    overwrite: bool = option(False, help="replace a mixture manifest that is there and differs")

    def __post_init__(self) -> None:
        if self.start < 1:
            raise UsageError("--start is the run's beginning", fix="A mixture from token 0 on is made by create")
        if self.tokens is not None and self.tokens <= self.start:
            raise UsageError(
                "the run would end before the new stage begins",
                got=f"--start {self.start:,} --tokens {self.tokens:,}",
                expected="the tokens of the whole run, those that it has consumed included",
            )
        if not self.weight and not self.add:
            raise UsageError("nothing changes: the new stage has neither --weight nor --add")
        if self.ramp_steps < 1:
            raise UsageError("--ramp_steps is no number of steps", got=self.ramp_steps, expected="1 or more")
        if self.ramp is not None and self.ramp < self.ramp_steps:
            raise UsageError(
                "--ramp is no length",
                got=self.ramp,
                expected=f"a token or more for each of its {self.ramp_steps} steps",
            )
        for source in self.add:
            if source.weight is None or source.weight == 0:
                raise UsageError(f"the new source {source.name!r} has no weight", expected="NAME=PATH[@SPLIT]:WEIGHT")


def edit(options: EditOptions) -> int:
    """Write the edited manifest, which names the old one as its parent, and print its plan."""
    old = options.read()
    if options.run is not None:
        _check_run(options.run, old, options.start)
    mixture = edited(old, options)
    splits = open_mixture(mixture)
    print("\n".join(mixture_table(mixture, [split.num_documents for split in splits], options.tokens)))
    if options.tokens is not None:
        check_epochs(mixture, options.tokens)
    if check_output(options.output, mixture, overwrite=options.overwrite):
        print(f"flame-mix edit: {options.output} is there already and says the same", file=sys.stderr)
    else:
        write_mixture(options.output, mixture)
        print(
            f"flame-mix edit: wrote {options.output}; stop the run before token {options.start:,} and start it again "
            f"with --training.dataset {options.output}",
            file=sys.stderr,
        )
    return 0


def edited(old: Mixture, options: EditOptions) -> Mixture:
    """Return the mixture with its new stage. Opens the manifests of new sources."""
    later = [stage.start_tokens for stage in old.stages if stage.start_tokens >= options.start]
    if later and not options.replace_later:
        raise UsageError(
            "the mixture has stages that begin later",
            got=f"--start {options.start:,}, a stage at {later[0]:,}",
            fix="Start the new stage behind them, or add --replace_later, which drops them",
        )
    names = [source.name for source in old.sources]
    weights = by_name(options.weight, "--weight")
    for name in weights:
        if name not in names:
            raise UsageError("the mixture has no such source", got=name, expected="one of " + ", ".join(names))
    missing = [name for name in names if name not in weights]
    if missing and weights:
        raise UsageError(
            "--weight leaves sources out",
            got=", ".join(missing),
            fix="Weigh every source that the mixture has; 0 ends one",
        )
    packed_len = old.packed_len if all(source.packs is not None for source in old.sources) else None
    added = tuple(source_of(text.name, text.corpus, text.split, packed_len=packed_len) for text in options.add)
    sources = _capped((*old.sources, *added), options.max_epochs)
    kept = [_padded(stage, len(added)) for stage in old.stages if stage.start_tokens < options.start]
    before = [slots / TABLE_SLOTS for slots in kept[-1].weights]
    after = _weights_after(before, weights, names, options.add)
    start, stages = options.start, kept
    if options.ramp is not None:
        last = kept[-1].weights
        ramp = ramp_stages(sources, last, after, start=start, length=options.ramp, num_steps=options.ramp_steps)
        stages = [*kept, *ramp]
        start += options.ramp
    level = Stage(start_tokens=start, weights=integer_weights([source.name for source in sources], after))
    return replace(old, sources=sources, stages=(*stages, level), parents=(old.fingerprint, *old.parents))


def _capped(sources: Sequence[Source], max_epochs: Sequence[tuple[str | None, float]]) -> tuple[Source, ...]:
    check_caps(max_epochs, [source.name for source in sources])
    caps = by_name(max_epochs, "--max_epochs")
    return tuple(
        replace(source, max_epochs=caps.get(source.name, caps.get(None, source.max_epochs))) for source in sources
    )


def _weights_after(
    before: Sequence[float], weights: dict[str, float], names: Sequence[str], added: Sequence[SourceText]
) -> list[float]:
    """Return the new stage's weights. Where only sources are added, the old ones keep theirs to one another."""
    new = [text.weight or 0.0 for text in added]
    if weights:
        return [*(weights[name] for name in names), *new]
    if sum(new) >= 1:
        raise UsageError(
            "the new sources leave nothing for those of the mixture",
            got=f"weights that sum to {sum(new):g}",
            expected="shares of all tokens, below 1",
            fix="Or weigh every source: --weight NAME=WEIGHT",
        )
    return [*(share * (1 - sum(new)) for share in before[: len(names)]), *new]


def _padded(stage: Stage, num_added: int) -> Stage:
    return replace(stage, weights=stage.weights + (0,) * num_added)


def _check_run(run: Path, old: Mixture, start: int) -> None:
    """Raise unless the run draws from the mixture, or from one that it was made of, and comes to `start` later."""
    step, consumed = consumed_of_run(run)
    segments = read_segments(run)
    if segments and (own := segments[-1].mixture_fingerprint) not in (old.fingerprint, *old.parents):
        raise MixtureError(
            "the run draws from another mixture",
            where=run,
            got=old.fingerprint,
            expected=own,
            fix=f"Edit the run's own: {run / mixture_name(own)}",
        )
    if consumed > start:  # the stage's first sample is the first that begins at its start or later
        raise UsageError(
            "the run has passed --start already",
            where=run,
            got=f"{consumed:,} tokens by step {step}",
            expected="a start that is still to come",
        )
