"""`flame-mix show`: a mixture as a table, with what a run of some length draws of each source."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flame.config import by_name, option, parse_count
from flame.errors import FlameError, UsageError
from flame.sampling.mixture import Mixture, Source
from flame.sampling.mixture_file import mixture_to_json, read_mixture
from flame.sampling.plan import SourcePlan, plan_stages
from flame.sampling.stages import stage_tables
from flame.shards.reader import Corpus

COLUMNS = ("source", "tokens available", "proportion", "of documents", "tokens drawn", "epochs", "max epochs")
SUMMARY = ("source", "tokens available", "tokens drawn", "epochs", "max epochs")  # of several stages


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
        return read_mixture(self.mixture, overrides=by_name(self.source, "--source"))


@dataclass(frozen=True, kw_only=True)
class ShowOptions(MixtureOptions):
    """The options of `flame-mix show`."""

    tokens: int | None = option(None, help="length of a run to plan for", unit="tokens", parse=parse_count)
    plot: Path | None = option(
        None,
        help="with --tokens, draw what each source is drawn of over the run into this .png, .svg or .pdf too",
        metavar="FILE.png",
    )
    json: bool = option(False, help="print one JSON object: the manifest, and the plan of each stage")

    def __post_init__(self) -> None:
        if self.tokens == 0:
            raise UsageError("--tokens 0 is no run", expected="1 or more")
        if self.plot is None:
            return
        if self.plot.suffix not in (".png", ".svg", ".pdf"):
            raise UsageError("--plot draws .png, .svg or .pdf", got=self.plot)
        if not self.plot.absolute().parent.is_dir():
            raise UsageError("the folder of --plot does not exist", got=self.plot)
        if self.tokens is None:
            raise UsageError(
                "--plot draws a run from its beginning to its end", fix="Say how long it is: --tokens 100B"
            )
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError(
                "--plot needs matplotlib, which is not installed", fix='pip install "flame[plot]", or leave it away'
            )


def show(options: ShowOptions) -> int:
    """Print the mixture. Corpora that are away are told as unknown: their manifests are all that is opened."""
    mixture = options.read()
    documents = [_num_documents(source) for source in mixture.sources]
    if options.plot is not None:
        from flame.sampling.mixture_plot import plot

        assert options.tokens is not None, "checked when the options were made"
        plot(options.plot, mixture, options.tokens, title=str(options.mixture))
    if options.json:
        plans = [[asdict(row) for row in plan] for plan in plan_stages(mixture, documents, options.tokens)]
        value = {
            "fingerprint": mixture.fingerprint,
            **mixture_to_json(mixture),
            "tokens": options.tokens,
            "plan": plans,
        }
        print(json.dumps(value, ensure_ascii=False))
    else:
        print("\n".join(mixture_table(mixture, documents, options.tokens)))
    return 0


def mixture_table(mixture: Mixture, documents: Sequence[int | None], num_tokens: int | None) -> Iterator[str]:
    """Yield the lines of a mixture's table: a row a source, and where it has several stages, a column a stage."""
    run = "" if num_tokens is None else f", {num_tokens:,} tokens"
    yield f"mixture {mixture.fingerprint}, data seed {mixture.data_seed}{run}"
    if mixture.parents:
        yield f"edited from {mixture.parents[0]}"
    if mixture.packed_len is not None:
        packed = ", ".join(source.name for source in mixture.sources if source.packs is not None)
        yield f"sampled by packs of {mixture.packed_len} tokens: {packed}"
    yield ""
    plans = plan_stages(mixture, documents, num_tokens)
    if len(plans) == 1:
        yield from table([COLUMNS, *map(_cells, plans[0])])
        return
    yield from table([SUMMARY, *(_summary([plan[i] for plan in plans]) for i in range(len(mixture.sources)))])
    for columns in stage_tables(mixture, plans, max(80, shutil.get_terminal_size().columns)):
        yield ""
        yield from table(columns)


def _summary(rows: Sequence[SourcePlan]) -> tuple[str, ...]:
    """Return the cells of a source over all stages: its plans, one a stage."""
    drawn = [row.tokens_drawn for row in rows]
    name, available, *_, epochs, cap = _cells(rows[-1])
    return name, available, "-" if None in drawn else f"{sum(tokens or 0 for tokens in drawn):,}", epochs, cap


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
