"""The end of a build: finished tasks are sealed unless too much was malformed, and what came of them is told."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from flame.errors import CorpusError, FlameError
from flame.files import exclusive_lock, remove_tree
from flame.preprocess.array_job import missing_tasks
from flame.preprocess.ceiling import ErrorCount, too_many_errors
from flame.preprocess.config import BuildOptions
from flame.preprocess.dedup_pass import not_hashed
from flame.preprocess.dedup_share import hashes_missing
from flame.preprocess.engines import ENGINES
from flame.preprocess.folder import CLAIMS, COPIES, HASHES, LOCK, VAL_PARTS, read_receipts, remove_strays
from flame.preprocess.plan_file import Plan, no_workers, read_plan
from flame.preprocess.ranges import stretches
from flame.preprocess.records import damaged
from flame.preprocess.seal import seal
from flame.preprocess.task_settings import docs_schema
from flame.preprocess.tokenizer import TokenizerSpec, read_tokenizer
from flame.shards.format import MANIFEST, REJECTS_FOLDER, TOKENIZER_FOLDER
from flame.shards.manifest import Manifest, read_manifest
from flame.words import counted

_NEEDED_NO_MORE = (VAL_PARTS, COPIES, HASHES, CLAIMS)


def seal_shares(options: BuildOptions) -> int:
    """Seal what the processes of an array job built; returns the exit code. Only --output is needed."""
    corpus = options.output
    plan = read_plan(corpus)
    if plan is None:
        raise CorpusError(
            "there is nothing to seal",
            where=corpus,
            expected="the folder in which flame-preprocess build --task_range has run",
            fix="Check --output",
        )
    if (corpus / MANIFEST).is_file():
        print(f"{corpus} is sealed already: nothing to do ({read_manifest(corpus).fingerprint})")
        finish_sweeping(corpus)
        return 0
    with exclusive_lock(corpus / LOCK, what="this corpus"), no_workers(corpus):
        if plan.options.get("dedup") is not None and (left := not_hashed(plan, corpus)):
            raise hashes_missing(plan, left, options)
        receipts = read_receipts(corpus, plan.digest)
        error = missing_tasks(corpus, plan, receipts.keys(), options)
        if error is not None:
            raise error
        remove_strays(corpus, receipts.values())
        tokenizer = _copied_tokenizer(corpus, plan)
        engine = Counter(receipt["engine"] for receipt in receipts.values()).most_common(1)[0][0]
        manifest = seal_build(options, plan, tokenizer, engine)
        sweep(corpus)
    print(summary(corpus, manifest))
    return 0


def _copied_tokenizer(corpus: Path, plan: Plan) -> TokenizerSpec:
    """Return the tokenizer of the shares, as its copy in the corpus says it."""
    folder = corpus / TOKENIZER_FOLDER
    again = "Run one share again: it writes the tokenizer's files anew, and its tasks are kept"
    try:
        tokenizer = read_tokenizer(
            folder,
            eos_token=plan.options["eos_token"],
            bos=plan.options["bos"],
            parse_special=plan.options["special_text"] == "parsed",
        )
    except FlameError as error:
        raise damaged(folder, got=error.what, fix=again) from error
    if tokenizer.info.fingerprint != plan.options["tokenizer"]:
        raise damaged(folder, got="another tokenizer than the plan's", fix=again)
    return tokenizer


def sweep(corpus: Path) -> None:
    """Delete what a sealed corpus needs no more."""
    for name in _NEEDED_NO_MORE:
        remove_tree(corpus / name)


def finish_sweeping(corpus: Path) -> None:
    """Do so where a kill came between sealing and sweeping; a corpus without such remains may be read-only."""
    if any((corpus / name).exists() for name in _NEEDED_NO_MORE):
        with exclusive_lock(corpus / LOCK, what="this corpus"):
            sweep(corpus)


def seal_build(options: BuildOptions, plan: Plan, tokenizer: TokenizerSpec, engine: str) -> Manifest:
    """Seal the corpus of finished tasks; returns its manifest. `engine` is the one that most of them used."""
    receipts = finished_receipts(options.output, plan)
    check_errors(options, plan, ErrorCount.of(receipts.values()))
    return seal(
        options.output,
        receipts,
        tokenizer=tokenizer.info,
        held_out=plan.options["val_fraction"] > 0,
        shard_tokens=plan.options["shard_tokens"],
        docs_schema=docs_schema(plan.columns) if plan.options["provenance"] else None,
        engine={
            "name": engine,
            "version": ENGINES[engine].version if ENGINES[engine].installed else "not installed where it was sealed",
            "redone_tasks": sum(receipt.get("redone") is not None for receipt in receipts.values()),
        },
        options={**plan.options, "on_error": plan.on_error, "dataset": list(plan.dataset)},
        inputs=plan.inputs_in_short,
    )


def finished_receipts(corpus: Path, plan: Plan) -> dict[int, dict[str, Any]]:
    """Return the receipts of all tasks, by task; `CorpusError` where one lost its files since it was finished."""
    receipts = read_receipts(corpus, plan.digest)
    lacking = [task for task in range(plan.num_tasks) if task not in receipts]
    if lacking:
        raise CorpusError(
            "finished tasks lost their files",
            where=corpus,
            got=f"tasks {stretches(lacking)}",
            fix="Run the same command again: these tasks are run again",
        )
    return receipts


def check_errors(options: BuildOptions, plan: Plan, count: ErrorCount, share_read: float = 1.0) -> None:
    """Raise `InputError` if more documents are malformed than may be, whatever is still to be read."""
    fraction = options.max_error_fraction
    if fraction is None and plan.asked is not None:
        fraction = plan.asked.get("max_error_fraction")  # what the shares of an array job were told
    if fraction is not None and count.exceeds(fraction, share_read=share_read):
        receipts = read_receipts(options.output, plan.digest).values()
        raise too_many_errors(options.output, count, fraction, receipts)


def summary(corpus: Path, manifest: Manifest, *, num_tokens: int | None = None, seconds: float = 0.0) -> str:
    """Return what was built, for people: documents in and out, rejects by reason, tokens, bytes, folder.

    With `num_tokens`, those that were written in so many seconds, the speed too.
    """
    written = sum(split.num_documents for split in manifest.splits.values())
    refused = sum(manifest.rejects.values())
    lines = [f"built {corpus}", f"  documents  {written + refused:,} read, {written:,} written, {refused:,} refused"]
    lines += [f"  refused    {number:,} {reason}" for reason, number in manifest.rejects.items()]
    if (corpus / REJECTS_FOLDER).is_dir():
        lines.append(f"  shown      what was malformed, and where: {corpus / REJECTS_FOLDER}")
    repaired = manifest.inputs["repaired"]
    lines += [f"  repaired   {number:,} {reason}" for reason, number in repaired.items()]
    for name, split in manifest.splits.items():
        lines.append(
            f"  {name:<10} {counted(split.num_documents, 'document')}, {counted(split.num_tokens, 'token')}, "
            f"{split.num_bytes:,} bytes of text, {counted(len(split.shards), 'shard')}"
        )
    if num_tokens is not None:
        lines.append(f"  speed      {num_tokens / max(seconds, 1e-9):,.0f} tokens/s ({seconds:.1f} s)")
    lines.append(f"  corpus     {manifest.fingerprint}")
    return "\n".join(lines)
