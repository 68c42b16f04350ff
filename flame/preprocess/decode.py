"""`flame-preprocess decode`: documents of a corpus back as text, and those whose text matches."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flame.config import option, parse_count
from flame.errors import CorpusError, UsageError
from flame.preprocess.progress import log
from flame.preprocess.terminal import one_line, write_utf8
from flame.shards.reader import Corpus, Split
from flame.words import counted

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Decoded at once, the first of the two that is reached: the tokenizer's threads have work, and `| head` ends soon.
BATCH_DOCUMENTS = 64
BATCH_TOKENS = 1 << 18


def parse_documents(text: str) -> int | slice:
    """Return the document of `12`, or the stretch of `10:20`, `10:` or `:20`, whose end is not in it."""
    first, colon, stop = text.partition(":")
    if not colon:
        return parse_count(text)
    stretch = slice(parse_count(first) if first.strip() else 0, parse_count(stop) if stop.strip() else None)
    if stretch.stop is not None and stretch.stop <= stretch.start:
        raise UsageError("it holds no document", expected="a first number, and a higher one to end before")
    return stretch


def parse_regex(text: str) -> re.Pattern[str]:
    """Return the compiled regular expression."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"it is no regular expression: {error}") from error


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """The options of `flame-preprocess decode`."""

    corpus: Path = option(help="corpus folder", positional=True)
    split: str | None = option(None, help="split to read; default train, or the only one there is")
    document: tuple[int | slice, ...] = option(
        (),
        help="number of a document in the split, from 0, or several as 10:20 (20 is not in it), 10: or :20",
        metavar="N|N:M",
        parse=parse_documents,
        repeat=True,
    )
    start: int | None = option(None, help="first document of a stretch; default 0", metavar="N", parse=parse_count)
    count: int | None = option(
        None,
        help="documents in the stretch, default 1; with --grep the number of matches after which it ends, default none",
        metavar="N",
        parse=parse_count,
    )
    # not `Pattern | None`: "none" is a text to look for
    grep: Any = option(
        None,
        help="print the places where this regular expression of Python's matches the text, a line each, in all of the "
        "split or in the documents named; (?i) at its start is for any case, (?s) for a dot that takes line feeds too",
        metavar="REGEX",
        parse=parse_regex,
    )
    context: int = option(60, help="text shown before and after a match of --grep", unit="characters")
    json: bool = option(False, help="print an object a line: the text, or the match, its size, and where it came from")

    def __post_init__(self) -> None:
        if self.document and (self.start is not None or (self.count is not None and self.grep is None)):
            raise UsageError("--document and --start, --count are two ways to say which documents: give one of them")
        for name, value in (("start", self.start), ("count", self.count), ("context", self.context)):
            if value is not None and value < 0:
                raise UsageError(f"--{name} cannot be {value}", expected="0 or more")

    def stretches(self, num_documents: int) -> list[range]:
        """Return the numbers of the documents that are asked for, in order, of a split that has so many."""
        if self.document:
            return [_stretch(asked, num_documents) for asked in self.document]
        start = self.start or 0
        if self.grep is not None:
            return [_to_the_end(start, num_documents)]
        return [range(start, start + (1 if self.count is None else self.count))]


def _stretch(asked: int | slice, num_documents: int) -> range:
    if isinstance(asked, int):
        return range(asked, asked + 1)
    return _to_the_end(asked.start, num_documents) if asked.stop is None else range(asked.start, asked.stop)


def _to_the_end(start: int, num_documents: int) -> range:
    """Return the documents from `start` on; `start` alone where it is beyond the end, to be told as absent."""
    return range(start, max(num_documents, start + 1)) if start else range(num_documents)


