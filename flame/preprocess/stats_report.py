"""The statistics of a corpus as a JSON object, and that object as text for a terminal."""

from __future__ import annotations

import dataclasses
import textwrap
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from flame.errors import TokenizerError
from flame.preprocess.corpus_stats import Stats
from flame.preprocess.distribution import Bin, Distribution
from flame.preprocess.duplicates import Copies
from flame.preprocess.histogram import histogram, table
from flame.preprocess.shard_stats import RATIO_STEPS
from flame.preprocess.tally import Tally
from flame.preprocess.terminal import cut, one_line, stdout_is_ascii, terminal_width
from flame.shards.reader import Corpus
from flame.shards.tokenizer import document_text, load_tokenizer
from flame.words import counted

PERCENTS = (0, 1, 5, 25, 50, 75, 95, 99, 100)
LIMITS = (2048, 4096, 8192, 32768)
TEXT_TOKENS = 40
COVERED = (1024, 8192, 32768)

Object = Mapping[str, Any]


def as_object(corpus: Corpus, stats: Stats, *, top: int) -> dict[str, Any]:
    """Return all that was counted; texts are null where the corpus has lost its tokenizer."""
    try:
        tokenizer: Tokenizer | None = load_tokenizer(corpus.path)
    except TokenizerError:
        tokenizer = None
    num_documents, num_tokens = stats.lengths.count, stats.lengths.sum
    ratios = stats.ratios
    return {
        "path": str(corpus.path),
        "fingerprint": corpus.fingerprint,
        "splits": list(stats.first_documents),
        "num_documents": num_documents,
        "num_tokens": num_tokens,
        "num_bytes": stats.num_bytes,
        "bytes_per_token": {
            "mean": stats.num_bytes / num_tokens,
            "percentiles": None if ratios is None else _percentiles(ratios, RATIO_STEPS),
        },
        "document_tokens": {
            **_lengths(stats.lengths),
            "longer_than": {str(limit): _longer(stats.lengths, limit) for limit in LIMITS},
        },
        "document_bytes": None if stats.byte_lengths is None else _lengths(stats.byte_lengths),
        "source_files": _tally(stats.source_files, num_documents, top),
        "hosts": _tally(stats.hosts, num_documents, top),
        "duplicates": None if stats.copies is None else _copies(corpus, stats, stats.copies, tokenizer),
        "tokens": _tokens(corpus, stats, tokenizer, top),
    }


def _percentiles(distribution: Distribution, steps: int = 1) -> dict[str, float | int | None]:
    values = {str(percent): distribution.percentile(percent) for percent in PERCENTS}
    return {name: value if value is None or steps == 1 else value / steps for name, value in values.items()}


def _lengths(lengths: Distribution) -> dict[str, Any]:
    return {
        "mean": lengths.mean,
        "percentiles": _percentiles(lengths),
        "histogram": [dataclasses.asdict(found) for found in lengths.log2_bins()],
    }


def _longer(lengths: Distribution, limit: int) -> dict[str, int]:
    num_documents, num_tokens = lengths.longer_than(limit)
    return {"num_documents": num_documents, "num_tokens": num_tokens}


def _tally(tally: Tally, num_documents: int, top: int) -> dict[str, Any] | None:
    """Return the names with most tokens; None where not every document has one told."""
    if tally.num_documents != num_documents:
        return None
    return {
        "num_names": len(tally.counts) if tally.missing_tokens == 0 else None,
        "missing_tokens_at_most": tally.missing_tokens,
        "top": [
            {"name": name, "num_documents": number, "num_tokens": tokens} for name, number, tokens in tally.top(top)
        ],
    }


def _copies(corpus: Corpus, stats: Stats, copies: Copies, tokenizer: Tokenizer | None) -> dict[str, Any]:
    names, firsts = list(stats.first_documents), list(stats.first_documents.values())
    most_copied = []
    for found in copies.most_copied:
        name = names[bisect_right(firsts, found.document) - 1]
        document = found.document - stats.first_documents[name]
        split = corpus.split(name)
        start, stop = split.document_bounds(document)
        tokens = split.read(start, min(stop, start + TEXT_TOKENS)).tolist()
        text = None if tokenizer is None else document_text(tokenizer, tokens, corpus.manifest.tokenizer)
        own = {"count": found.count, "num_tokens": found.num_tokens, "split": name, "document": document}
        most_copied.append({**own, "text": text})
    return {"num_documents": copies.num_documents, "num_tokens": copies.num_tokens, "most_copied": most_copied}


def _tokens(corpus: Corpus, stats: Stats, tokenizer: Tokenizer | None, top: int) -> dict[str, Any]:
    counts = stats.token_counts
    order = np.argsort(-counts, kind="stable")[:top]
    return {
        "vocab_size": corpus.manifest.tokenizer.vocab_size,
        "num_used": int(np.count_nonzero(counts)),
        "top": [
            {"id": token, "count": int(counts[token]), "text": None if tokenizer is None else _text(tokenizer, token)}
            for token in order.tolist()
            if counts[token]
        ],
        # how many tokens of the corpus are the most common 1, 2, 4, … ids
        "coverage": _coverage(np.sort(counts)[::-1]),
    }


