"""`flame-mix check`: whether every corpus of a mixture is there, the same as it was, and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from flame.config import option
from flame.errors import FlameError, MixtureError
from flame.sampling.mixture import Mixture, Source
from flame.sampling.show import MixtureOptions
from flame.shards.checksum import payload_checksum
from flame.shards.manifest import Manifest, read_manifest
from flame.shards.maps import ShardFiles, map_shard
from flame.shards.packs import ARRAYS, array_path, map_packs, packs_folder, read_packs
from flame.words import counted

DAMAGE = 3  # exit code


@dataclass(frozen=True, kw_only=True)
class CheckOptions(MixtureOptions):
    """The options of `flame-mix check`."""

    full: bool = option(False, help="read every shard, and compare its checksums too")
    json: bool = option(False, help="print one JSON object a finding")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something wrong; `source` is None where it is the manifest."""

    source: str | None
    problem: str


def check(options: CheckOptions) -> int:
    """Print a line for each thing that is wrong; 3 where there is one.

    Cost: a manifest a source, and two opens and two pages a shard, or with `full` all of its bytes. What is inside
    (boundaries, ids, the tokenizer) is `flame-preprocess verify`'s.
    """
    try:
        mixture = options.read()
    except MixtureError as error:
        findings = [Finding(source=None, problem=str(error))]
        num_sources = 0
    else:
        findings = list(find_damage(mixture, full=options.full))
        num_sources = len(mixture.sources)
    for finding in findings:
        line = f"{finding.source or options.mixture}: {finding.problem}"
        print(json.dumps(asdict(finding), ensure_ascii=False) if options.json else line)
    if not findings and not options.json:
        whole = "with its checksums" if options.full else "of the size it must have"
        print(f"{options.mixture}: {counted(num_sources, 'source')} there and unchanged, every shard {whole}")
    return DAMAGE if findings else 0


def find_damage(mixture: Mixture, *, full: bool = False) -> Iterator[Finding]:
    """Yield what is wrong with the mixture's corpora, in the order of its sources; `full` reads every byte."""
    first: tuple[str, str] | None = None  # source and its tokenizer
    for source in mixture.sources:
        try:
            manifest = read_manifest(source.corpus)
        except FlameError as error:
            yield Finding(source=source.name, problem=str(error))
            continue
        first = first or (source.name, manifest.tokenizer.fingerprint)
        if manifest.tokenizer.fingerprint != first[1]:
            yield Finding(source=source.name, problem=f"another tokenizer than that of source {first[0]!r}")
        for problem in _source_damage(source, manifest, full=full):
            yield Finding(source=source.name, problem=problem)


def _source_damage(source: Source, manifest: Manifest, *, full: bool) -> Iterator[str]:
    if manifest.fingerprint != source.fingerprint:
        yield (
            f"another corpus than the mixture was made of "
            f"(in {source.corpus}; got {manifest.fingerprint}; expected {source.fingerprint})"
        )
        return
    if source.split not in manifest.splits:
        yield f"no split {source.split!r} (in {source.corpus}; expected one of {', '.join(manifest.splits)})"
        return
    split = manifest.splits[source.split]
    if source.packs is None and split.num_tokens != source.num_tokens:
        yield f"{split.num_tokens} tokens, not the {source.num_tokens} that the mixture names (in {source.corpus})"
    yield from _packs_damage(source, full=full)
    for shard in split.shards:
        files = ShardFiles(source.corpus, source.split, shard)
        try:
            map_shard(files)
            if full:
                yield from _changed_bytes(files)
        except FlameError as error:
            yield str(error)


def _packs_damage(source: Source, *, full: bool) -> Iterator[str]:
    if source.packs is None:
        return
    folder = packs_folder(source.corpus, source.split, source.packs.context_len)
    try:
        info = read_packs(folder)
        if info.fingerprint != source.packs.fingerprint:
            yield f"another pack index (in {folder}; got {info.fingerprint}; expected {source.packs.fingerprint})"
            return
        map_packs(folder, info)
    except FlameError as error:
        yield str(error)
        return
    for name in ARRAYS if full else ():
        found = payload_checksum(array_path(folder, name))
        if found != info.checksums[name]:
            path, expected = array_path(folder, name), info.checksums[name]
            yield f"the bytes of a file of the pack index changed (in {path}; got {found}; expected {expected})"


def _changed_bytes(files: ShardFiles) -> Iterator[str]:
    for path, expected in (
        (files.tokens_path, files.info.tokens_checksum),
        (files.ends_path, files.info.ends_checksum),
    ):
        found = payload_checksum(path)
        if found != expected:
            yield f"the bytes of a file of the corpus changed (in {path}; got {found}; expected {expected})"
