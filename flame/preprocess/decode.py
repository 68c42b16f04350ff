"""`flame-preprocess decode`: documents of a corpus back as text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flame.config import option, parse_count
from flame.errors import CorpusError, UsageError
from flame.shards.reader import Corpus, Split

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """The options of `flame-preprocess decode`."""

    corpus: Path = option(help="corpus folder", positional=True)
    split: str | None = option(None, help="split to read; default train, or the only one there is")
    document: tuple[int, ...] = option(
        (), help="number of a document in the split, from 0", metavar="N", parse=parse_count, repeat=True
    )
    start: int | None = option(None, help="first document of a stretch; default 0", metavar="N", parse=parse_count)
    count: int | None = option(
        None, help="documents in the stretch; default 1", unit="documents", metavar="N", parse=parse_count
    )
    json: bool = option(False, help="print an object a line: the text, its size, and where it came from")

    def __post_init__(self) -> None:
        if self.document and (self.start is not None or self.count is not None):
            raise UsageError("--document and --start, --count are two ways to say which documents: give one of them")
        for name, value in (("start", self.start), ("count", self.count)):
            if value is not None and value < 0:
                raise UsageError(f"--{name} cannot be {value}", expected="0 or more")

    @property
    def documents(self) -> Sequence[int]:
        """The numbers of the documents that are asked for, in order."""
        if self.document:
            return self.document
        start = self.start or 0
        return range(start, start + (1 if self.count is None else self.count))


def decode(options: DecodeOptions) -> int:
    """Print documents without their EOS and BOS; nothing else is left out.

    A single document is printed as it is, and a line feed; several have a line before each that says which it is.
    """
    from flame.shards.tokenizer import load_tokenizer

    corpus = Corpus.open(options.corpus)
    split = corpus.split(_split_name(options.split, corpus))
    documents = options.documents
    for document in (*documents[:1], *documents[-1:]) if isinstance(documents, range) else documents:
        split.document_bounds(document)  # an absent one is an error before anything is printed
    tokenizer = load_tokenizer(corpus.path)
    _write_utf8()
    for found in _decoded(split, documents, tokenizer):
        if options.json:
            print(json.dumps(found, ensure_ascii=False, allow_nan=False))
            continue
        if len(documents) > 1:
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


def _decoded(split: Split, documents: Sequence[int], tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    from flame.shards.tokenizer import document_text

    info = split.corpus.manifest.tokenizer
    for document in documents:
        start, stop = split.document_bounds(document)
        text = document_text(tokenizer, split.read(start, stop).tolist(), info)
        origin = split.provenance(document)
        own = {"split": split.name, "document": document, "num_tokens": stop - start, "text": text}
        yield {**own, **{name: value for name, value in origin.items() if name not in own}}


def _heading(found: dict[str, Any]) -> str:
    origin = f", {found['source_file']} row {found['row']}" if "source_file" in found else ""
    return f"--- {found['split']} document {found['document']}, {found['num_tokens']} tokens{origin}"


def _write_utf8() -> None:
    """Let stdout take any text, whatever the locale says."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(encoding="utf-8")
