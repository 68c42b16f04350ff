"""`flame-mix show`: a mixture as a table, with what a run of some length draws of each source."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flame.config import option, parse_count
from flame.errors import FlameError, UsageError
from flame.sampling.mixture import Mixture, Source, read_mixture
from flame.sampling.plan import SourcePlan, plan_stages
from flame.shards.reader import Corpus

COLUMNS = ("source", "tokens available", "proportion", "of documents", "tokens drawn", "epochs", "max epochs")


def parse_override(text: str) -> tuple[str, Path]:
    """Return (source, corpus folder) of NAME=PATH."""
    name, equals, path = text.partition("=")
    if not equals or not name or not path:
        raise UsageError("it names no source's new place", expected="NAME=PATH, such as web=/data/web")
    return name, Path(path)


@dataclass(frozen=True, kw_only=True)
class MixtureOptions:
    """What every command that reads a mixture takes."""

    mixture: Path = option(help="mixture manifest", positional=True)
    source: tuple[tuple[str, Path], ...] = option(
        (),
        help="where a source's corpus lies now, if not where the manifest says",
        metavar="NAME=PATH",
        parse=parse_override,
        repeat=True,
    )

    def read(self) -> Mixture:
        """Read the manifest, with sources where they lie now."""
        return read_mixture(self.mixture, overrides=dict(self.source))


@dataclass(frozen=True, kw_only=True)
class ShowOptions(MixtureOptions):
    """The options of `flame-mix show`."""

    tokens: int | None = option(None, help="length of a run to plan for", unit="tokens", parse=parse_count)
    json: bool = option(False, help="print one JSON object: the manifest, and the plan of each stage")


def show(options: ShowOptions) -> int:
    """Print the mixture. Corpora that are away are told as unknown: their manifests are all that is opened."""
    mixture = options.read()
    documents = [_num_documents(source) for source in mixture.sources]
    if options.json:
        plans = [[asdict(row) for row in plan] for plan in plan_stages(mixture, documents, options.tokens)]
        value = {"fingerprint": mixture.fingerprint, **mixture.to_json(), "tokens": options.tokens, "plan": plans}
        print(json.dumps(value, ensure_ascii=False))
    else:
        print("\n".join(mixture_table(mixture, documents, options.tokens)))
    return 0


def mixture_table(mixture: Mixture, documents: Sequence[int | None], num_tokens: int | None) -> Iterator[str]:
    """Yield the lines of a mixture's table: one a stage, a row a source."""
    run = "" if num_tokens is None else f", {num_tokens:,} tokens"
    yield f"mixture {mixture.fingerprint}, data seed {mixture.data_seed}{run}"
    for stage, plan in zip(mixture.stages, plan_stages(mixture, documents, num_tokens), strict=True):
        yield ""
        if len(mixture.stages) > 1:
            yield f"from token {stage.start_tokens:,} on"
        yield from table([COLUMNS, *map(_cells, plan)])


def _cells(row: SourcePlan) -> tuple[str, ...]:
    return (
        row.name,
        f"{row.num_tokens:,}",
        f"{row.proportion:.6f}",
        "-" if row.share_of_documents is None else f"{row.share_of_documents:.6f}",
        "-" if row.tokens_drawn is None else f"{row.tokens_drawn:,}",
        "-" if row.epochs is None else f"{row.epochs:.3f}",
        "-" if row.max_epochs is None else f"{row.max_epochs:g}",
    )


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows as aligned lines: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *others = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join([first, *others]).rstrip()


def _num_documents(source: Source) -> int | None:
    try:
        corpus = Corpus.open(source.corpus)
        same = corpus.fingerprint == source.fingerprint
        splits: Mapping[str, object] = corpus.manifest.splits
        return corpus.manifest.splits[source.split].num_documents if same and source.split in splits else None
    except FlameError:
        return None
