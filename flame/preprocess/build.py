"""`flame-preprocess build`: plan, run the tasks, seal. A re-run continues, and ends with the same bytes."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flame.errors import CorpusError, DiskFullError
from flame.files import exclusive_lock, file_lock, named_disk_errors, remove_tree, sha256_of_json
from flame.preprocess.array_job import missing_tasks, shared_plan
from flame.preprocess.ceiling import ErrorCount, too_many_errors
from flame.preprocess.config import BuildOptions
from flame.preprocess.dedup_pass import find_copies
from flame.preprocess.dry_run import BYTES_A_DOCUMENT, take_sample, told
from flame.preprocess.engine_check import SMALL_INPUT_BYTES, require_installed
from flame.preprocess.engine_screen import write_screen
from flame.preprocess.engines import ENGINES
from flame.preprocess.executors import EXECUTORS, Executor
from flame.preprocess.folder import (
    CLAIMS,
    COPIES,
    LOCK,
    PLAN_LOCK,
    SCREEN,
    VAL_PARTS,
    WORKERS_LOCK,
    check_folder,
    read_receipts,
    remove_strays,
    shards_of,
)
from flame.preprocess.inputs import FoundFile, find_inputs
from flame.preprocess.local import LocalExecutor
from flame.preprocess.plan import Task, plan_tasks
from flame.preprocess.plan_file import Plan, adopt, input_entry, no_workers, read_plan, say_finished
from flame.preprocess.progress import BuildProgress, log
from flame.preprocess.ranges import stretches
from flame.preprocess.scan import scan_inputs
from flame.preprocess.seal import seal
from flame.preprocess.task import Progress, TaskSettings, docs_schema
from flame.preprocess.tokenizer import TokenizerSpec, copy_tokenizer, read_tokenizer
from flame.preprocess.workers import Loaded, LoadRequest
from flame.shards.format import MANIFEST, TOKENIZER_FOLDER
from flame.shards.manifest import Manifest, read_manifest


def build(options: BuildOptions) -> int:
    """Build the corpus that `options` describe, or go on with it; returns the exit code.

    Nothing is written before the inputs, the tokenizer and the output folder are known to be usable.
    """
    if options.seal:
        return seal_shares(options)
    started = time.monotonic()
    require_installed(options.engine)
    found = find_inputs(
        options.dataset,
        data_dir=options.data_dir,
        data_files=options.data_files,
        name=options.dataset_name,
        split=options.dataset_split,
        revision=options.dataset_revision,
    )
    assert options.tokenizer is not None
    tokenizer = read_tokenizer(
        options.tokenizer, eos_token=options.eos_token, bos=options.bos, parse_special=options.parse_special
    )
    if tokenizer.largest_id >= tokenizer.info.vocab_size:
        log(
            f"note: the tokenizer's largest id is {tokenizer.largest_id}, beyond its {tokenizer.info.vocab_size} tokens"
        )
    check_folder(options.output)
    if (options.output / MANIFEST).is_file():
        code = say_finished(options.output, make_plan(options, found, tokenizer))
        left = [path for path in (options.output / VAL_PARTS, options.output / COPIES) if path.exists()]
        if left:  # a kill came between sealing and sweeping
            with exclusive_lock(options.output / LOCK, what="this corpus"):
                for path in left:
                    remove_tree(path)
        return code
    request = LoadRequest(
        engine=options.engine,
        tokenizer_json=tokenizer.json,
        parse_special=tokenizer.parse_special,
        screens=(options.output / SCREEN,),
        small_input=_input_bytes_at_most(options, found) < SMALL_INPUT_BYTES,
    )
    if options.dry_run:
        return _say_what_it_would_be(options, found, tokenizer, request)
    with EXECUTORS[options.executor](request, options.num_workers) as executor:
        if options.task_range is not None:
            return _run_share(options, found, tokenizer, executor)
        plan = make_plan(options, found, tokenizer)
        loaded = executor.wait_until_loaded()
        with exclusive_lock(options.output / LOCK, what="this corpus"):
            if (options.output / MANIFEST).is_file():
                return say_finished(options.output, plan)
            adopt(options.output, plan)
            _write_tokenizer(options.output, tokenizer, loaded)
            settings = task_settings(options, plan, tokenizer)
            if options.dedup is not None:
                find_copies(plan, settings, options.executor, options.num_workers)
            num_tokens = _run_tasks(options, plan, settings, executor, loaded.engine)
            manifest = _seal(options, plan, tokenizer, loaded.engine)
            remove_tree(options.output / COPIES)
    print(summary(options.output, manifest, num_tokens=num_tokens, seconds=time.monotonic() - started))
    return 0


def _say_what_it_would_be(
    options: BuildOptions, found: Sequence[FoundFile], tokenizer: TokenizerSpec, request: LoadRequest
) -> int:
    """Do --dry_run; returns the exit code."""
    with (
        tempfile.TemporaryDirectory(prefix="flame-dry-run-") as folder,
        LocalExecutor(request, 1) as executor,
    ):
        plan = make_plan(options, found, tokenizer)
        loaded = executor.wait_until_loaded()
        settings = dataclasses.replace(task_settings(options, plan, tokenizer), corpus=Path(folder), dedup=False)
        sample = take_sample(plan, settings, executor)
        engine = f"{loaded.engine} {ENGINES[loaded.engine].version}"
        print(told(options.output, plan, sample, engine=engine, num_workers=options.worker_count))
    return 0


def _run_share(options: BuildOptions, found: Sequence[FoundFile], tokenizer: TokenizerSpec, executor: Executor) -> int:
    """Run the tasks of one share of an array job; returns the exit code."""
    loaded = executor.wait_until_loaded()
    corpus, share = options.output, options.task_range
    assert share is not None
    with file_lock(corpus / LOCK, what="this corpus", shared=True):
        if (corpus / MANIFEST).is_file():
            return say_finished(corpus, make_plan(options, found, tokenizer))
        plan = shared_plan(options, found, tokenizer, lambda: make_plan(options, found, tokenizer))
        with file_lock(corpus / PLAN_LOCK, what="the plan of this corpus", wait=True):
            _write_tokenizer(corpus, tokenizer, loaded)
        settings = dataclasses.replace(task_settings(options, plan, tokenizer), claims=True)
        num_tokens = _run_tasks(options, plan, settings, executor, loaded.engine)
        done = read_receipts(corpus, plan.digest)
    tasks = share.tasks(plan.num_tasks)
    print(
        f"share {share} of {corpus} is done: {len(tasks)} tasks, {num_tokens:,} tokens written now; "
        f"{len(done):,} of all {plan.num_tasks:,} tasks are finished"
    )
    if len(done) == plan.num_tasks:
        print(f"every share is done: flame-preprocess build --seal --output {corpus} makes the corpus of them")
    return 0


def seal_shares(options: BuildOptions) -> int:
    """Seal what the processes of an array job built; returns the exit code. Only --output is needed."""
    started = time.monotonic()
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
        return 0
    with exclusive_lock(corpus / LOCK, what="this corpus"), no_workers(corpus):
        receipts = read_receipts(corpus, plan.digest)
        error = missing_tasks(corpus, plan, receipts.keys(), options)
        if error is not None:
            raise error
        remove_strays(corpus, receipts.values())
        tokenizer = read_tokenizer(
            corpus / TOKENIZER_FOLDER,
            eos_token=plan.options["eos_token"],
            bos=plan.options["bos"],
            parse_special=plan.options["special_text"] == "parsed",
        )
        if tokenizer.info.fingerprint != plan.options["tokenizer"]:
            raise CorpusError("the copied tokenizer is not the one of the plan", where=corpus / TOKENIZER_FOLDER)
        engine = Counter(receipt["engine"] for receipt in receipts.values()).most_common(1)[0][0]
        manifest = _seal(options, plan, tokenizer, engine)
        remove_tree(corpus / CLAIMS)
    tokens = sum(split.num_tokens for split in manifest.splits.values())
    print(summary(corpus, manifest, num_tokens=tokens, seconds=time.monotonic() - started))
    return 0


def _write_tokenizer(corpus: Path, tokenizer: TokenizerSpec, loaded: Loaded) -> None:
    """Write the tokenizer's files and the engine's screen, where they are not there."""
    if not (corpus / TOKENIZER_FOLDER).is_dir():
        with named_disk_errors(corpus, len(tokenizer.json)):
            copy_tokenizer(tokenizer, corpus / TOKENIZER_FOLDER)
    if loaded.screen is not None and loaded.screen_key is not None:
        write_screen(corpus / SCREEN, loaded.screen, loaded.screen_key)


def _input_bytes_at_most(options: BuildOptions, found: Sequence[FoundFile]) -> int:
    """Return about how much will be read, before anything is: sizes on disk, and what limits them."""
    sizes = sum((3 if file.compression else 1) * file.size_bytes for file in found)
    limits = [sizes, options.limit_bytes, None if options.limit_documents is None else 4096 * options.limit_documents]
    return min(limit for limit in limits if limit is not None)


def make_plan(options: BuildOptions, found: Sequence[FoundFile], tokenizer: TokenizerSpec) -> Plan:
    """Look at the inputs and cut them into tasks."""
    files, columns = scan_inputs(
        found,
        text_columns=options.text_columns,
        keep_columns=options.keep_columns,
        limit_documents=options.limit_documents,
        limit_bytes=options.limit_bytes,
        on_error=options.on_error,
        where=options.condition,
    )
    seed = options.seed if options.shuffled else None
    tasks = plan_tasks(files, shard_tokens=options.shard_tokens, shuffle_seed=seed)
    return Plan(
        options={
            "tokenizer": tokenizer.info.fingerprint,
            "eos_token": tokenizer.eos_token,
            "bos": tokenizer.info.bos,
            "special_text": tokenizer.info.special_text,
            "text_column": columns.text,
            "keep_columns": {field.name: str(field.type) for field in columns.kept},
            "provenance": options.provenance,
            "shuffle": options.shuffled,
            "seed": seed,
            "shuffle_block_tokens": options.shuffle_block_tokens if options.shuffled else None,
            "shard_tokens": options.shard_tokens,
            "val_fraction": options.val_fraction,
            "limit_documents": options.limit_documents,
            "limit_bytes": options.limit_bytes,
            "where": columns.where.text if columns.where is not None else None,
            "min_chars": options.min_chars,
            "max_chars": options.max_chars,
            "max_tokens_per_document": options.max_tokens_per_document,
            "long_documents": options.long_documents if options.max_tokens_per_document is not None else None,
            "dedup": options.dedup,
        },
        inputs=[input_entry(file) for file in files],
        on_error=options.on_error,
        columns=columns,
        tasks=tasks,
        num_tasks=len(tasks),
        dataset=options.dataset,
    )


def task_settings(options: BuildOptions, plan: Plan, tokenizer: TokenizerSpec) -> TaskSettings:
    return TaskSettings(
        corpus=options.output,
        plan_digest=plan.digest,
        columns=plan.columns,
        provenance=options.provenance,
        eos_id=tokenizer.info.eos_id,
        bos_id=tokenizer.info.bos_id,
        batch_size=options.batch_size,
        shuffle_seed=options.seed if options.shuffled else None,
        shuffle_block_tokens=options.shuffle_block_tokens,
        shard_tokens=options.shard_tokens,
        val_fraction=options.val_fraction,
        on_error=options.on_error,
        min_chars=options.min_chars,
        max_chars=options.max_chars,
        max_tokens=options.max_tokens_per_document,
        long_documents=options.long_documents,
        dedup=options.dedup is not None,
    )


def _run_tasks(options: BuildOptions, plan: Plan, settings: TaskSettings, executor: Executor, engine: str) -> int:
    """Run the tasks that have no receipt; returns the tokens written by them."""
    done = read_receipts(settings.corpus, plan.digest)
    count = ErrorCount.of(done.values())
    left = [task for task in plan.tasks if task.index not in done]
    total_bytes, left_bytes = (sum(task.num_bytes for task in tasks) for tasks in (plan.tasks, left))
    log(
        f"{len(plan.inputs)} files, {plan.input_bytes:,} bytes, {plan.num_tasks} tasks"
        + (f", {len(plan.tasks)} of them in share {options.task_range}" if options.task_range else "")
        + (f", {len(plan.tasks) - len(left)} of them done before" if len(plan.tasks) > len(left) else "")
        + f"; tokenizing with {engine} {ENGINES[engine].version}"
    )
    with BuildProgress(total_bytes, total_bytes - left_bytes) as progress:

        def report(news: Progress) -> None:
            progress.add(news)
            count.documents += news.num_documents + news.num_refused
            count.errors += news.num_errors
            if news.num_errors > 0 and options.task_range is None:  # a share tells nothing of the others
                _check_errors(options, plan, count, progress.share_read)

        try:
            if left:
                executor.run(left, settings, lock=settings.corpus / WORKERS_LOCK, report=report, shared=settings.claims)
        except DiskFullError as error:
            done = read_receipts(settings.corpus, plan.digest)
            raise _without_room(error, [task for task in left if task.index not in done], done) from error
        return progress.num_tokens


def _without_room(error: DiskFullError, left: Sequence[Task], done: Mapping[int, Mapping[str, Any]]) -> DiskFullError:
    """Return the error with the bytes that the tasks left will take: those of their text where none is done."""
    shards = [shard for receipt in done.values() for _, shard in shards_of(receipt)]
    text = sum(shard["num_bytes"] for shard in shards)
    written = sum(4 * shard["num_tokens"] + BYTES_A_DOCUMENT * shard["num_documents"] for shard in shards)
    needed = sum(task.num_bytes for task in left) * (written / text if text else 1.0)
    return DiskFullError(
        error.what,
        where=error.where,
        got=error.got,
        expected=f"about {needed:,.0f} bytes for the {len(left):,} tasks that are left",
        fix=error.fix,
    )


def _check_errors(options: BuildOptions, plan: Plan, count: ErrorCount, share_read: float = 1.0) -> None:
    """Raise `InputError` if more documents are malformed than may be, whatever is still to be read."""
    fraction = options.max_error_fraction
    if fraction is None and plan.asked is not None:
        fraction = plan.asked.get("max_error_fraction")  # what the shares of an array job were told
    if fraction is not None and count.exceeds(fraction, share_read=share_read):
        receipts = read_receipts(options.output, plan.digest).values()
        raise too_many_errors(options.output, count, fraction, receipts)


def _seal(options: BuildOptions, plan: Plan, tokenizer: TokenizerSpec, engine: str) -> Manifest:
    receipts = read_receipts(options.output, plan.digest)
    lacking = [task for task in range(plan.num_tasks) if task not in receipts]
    if lacking:
        raise CorpusError("finished tasks lost their files", where=options.output, got=f"tasks {stretches(lacking)}")
    _check_errors(options, plan, ErrorCount.of(receipts.values()))
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
        inputs={
            "num_files": len(plan.inputs),
            "num_bytes": plan.input_bytes,
            "digest": sha256_of_json(plan.inputs),
        },
    )


def summary(corpus: Path, manifest: Manifest, *, num_tokens: int, seconds: float) -> str:
    """Return what was built, for people: documents in and out, rejects by reason, tokens, bytes, speed, folder."""
    written = sum(split.num_documents for split in manifest.splits.values())
    refused = sum(manifest.rejects.values())
    lines = [f"built {corpus}", f"  documents  {written + refused:,} read, {written:,} written, {refused:,} refused"]
    lines += [f"  refused    {number:,} {reason}" for reason, number in manifest.rejects.items()]
    repaired = manifest.inputs["repaired"]
    lines += [f"  repaired   {number:,} {reason}" for reason, number in repaired.items()]
    for name, split in manifest.splits.items():
        lines.append(
            f"  {name:<10} {split.num_documents:,} documents, {split.num_tokens:,} tokens, "
            f"{split.num_bytes:,} bytes of text, {len(split.shards)} shards"
        )
    lines.append(f"  speed      {num_tokens / max(seconds, 1e-9):,.0f} tokens/s ({seconds:.1f} s)")
    lines.append(f"  corpus     {manifest.fingerprint}")
    return "\n".join(lines)