def decode(options: DecodeOptions) -> int:
    """Print documents without their EOS and BOS, nothing else left out; or the places that match in them.

    A single document is printed as it is, and a line feed; several have a line before each that says which it is.
    They are read and printed a batch at a time.
    """
    from flame.shards.tokenizer import load_tokenizer

    corpus = Corpus.open(options.corpus)
    split = corpus.split(_split_name(options.split, corpus))
    stretches = options.stretches(split.num_documents)
    for stretch in stretches:
        for document in (*stretch[:1], *stretch[-1:]):
            split.document_bounds(document)  # an absent one is an error before anything is printed
    tokenizer = load_tokenizer(corpus.path)
    write_utf8()
    documents = _decoded(split, stretches, tokenizer)
    if options.grep is not None:
        _print_matches(split, documents, options, num_documents=sum(map(len, stretches)))
        return 0
    several = sum(map(len, stretches)) > 1
    for found in documents:
        found = _with_origin(split, found)
        if options.json:
            print(json.dumps(found, ensure_ascii=False, allow_nan=False))
            continue
        if several:
            print(_heading(found))
        print(found["text"])
    return 0


def _split_name(asked: str | None, corpus: Corpus) -> str:
    names = list(corpus.manifest.splits)
    if asked is not None:
        return asked
    if "train" in names or not names:
        return "train"
    if len(names) == 1:
        return names[0]
    raise CorpusError("the corpus has several splits", where=corpus.path, got=", ".join(names), fix="Name one: --split")


def _decoded(split: Split, stretches: Sequence[range], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    from flame.shards.tokenizer import document_texts

    for documents in _batches(split, stretches):
        tokens = [split.read(*split.document_bounds(document)).tolist() for document in documents]
        texts = document_texts(tokenizer, tokens, split.corpus.manifest.tokenizer)
        for document, ids, text in zip(documents, tokens, texts, strict=True):
            yield {"split": split.name, "document": document, "num_tokens": len(ids), "text": text}
        sys.stdout.flush()  # a closed pipe ends it here, though nothing matched since


def _batches(split: Split, stretches: Sequence[range]) -> Iterator[list[int]]:
    documents: list[int] = []
    num_tokens = 0
    for document in (number for stretch in stretches for number in stretch):
        start, stop = split.document_bounds(document)
        documents.append(document)
        num_tokens += stop - start
        if len(documents) == BATCH_DOCUMENTS or num_tokens >= BATCH_TOKENS:
            yield documents
            documents, num_tokens = [], 0
    if documents:
        yield documents


def _with_origin(split: Split, found: dict[str, Any]) -> dict[str, Any]:
    """Return it with the document's provenance after it; a kept column of the same name is left out."""
    origin = split.provenance(found["document"])
    return {**found, **{name: value for name, value in origin.items() if name not in found}}


def _heading(found: dict[str, Any]) -> str:
    origin = f", {found['source_file']} row {found['row']}" if "source_file" in found else ""
    return f"--- {found['split']} document {found['document']}, {counted(found['num_tokens'], 'token')}{origin}"


# ---- what matches


def _print_matches(
    split: Split, documents: Iterator[dict[str, Any]], options: DecodeOptions, *, num_documents: int
) -> None:
    any_matched = False
    for found in islice(_matches(documents, options.grep, options.context), options.count):
        any_matched = True
        found = _with_origin(split, found)
        print(json.dumps(found, ensure_ascii=False, allow_nan=False) if options.json else _match_line(found))
    if not any_matched and options.count != 0:
        log(f"nothing in {counted(num_documents, 'document')} of {split.name} matches {options.grep.pattern!r}")


def _matches(documents: Iterator[dict[str, Any]], pattern: re.Pattern[str], context: int) -> Iterator[dict[str, Any]]:
    """Yield each place that matches, and is not empty: its first character in the text, and what is around it."""
    for found in documents:
        text = found.pop("text")
        for match in pattern.finditer(text):
            start, stop = match.span()
            if start < stop:
                around = {"before": text[max(0, start - context) : start], "after": text[stop : stop + context]}
                yield {**found, "start": start, "match": match[0], **around}


def _match_line(found: dict[str, Any]) -> str:
    origin = f", {found['source_file']} row {found['row']}" if "source_file" in found else ""
    text = one_line(found["before"] + found["match"] + found["after"])
    return f"{found['split']} {found['document']}{origin}: {text}"