def _coverage(falling: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, int]:
    sums = np.cumsum(falling)
    return {str(1 << k): int(sums[(1 << k) - 1]) for k in range(len(sums).bit_length()) if sums[(1 << k) - 1] > 0}


def _text(tokenizer: Tokenizer, token: int) -> str | None:
    """Return a token's text; as the tokenizer spells it where it is a part of a character."""
    text = str(tokenizer.decode([token], skip_special_tokens=False))
    return tokenizer.id_to_token(token) if "\ufffd" in text or not text else text


# ---- as text


def as_text(value: Object) -> Iterator[str]:
    """Yield the lines for a terminal: as wide as it is, in its characters, without colour."""
    width = terminal_width()
    for line in _lines(value, width, ascii_only=stdout_is_ascii()):
        yield from textwrap.wrap(
            line, width, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
        ) or [""]


def _lines(value: Object, width: int, *, ascii_only: bool) -> Iterator[str]:
    yield f"{value['path']}: {', '.join(value['splits'])}"
    documents, tokens = counted(value["num_documents"], "document"), counted(value["num_tokens"], "token")
    counts = f"{documents}, {tokens}, {value['num_bytes']:,} bytes of text"
    yield f"  {counts}, {value['bytes_per_token']['mean']:.3f} bytes a token"
    for name, unit in (("document_tokens", "tokens"), ("document_bytes", "bytes of text")):
        yield ""
        if value[name] is None:
            yield f"documents by {unit}: not known, no provenance was kept"
            continue
        yield f"documents by {unit}: number, share of documents, share of all {unit}"
        yield from histogram([Bin(**found) for found in value[name]["histogram"]], width=width, ascii_only=ascii_only)
        yield f"  mean {value[name]['mean']:,.1f}; {_percents(value[name]['percentiles'])}"
        for limit, longer in value[name].get("longer_than", {}).items():
            yield f"  longer than {int(limit):>6,}: {_shares(longer, value)}"
    if value["bytes_per_token"]["percentiles"] is not None:
        yield ""
        yield f"documents by bytes a token: {_percents(value['bytes_per_token']['percentiles'])}"
    for name, title in (("source_files", "source files"), ("hosts", "hosts of url")):
        yield from _tally_lines(value, name, title, width)
    yield from _copies_lines(value, width)
    yield from _token_lines(value, width)


def _percents(percentiles: Object) -> str:
    names = {"0": "least", "50": "median", "100": "most"}
    return ", ".join(f"{names.get(name, name + '%')} {value:,}" for name, value in percentiles.items())


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}"


def _shares(part: Object, whole: Object) -> str:
    return (
        f"{_share(part['num_documents'], whole['num_documents'])} of documents, "
        f"{_share(part['num_tokens'], whole['num_tokens'])} of tokens"
    )


def _tally_lines(value: Object, name: str, title: str, width: int) -> Iterator[str]:
    tally = value[name]
    if tally is None or not tally["top"]:
        return
    number = "very many" if tally["num_names"] is None else f"{tally['num_names']:,}"
    yield ""
    yield f"{title} with most tokens, of {number}: tokens, share of tokens, documents"
    if tally["missing_tokens_at_most"]:
        yield f"  each count may be too low by up to {counted(tally['missing_tokens_at_most'], 'token')}"
    yield from table(
        [
            (
                f"{row['num_tokens']:,}",
                _share(row["num_tokens"], value["num_tokens"]),
                f"{row['num_documents']:,}",
                one_line(row["name"]),
            )
            for row in tally["top"]
        ],
        width=width,
    )


def _copies_lines(value: Object, width: int) -> Iterator[str]:
    copies = value["duplicates"]
    if copies is None:
        return
    yield ""
    if not copies["num_documents"]:
        yield "duplicates: none, every document is another"
        return
    yield (
        f"duplicates: copies of others are {counted(copies['num_documents'], 'document')} with "
        f"{counted(copies['num_tokens'], 'token')}, "
        f"{_shares(copies, value)}"
    )
    for found in copies["most_copied"]:
        text = "" if found["text"] is None else f": {one_line(found['text'])}"
        tokens = counted(found["num_tokens"], "token")
        line = f"  {found['count']:,} times {found['split']} {found['document']}, {tokens}{text}"
        yield cut(line, width)


def _token_lines(value: Object, width: int) -> Iterator[str]:
    tokens = value["tokens"]
    yield ""
    yield (
        f"tokens: {tokens['num_used']:,} of {tokens['vocab_size']:,} ids occur "
        f"({_share(tokens['num_used'], tokens['vocab_size'])})"
    )
    covered = [
        f"{int(n):,}: {_share(c, value['num_tokens'])}"
        for n, c in tokens["coverage"].items()
        if int(n) in (1024, 8192, 32768)
    ]
    if covered:
        yield f"  share of the most common {', '.join(covered)}"
    rows = [
        (f"{row['count']:,}", _share(row["count"], value["num_tokens"]), str(row["id"]), repr(row["text"]))
        for row in tokens["top"]
    ]
    if rows:
        yield from table(rows, width=width)
