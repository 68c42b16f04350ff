"""`flame-preprocess verify`: read every byte of a corpus again, and name all that is not as it was sealed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flame.config import option
from flame.errors import TokenizerError, UsageError
from flame.files import TEMPORARY_SUFFIX
from flame.preprocess.shard_check import Advance, ContentRules, check_shard, told
from flame.shards.fingerprint import tokenizer_fingerprint
from flame.shards.format import (
    BUILD_FOLDER,
    END_DTYPE,
    MANIFEST,
    REJECTS_FOLDER,
    TOKEN_DTYPE,
    TOKENIZER_FOLDER,
    docs_path,
    ends_path,
    tokens_path,
)
from flame.shards.manifest import DamagedManifestError, Manifest, ShardInfo, TokenizerInfo, read_manifest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The options of `flame-preprocess verify`."""

    corpus: Path = option(help="corpus folder", positional=True)
    num_workers: int | None = option(None, help=f"threads that read shards; default one a CPU, {MOST_WORKERS} at most")
    json: bool = option(False, help="print one JSON object instead of a line a finding")

    def __post_init__(self) -> None:
        if self.num_workers is not None and self.num_workers < 1:
            raise UsageError(f"--num_workers cannot be {self.num_workers}", expected="1 or more")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong: the file, as a path inside the corpus, and what is wrong with it."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


def verify(options: VerifyOptions) -> int:
    """Print a line a finding; return 3 if there are any, 0 if the corpus is as it was sealed.

    Everything is read again: checksums, boundaries, ids, EOS and BOS, provenance, the tokenizer; files that do not
    belong are named. Raises for a folder that is no corpus. Memory: some 60 MB a worker, however large the shards.
    """
    if not options.corpus.exists():
        raise UsageError("there is no such corpus folder", got=options.corpus, fix="Check the path")
    try:
        manifest = read_manifest(options.corpus)
    except DamagedManifestError as error:
        return _report(options, None, [Finding(path=MANIFEST, problem=told(error))])
    return _report(options, manifest, list(find_damage(options.corpus, manifest, num_workers=options.num_workers)))


def _report(options: VerifyOptions, manifest: Manifest | None, findings: list[Finding]) -> int:
    if options.json:
        fingerprint = None if manifest is None else manifest.fingerprint
        found = [asdict(finding) for finding in findings]
        print(json.dumps({"corpus": str(options.corpus), "fingerprint": fingerprint, "findings": found}))
    else:
        for finding in findings:
            print(finding)
    if manifest is None or findings:
        print(f"{options.corpus}: {len(findings)} finding{'s' * (len(findings) > 1)}", file=sys.stderr)
        return 3
    for name, split in manifest.splits.items():
        counts = f"{len(split.shards)} shards, {split.num_documents:,} documents, {split.num_tokens:,} tokens"
        print(f"{options.corpus}: {name} is as it was sealed: {counts}", file=sys.stderr)
    return 0


def find_damage(corpus: Path, manifest: Manifest, *, num_workers: int | None = None) -> Iterator[Finding]:
    """Yield what is wrong with a corpus whose manifest is whole: its tokenizer, its shards in order, stray files."""
    tokenizer, problem = _check_tokenizer(corpus, manifest.tokenizer)
    if problem is not None:
        yield Finding(path=f"{TOKENIZER_FOLDER}/tokenizer.json", problem=problem)
    rules = _rules(corpus, manifest, tokenizer)
    shards = [(name, shard) for name, split in manifest.splits.items() for shard in split.shards]
    num_workers = num_workers or min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    with _progress(sum(_size_bytes(shard) for _, shard in shards)) as advance, ThreadPoolExecutor(num_workers) as pool:

        def check(split_and_shard: tuple[str, ShardInfo]) -> list[tuple[Path, str]]:
            return list(check_shard(corpus, *split_and_shard, rules, advance))

        for problems in pool.map(check, shards):
            for path, problem in problems:
                yield Finding(path=path.relative_to(corpus).as_posix(), problem=problem)
    yield from _find_strays(corpus, manifest, provenance=rules.provenance)


def _check_tokenizer(corpus: Path, info: TokenizerInfo) -> tuple[Tokenizer | None, str | None]:
    """Return the corpus's tokenizer, if it is the manifest's own, else what is wrong with it."""
    from flame.shards.tokenizer import load_tokenizer, tokenizer_path

    try:
        found = tokenizer_fingerprint(
            tokenizer_path(corpus).read_bytes(),
            bos_id=info.bos_id,
            eos_id=info.eos_id,
            bos=info.bos,
            special_text=info.special_text,
        )
        if found != info.fingerprint:
            return None, f"its fingerprint is {found}, and the manifest says {info.fingerprint}"
        return load_tokenizer(corpus), None
    except FileNotFoundError:
        return None, "a file of the corpus is absent"
    except OSError as error:
        return None, f"it cannot be read: {error.strerror}"
    except TokenizerError as error:
        return None, told(error)


def _rules(corpus: Path, manifest: Manifest, tokenizer: Tokenizer | None) -> ContentRules:
    from flame.shards.tokenizer import text_can_give

    info = manifest.tokenizer

    def is_known(token: int) -> bool:  # an id may lie beyond a vocabulary with holes
        return token < info.vocab_size or (tokenizer is not None and tokenizer.id_to_token(token) is not None)

    return ContentRules(
        eos_id=info.eos_id,
        bos_id=info.bos_id if info.bos == "always" else None,
        eos_only_last=(
            info.special_text == "plain" and tokenizer is not None and not text_can_give(tokenizer, info.eos_id)
        ),
        provenance=manifest.options.get("provenance") is True
        or any(
            docs_path(corpus, name, shard.name).exists()
            for name, split in manifest.splits.items()
            for shard in split.shards
        ),
        is_known=is_known,
    )


def _size_bytes(shard: ShardInfo) -> int:
    return shard.num_tokens * TOKEN_DTYPE.itemsize + shard.num_documents * END_DTYPE.itemsize


@contextlib.contextmanager
def _progress(num_bytes: int) -> Iterator[Advance]:
    """Show the bytes read on a terminal's stderr; what is yielded may be called from any thread."""
    from tqdm import tqdm

    lock = threading.Lock()
    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="verify", disable=None, leave=False) as bar:

        def advance(number: int) -> None:
            with lock:
                bar.update(number)

        yield advance


def _find_strays(corpus: Path, manifest: Manifest, *, provenance: bool) -> Iterator[Finding]:
    """Yield files that a reader would never see, but that say a build or a copy went wrong.

    What else lies in the corpus folder itself (a README, say) is nobody's business.
    """
    kinds = (tokens_path, ends_path, docs_path) if provenance else (tokens_path, ends_path)
    for name, split in manifest.splits.items():
        wanted = {kind(corpus, name, shard.name) for kind in kinds for shard in split.shards}
        found = set((corpus / name).iterdir()) if (corpus / name).is_dir() else set()
        for path in sorted(found - wanted):
            yield Finding(path=path.relative_to(corpus).as_posix(), problem="the manifest does not name it")
    known = {MANIFEST, TOKENIZER_FOLDER, BUILD_FOLDER, REJECTS_FOLDER, *manifest.splits}
    for path in sorted(corpus.iterdir()):
        if path.name in known:
            continue
        if path.name.endswith(TEMPORARY_SUFFIX):
            yield Finding(path=path.name, problem="it is the unfinished file of something that was stopped")
        elif path.is_dir() and any(path.glob("shard-*")):
            yield Finding(path=path.name, problem="it holds shards, and the manifest names no such split")
