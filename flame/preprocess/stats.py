"""`flame-preprocess stats`: lengths of documents, sources, copies and tokens of a corpus, counted in one reading."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from flame.config import option
from flame.errors import UsageError
from flame.preprocess.terminal import print_lines, write_utf8
from flame.shards.reader import Corpus


@dataclass(frozen=True, kw_only=True)
class StatsOptions:
    """The options of `flame-preprocess stats`."""

    corpus: Path = option(help="corpus folder", positional=True)
    split: str | None = option(None, help="split to count; default all of them together")
    top: int = option(20, help="how many of the sources and tokens that occur most are listed", metavar="N")
    duplicates: bool = option(
        True, help="find documents that are the same token for token; needs 32 bytes a document in the temporary folder"
    )
    num_workers: int | None = option(None, help="processes that count shards; default one a CPU", aliases=("workers",))
    json: bool = option(False, help="print one JSON object")
    plot: Path | None = option(None, help="draw the histograms into this .png, .svg or .pdf too", metavar="FILE.png")

    def __post_init__(self) -> None:
        if self.top < 0:
            raise UsageError(f"--top cannot be {self.top}", expected="0 or more")
        if self.num_workers is not None and self.num_workers < 1:
            raise UsageError(f"--num_workers cannot be {self.num_workers}", expected="1 or more")
        if self.plot is not None:
            if self.plot.suffix not in (".png", ".svg", ".pdf"):
                raise UsageError("--plot draws .png, .svg or .pdf", got=self.plot)
            if not self.plot.absolute().parent.is_dir():
                raise UsageError("the folder of --plot does not exist", got=self.plot)
            if importlib.util.find_spec("matplotlib") is None:
                raise UsageError(
                    "--plot needs matplotlib, which is not installed", fix='pip install "flame[plot]", or leave it away'
                )


def stats(options: StatsOptions) -> int:
    """Print the statistics of a corpus, for people or as JSON. Raises `CorpusError` for damage that it meets."""
    from flame.preprocess.corpus_stats import count_corpus  # Arrow and all that: -h needs none of it
    from flame.preprocess.stats_report import as_object, as_text

    corpus = Corpus.open(options.corpus)
    names = list(corpus.manifest.splits) if options.split is None else [corpus.split(options.split).name]
    found = count_corpus(corpus, names, duplicates=options.duplicates, num_workers=options.num_workers)
    value = as_object(corpus, found, top=options.top)
    if options.plot is not None:
        from flame.preprocess.stats_plot import plot

        plot(options.plot, value, title=f"{options.corpus}: {', '.join(names)}")
    if options.json:
        write_utf8()
        print(json.dumps(value, ensure_ascii=False))
    else:
        print_lines(as_text(value))
    return 0
