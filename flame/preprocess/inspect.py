"""`flame-preprocess inspect`: what a corpus is, how it was built, and whether its files are there, on one screen."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flame.config import option
from flame.errors import FlameError, UsageError
from flame.preprocess.presence import Presence, look_at_files
from flame.preprocess.terminal import cut, one_line, print_lines, terminal_width, write_utf8
from flame.shards.format import FORMAT_VERSION, REJECTS_FOLDER, TOKENIZER_FOLDER, docs_path
from flame.shards.manifest import Manifest, ShardInfo, SplitInfo, read_manifest
from flame.words import counted

COLUMNS = ("shards", "documents", "tokens", "text bytes", "tokens/document", "bytes/token", "largest id")
SHOWN_PROBLEMS = 10
SAMPLE_TOKENS = 64
SAMPLE_CHARACTERS = 300
UNBROKEN = "\0"  # stands for a space where a line may not be broken


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """The options of `flame-preprocess inspect`."""

    corpus: Path = option(help="corpus folder", positional=True)
    shards: bool = option(False, help="list every shard too")
    samples: int = option(3, help="show how so many documents begin, spread evenly over the first split that has any")
    json: bool = option(False, help="print one JSON object: the manifest, and what follows from it")

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise UsageError(f"--samples cannot be {self.samples}", expected="0 or more")


def inspect(options: InspectOptions) -> int:
    """Print what the manifest says and whether the files are there, for people or as JSON.

    Damage that it sees is told, and is no failure of it: `verify` is the command that judges. Cost: manifest.json, a
    stat a file, and, for samples, the tokenizer and a page or two of a shard.
    """
    if not options.corpus.exists():
        raise UsageError("there is no such corpus folder", got=options.corpus, fix="Check the path")
    manifest = read_manifest(options.corpus)
    presence = look_at_files(options.corpus, manifest)
    try:
        samples, trouble = list(_samples(options.corpus, manifest, options.samples)), None
    except FlameError as error:
        samples, trouble = [], str(error)
    if options.json:
        write_utf8()
        print(json.dumps(_as_object(options.corpus, manifest, presence, samples), ensure_ascii=False))
        return 0
    sections = (
        _what(options.corpus, manifest, shards=options.shards),
        _how(options.corpus, manifest),
        _trust(options.corpus, manifest, presence),
        _sample_lines(samples, trouble),
    )
    print_lines(line for lines in sections for line in lines)
    return 0


def _as_object(
    corpus: Path, manifest: Manifest, presence: Presence, samples: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    value = {"path": str(corpus), **manifest.to_json()}
    for name, split in manifest.splits.items():
        value["splits"][name]["num_shards"] = len(split.shards)
        value["splits"][name]["tokens_per_document"] = _ratio(split.num_tokens, split.num_documents)
        value["splits"][name]["bytes_per_token"] = _ratio(split.num_bytes, split.num_tokens)
    value["files"] = {
        "num_files": presence.num_files,
        "size_bytes": presence.size_bytes,
        "problems": [{"path": path, "problem": problem} for path, problem in presence.problems],
    }
    return {**value, "samples": samples}


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


# ---- what it is


def _what(corpus: Path, manifest: Manifest, *, shards: bool) -> Iterator[str]:
    yield str(corpus)
    yield f"  fingerprint  {manifest.fingerprint}  (format {FORMAT_VERSION})"
    info = manifest.tokenizer
    yield f"  tokenizer    {info.fingerprint}"
    bos = f"BOS {info.bos_id} {info.bos}" if info.bos_id is not None else "no BOS"
    eos = f"EOS {info.eos_id}{_eos_text(corpus)}"
    yield f"               {counted(info.vocab_size, 'token')}, {eos}, {bos}, special text {info.special_text}"
    yield ""
    rows: list[tuple[str, ...]] = [("split", *COLUMNS)]
    rows += [(name, *_row(len(split.shards), split)) for name, split in manifest.splits.items()]
    if len(manifest.splits) > 1:
        every = tuple(shard for split in manifest.splits.values() for shard in split.shards)
        rows += [("total", *_row(len(every), SplitInfo.of(every)))]
    yield from _table(rows)
    if shards:
        yield ""
        rows = [("shard", *COLUMNS[1:])]
        for name, split in manifest.splits.items():
            rows += [(f"{name}/{shard.name}", *_row(None, shard)) for shard in split.shards]
        yield from _table(rows)
    yield ""


def _eos_text(corpus: Path) -> str:
    """Return the EOS as its tokenizer's settings spell it, where they do."""
    try:
        token = json.loads((corpus / TOKENIZER_FOLDER / "tokenizer_config.json").read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return ""
    text = token.get("content") if isinstance(token, dict) else token
    return f" {text!r}" if isinstance(text, str) else ""


def _row(num_shards: int | None, counts: SplitInfo | ShardInfo) -> tuple[str, ...]:
    per_document = _ratio(counts.num_tokens, counts.num_documents)
    per_token = _ratio(counts.num_bytes, counts.num_tokens)
    return (
        *([] if num_shards is None else [f"{num_shards:,}"]),
        f"{counts.num_documents:,}",
        f"{counts.num_tokens:,}",
        f"{counts.num_bytes:,}",
        "-" if per_document is None else f"{per_document:,.1f}",
        "-" if per_token is None else f"{per_token:.3f}",
        f"{counts.max_token_id:,}" if counts.num_tokens else "-",
    )


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        name, *numbers = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  " + "  ".join([name, *numbers])


# ---- how it was built


def _how(corpus: Path, manifest: Manifest) -> Iterator[str]:
    inputs = dict(manifest.inputs)
    counts = [
        f"{inputs.pop(name):,} {word}"
        for name, word in (("num_files", "files"), ("num_bytes", "bytes"))
        if isinstance(inputs.get(name), int)
    ]
    dataset = {name: manifest.options.get(name) for name in ("dataset", "input")}
    repaired = inputs.pop("repaired", None) or {}
    yield from _fact("inputs", [*counts, *_said(dataset), *_said(inputs)])
    if repaired:
        yield from _fact("repaired", [f"{reason} {number:,}" for reason, number in repaired.items()])
    engine = dict(manifest.engine)
    redone = engine.pop("redone_tasks", None)
    yield from _fact(
        "engine",
        [
            " ".join(str(value) for value in engine.values() if value is not None),
            *([] if redone is None else [_redone(redone)]),
        ],
    )
    yield from _fact("rejects", _rejects(corpus, manifest))
    told = (*dataset, "tokenizer")  # above
    yield from _fact("options", _said({name: value for name, value in manifest.options.items() if name not in told}))
    yield from _fact("built", _said(manifest.built))
    yield ""


def _redone(number: int) -> str:
    return f"{counted(number, 'task')} done again with the reference" if number else "no task done again"


def _rejects(corpus: Path, manifest: Manifest) -> Iterator[str]:
    """Yield the number of texts that were left out, of how many; then by reason; then where samples lie."""
    refused = sum(manifest.rejects.values())
    if refused:
        read = refused + sum(split.num_documents for split in manifest.splits.values())
        reasons = sorted(manifest.rejects.items(), key=lambda reason: -reason[1])
        yield f"{refused:,} of {read:,} read ({refused / read:.2%})"
        yield from (f"{reason} {number:,}" for reason, number in reasons)
        if (corpus / REJECTS_FOLDER).is_dir():
            yield f"samples in {corpus / REJECTS_FOLDER}"


def _fact(title: str, facts: Iterator[str] | Sequence[str]) -> Iterator[str]:
    """Yield a titled line, wrapped to the terminal; a fact is not broken unless it is longer than a line."""
    whole = [fact.replace(" ", UNBROKEN) if len(fact) < terminal_width() - 16 else fact for fact in facts if fact]
    for line in textwrap.wrap(
        ", ".join(whole) or "none",
        terminal_width(),
        initial_indent=f"  {title:<12} ",
        subsequent_indent=" " * 15,
        break_on_hyphens=False,
        break_long_words=False,
    ):
        yield line.replace(UNBROKEN, " ")


def _said(values: Mapping[str, Any]) -> list[str]:
    """Return name and value of each, leaving out what is null or empty."""
    return [
        f"{name} {_in_words(value)}"
        for name, value in values.items()
        if value is not None and value != {} and value != []
    ]


def _in_words(value: Any) -> str:
    """Return a value of an option as one would say it: a list with commas, of a mapping the types in parentheses."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ", ".join(map(_in_words, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} ({_in_words(kind)})" for name, kind in value.items())
    return json.dumps(value, ensure_ascii=False)


# ---- can it be trusted


def _trust(corpus: Path, manifest: Manifest, presence: Presence) -> Iterator[str]:
    yield from _fact("sealed", ["yes", "the manifest agrees with its own fingerprint and sums"])
    number, wrong = presence.num_files, len(presence.problems)
    state = f"{wrong:,} of {number:,} are wrong" if wrong else f"all {number:,} are there, as long as they were sealed"
    yield f"  files        {state} ({presence.size_bytes:,} bytes; looked at now)"
    for path, problem in presence.problems[:SHOWN_PROBLEMS]:
        yield f"               {path}: {problem}"
    if wrong > SHOWN_PROBLEMS:
        yield f"               and {wrong - SHOWN_PROBLEMS:,} more"
    yield f"  provenance   {_provenance(corpus, manifest)}"
    yield f"  checksums    not compared here: flame-preprocess verify {corpus}"


def _provenance(corpus: Path, manifest: Manifest) -> str:
    if manifest.options.get("provenance") is True:
        kept = manifest.options.get("keep_columns")
        names = ", ".join(["source_file", "row", "num_bytes", *(kept if isinstance(kept, dict) else ())])
        return f"of each document: {names}"
    shards = [(name, shard) for name, split in manifest.splits.items() for shard in split.shards]
    with_docs = sum(docs_path(corpus, name, shard.name).exists() for name, shard in shards)
    return "none was kept" if not with_docs else f"beside {with_docs:,} of {len(shards):,} shards"


# ---- samples


def _samples(corpus: Path, manifest: Manifest, number: int) -> Iterator[dict[str, Any]]:
    """Yield how some documents begin: the first of each of `number` equal stretches of a split."""
    name = next((name for name, split in manifest.splits.items() if split.num_documents), None)
    if name is None or number == 0:
        return
    from flame.shards.reader import Corpus
    from flame.shards.tokenizer import document_text, load_tokenizer

    split = Corpus(corpus, manifest).split(name)
    tokenizer = load_tokenizer(corpus)
    number = min(number, split.num_documents)
    for document in (split.num_documents * place // number for place in range(number)):
        start, stop = split.document_bounds(document)
        tokens = split.read(start, min(stop, start + SAMPLE_TOKENS)).tolist()
        text = document_text(tokenizer, tokens, manifest.tokenizer)
        yield {"split": name, "document": document, "num_tokens": stop - start, "text": text[:SAMPLE_CHARACTERS]}


def _sample_lines(samples: Sequence[Mapping[str, Any]], trouble: str | None) -> Iterator[str]:
    """Yield a line a sample, cut to the terminal's width; or why there are none."""
    if trouble is not None:
        yield from _fact("samples", [f"cannot be read: {trouble}"])
    for place, sample in enumerate(samples):
        line = f"  {'' if place else 'samples':<12} {sample['split']} {sample['document']}: {one_line(sample['text'])}"
        yield cut(line, terminal_width())
