"""`flame-preprocess build`: plan, run the tasks, seal. A re-run continues, and ends with the same bytes."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flame.errors import DiskFullError
from flame.files import exclusive_lock, file_lock, named_disk_errors
from flame.preprocess.array_job import shared_plan
from flame.preprocess.build_plan import input_bytes_at_most, make_plan, task_settings
from flame.preprocess.build_seal import check_errors, finish_sweeping, seal_build, seal_shares, summary, sweep
from flame.preprocess.ceiling import ErrorCount
from flame.preprocess.config import BuildOptions
from flame.preprocess.dedup_pass import find_copies
from flame.preprocess.dedup_share import hash_share, require_copies
from flame.preprocess.dry_run import BYTES_A_DOCUMENT, take_sample, told
from flame.preprocess.engine_check import SMALL_INPUT_BYTES, require_installed
from flame.preprocess.engine_screen import write_screen
from flame.preprocess.engines import ENGINES
from flame.preprocess.executors import EXECUTORS, Executor
from flame.preprocess.file_kinds import FoundFile
from flame.preprocess.folder import (
    LOCK,
    PLAN_LOCK,
    SCREEN,
    WORKERS_LOCK,
    check_folder,
    read_receipts,
    shards_of,
)
from flame.preprocess.inputs import find_inputs
from flame.preprocess.local import LocalExecutor
from flame.preprocess.plan import Task
from flame.preprocess.plan_file import Plan, adopt, say_finished
from flame.preprocess.progress import BuildProgress, log
from flame.preprocess.reports import Progress
from flame.preprocess.task import TokenizeSettings
from flame.preprocess.tokenizer import TokenizerSpec, copy_tokenizer, read_tokenizer
from flame.preprocess.workers import Loaded, LoadRequest
from flame.shards.format import MANIFEST, TOKENIZER_FOLDER
from flame.words import counted


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
        finish_sweeping(options.output)
        return code
    if options.hash_only and not options.dry_run:
        return hash_share(options, found, tokenizer)
    request = LoadRequest(
        engine=options.engine,
        tokenizer_json=tokenizer.json,
        parse_special=tokenizer.parse_special,
        screens=(options.output / SCREEN,),
        small_input=input_bytes_at_most(options, found) < SMALL_INPUT_BYTES,
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
            tasks = TokenizeSettings(build=settings)
            num_tokens = _run_tasks(options, plan, tasks, executor, loaded.engine)
            manifest = seal_build(options, plan, tokenizer, loaded.engine)
            sweep(options.output)
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
        if options.dedup is not None:
            require_copies(plan, options)
        with file_lock(corpus / PLAN_LOCK, what="the plan of this corpus", wait=True):
            _write_tokenizer(corpus, tokenizer, loaded)
        settings = TokenizeSettings(build=task_settings(options, plan, tokenizer), claims=True)
        num_tokens = _run_tasks(options, plan, settings, executor, loaded.engine)
        done = read_receipts(corpus, plan.digest)
    tasks = share.tasks(plan.num_tasks)
    print(
        f"share {share} of {corpus} is done: {counted(len(tasks), 'task')}, {counted(num_tokens, 'token')} written "
        f"now; {len(done):,} of all {counted(plan.num_tasks, 'task')} are finished"
    )
    if len(done) == plan.num_tasks:
        print(f"every share is done: flame-preprocess build --seal --output {corpus} makes the corpus of them")
    return 0


def _write_tokenizer(corpus: Path, tokenizer: TokenizerSpec, loaded: Loaded) -> None:
    """Write the tokenizer's files, where they are not there, and the engine's screen."""
    with named_disk_errors(corpus, len(tokenizer.json)):
        copy_tokenizer(tokenizer, corpus / TOKENIZER_FOLDER)
    if loaded.screen is not None and loaded.screen_key is not None:
        write_screen(corpus / SCREEN, loaded.screen, loaded.screen_key)


def _run_tasks(options: BuildOptions, plan: Plan, settings: TokenizeSettings, executor: Executor, engine: str) -> int:
    """Run the tasks that have no receipt; returns the tokens written by them."""
    corpus = options.output
    done = read_receipts(corpus, plan.digest)
    count = ErrorCount.of(done.values())
    left = [task for task in plan.tasks if task.index not in done]
    total_bytes, left_bytes = (sum(task.num_bytes for task in tasks) for tasks in (plan.tasks, left))
    log(
        f"{counted(len(plan.inputs), 'file')}, {plan.input_bytes:,} bytes, {counted(plan.num_tasks, 'task')}"
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
                check_errors(options, plan, count, progress.share_read)

        try:
            if left:
                executor.run(left, settings, lock=corpus / WORKERS_LOCK, report=report, shared=settings.claims)
        except DiskFullError as error:
            done = read_receipts(corpus, plan.digest)
            raise _without_room(error, [task for task in left if task.index not in done], done) from error
        return progress.num_tokens


def _without_room(error: DiskFullError, left: Sequence[Task], done: Mapping[int, Mapping[str, Any]]) -> DiskFullError:
    """Return the error with the bytes that the tasks left will take: those of their text where none is done."""
    if not left:
        return error
    shards = [shard for receipt in done.values() for _, shard in shards_of(receipt)]
    text = sum(shard["num_bytes"] for shard in shards)
    written = sum(4 * shard["num_tokens"] + BYTES_A_DOCUMENT * shard["num_documents"] for shard in shards)
    needed = sum(task.num_bytes for task in left) * (written / text if text else 1.0)
    return DiskFullError(
        error.what,
        where=error.where,
        got=error.got,
        expected=f"about {needed:,.0f} bytes for what is left, {counted(len(left), 'task')}",
        fix=error.fix,
    )
