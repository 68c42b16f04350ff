"""`flame-preprocess verify`: read every byte of a corpus again, and name all that is not as it was sealed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from flame.config import option
from flame.errors import UsageError
from flame.files import TEMPORARY_SUFFIX
from flame.preprocess.pack_check import check_pack_indices
from flame.preprocess.problem import Problem, told
from flame.preprocess.shard_check import Advance, ContentRules, check_shard
from flame.preprocess.tokenizer_check import check_tokenizer, check_tokenizer_files
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
from flame.shards.manifest import DamagedManifestError, Manifest, ShardInfo, read_manifest
from flame.shards.reader import Corpus
from flame.words import counted

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SECONDS_BETWEEN_LINES = 60


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The options of `flame-preprocess verify`."""

    corpus: Path = option(help="corpus folder", positional=True)
    num_workers: int | None = option(
        None, help="threads that read shards, 60 MB of memory each; default one a CPU", aliases=("workers",)
    )
    json: bool = option(False, help="print one JSON object instead of a line a finding")

    def __post_init__(self) -> None:
        if self.num_workers is not None and self.num_workers < 1:
            raise UsageError(f"--num_workers cannot be {self.num_workers}", expected="1 or more")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong: the file, as a path inside the corpus, what is wrong with it, and with which bytes.

    Bytes `[start_byte, stop_byte)` are the file's, its header counted; of many places, they are the first.
    """

    path: str
    problem: str
    start_byte: int | None = None
    stop_byte: int | None = None

    @classmethod
    def of(cls, corpus: Path, problem: Problem) -> Finding:
        """Return what to tell of a problem of a file inside the corpus."""
        start, stop = problem.bytes or (None, None)
        name = os.path.relpath(problem.path, corpus)  # a pack index lies beside it
        return cls(path=name, problem=problem.text, start_byte=start, stop_byte=stop)

    def __str__(self) -> str:
        place = "" if self.start_byte is None else f" [bytes {self.start_byte}:{self.stop_byte}]"
        return f"{self.path}: {self.problem}{place}"


def verify(options: VerifyOptions) -> int:
    """Print a line a finding, as it is found; return 3 if there are any, 0 if the corpus is as it was sealed.

    Everything is read again: checksums, boundaries, ids, EOS and BOS, provenance, the tokenizer; files that do not
    belong are named. Raises for a folder that is no corpus. Memory: some 60 MB a worker, however large the shards.
    """
    if not options.corpus.exists():
        raise UsageError("there is no such corpus folder", got=options.corpus, fix="Check the path")
    try:
        manifest = read_manifest(options.corpus)
    except DamagedManifestError as error:
        return _report(options, None, [Finding(path=MANIFEST, problem=told(error))])
    return _report(options, manifest, find_damage(options.corpus, manifest, num_workers=options.num_workers))


def _report(options: VerifyOptions, manifest: Manifest | None, found: Iterable[Finding]) -> int:
    findings: list[Finding] = []
    for finding in found:
        findings.append(finding)
        if not options.json:
            tqdm.write(str(finding), file=sys.stdout)  # above the bar, where there is one
            sys.stdout.flush()
    if options.json:
        fingerprint = None if manifest is None else manifest.fingerprint
        value = {"corpus": str(options.corpus), "fingerprint": fingerprint}
        print(json.dumps({**value, "findings": [asdict(finding) for finding in findings]}))
    if manifest is None or findings:
        print(f"{options.corpus}: {counted(len(findings), 'finding')}", file=sys.stderr)
        return 3
    for name, split in manifest.splits.items():
        counts = (
            f"{counted(len(split.shards), 'shard')}, {counted(split.num_documents, 'document')}, "
            f"{counted(split.num_tokens, 'token')}"
        )
        print(f"{options.corpus}: {name} is as it was sealed: {counts}", file=sys.stderr)
    return 0


def find_damage(corpus: Path, manifest: Manifest, *, num_workers: int | None = None) -> Iterator[Finding]:
    """Yield what is wrong with a corpus of a whole manifest: tokenizer, shards in order, stray files, pack indices."""
    tokenizer, wrong = check_tokenizer(corpus, manifest.tokenizer)
    if wrong is not None:
        yield Finding(path=f"{TOKENIZER_FOLDER}/tokenizer.json", problem=wrong)
    for problem in check_tokenizer_files(corpus, manifest.tokenizer_files):
        yield Finding.of(corpus, problem)
    rules = _rules(corpus, manifest, tokenizer)
    shards = [(name, shard) for name, split in manifest.splits.items() for shard in split.shards]
    num_workers = num_workers or len(os.sched_getaffinity(0))
    with _progress(sum(_size_bytes(shard) for _, shard in shards)) as advance, ThreadPoolExecutor(num_workers) as pool:

        def check(split_and_shard: tuple[str, ShardInfo]) -> list[Problem]:
            return list(check_shard(corpus, *split_and_shard, rules, advance))

        for problems in pool.map(check, shards):
            for problem in problems:
                yield Finding.of(corpus, problem)
    yield from _find_strays(corpus, manifest, provenance=rules.provenance)
    for problem in check_pack_indices(Corpus(corpus, manifest)):
        yield Finding.of(corpus, problem)


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
        vocab_size=info.vocab_size,
        is_known=is_known,
    )


def _size_bytes(shard: ShardInfo) -> int:
    return shard.num_tokens * TOKEN_DTYPE.itemsize + shard.num_documents * END_DTYPE.itemsize


@contextlib.contextmanager
def _progress(num_bytes: int) -> Iterator[Advance]:
    """Show the bytes read on stderr: a bar on a terminal, a line a minute elsewhere.

    What is yielded may be called from any thread.
    """
    lock = threading.Lock()
    started = told_at = time.monotonic()
    done = 0
    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="verify", disable=None, leave=False) as bar:

        def advance(number: int) -> None:
            nonlocal told_at, done
            with lock:
                bar.update(number)
                done += number
                now = time.monotonic()
                if bar.disable and now - told_at >= SECONDS_BETWEEN_LINES:
                    told_at = now
                    speed = f"{done / (now - started) / 1e6:,.0f} MB/s"
                    print(
                        f"verify: {100 * done / max(num_bytes, 1):.1f}% of {num_bytes:,} bytes, {speed}",
                        file=sys.stderr,
                    )

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
