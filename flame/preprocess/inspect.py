"""`flame-preprocess inspect`: what a corpus holds and how it was made, from its manifest alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flame.config import option
from flame.errors import UsageError
from flame.shards.format import FORMAT_VERSION, TOKENIZER_FOLDER
from flame.shards.manifest import Manifest, ShardInfo, SplitInfo, read_manifest

COLUMNS = ("shards", "documents", "tokens", "text bytes", "tokens/document", "bytes/token", "largest id")


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """The options of `flame-preprocess inspect`."""

    corpus: Path = option(help="corpus folder", positional=True)
    shards: bool = option(False, help="list every shard too")
    json: bool = option(False, help="print one JSON object: the manifest, and what follows from it")


def inspect(options: InspectOptions) -> int:
    """Print what the manifest says, for people or as JSON. Cost: one file is read."""
    if not options.corpus.exists():
        raise UsageError("there is no such corpus folder", got=options.corpus, fix="Check the path")
    manifest = read_manifest(options.corpus)
    if options.json:
        print(json.dumps(_as_object(options.corpus, manifest), ensure_ascii=False))
    else:
        print("\n".join(_as_text(options.corpus, manifest, shards=options.shards)))
    return 0


def _as_object(corpus: Path, manifest: Manifest) -> dict[str, Any]:
    value = {"path": str(corpus), **manifest.to_json()}
    for name, split in manifest.splits.items():
        value["splits"][name]["num_shards"] = len(split.shards)
        value["splits"][name]["tokens_per_document"] = _ratio(split.num_tokens, split.num_documents)
        value["splits"][name]["bytes_per_token"] = _ratio(split.num_bytes, split.num_tokens)
    return value


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _as_text(corpus: Path, manifest: Manifest, *, shards: bool) -> Iterable[str]:
    info = manifest.tokenizer
    yield str(corpus)
    yield f"  fingerprint  {manifest.fingerprint}  (format {FORMAT_VERSION})"
    yield f"  tokenizer    {info.fingerprint}"
    bos = f"BOS {info.bos_id} {info.bos}" if info.bos_id is not None else "no BOS"
    eos = f"EOS {info.eos_id}{_eos_text(corpus)}"
    yield f"               {info.vocab_size:,} tokens, {eos}, {bos}, special text {info.special_text}"
    yield ""
    rows: list[tuple[str, ...]] = [("split", *COLUMNS)]
    rows += [(name, *_row(len(split.shards), split)) for name, split in manifest.splits.items()]
    yield from _table(rows)
    if shards:
        yield ""
        rows = [("shard", *COLUMNS[1:])]
        for name, split in manifest.splits.items():
            rows += [(f"{name}/{shard.name}", *_row(None, shard)) for shard in split.shards]
        yield from _table(rows)
    yield ""
    for title in ("rejects", "engine", "inputs", "built"):
        yield f"  {title:<12} {', '.join(_said(getattr(manifest, title))) or 'none'}"
    for number, line in enumerate(_said(manifest.options)):
        yield f"  {'' if number else 'options':<12} {line}"


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
        f"{counts.max_token_id:,}",
    )


def _table(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        name, *numbers = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  " + "  ".join([name, *numbers])


def _said(values: Mapping[str, Any]) -> list[str]:
    """Return name and value of each, leaving out what is null or empty."""
    return [
        f"{name} {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in values.items()
        if value is not None and value != {} and value != []
    ]
