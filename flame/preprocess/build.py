"""`flame-preprocess build`: plan, run the tasks, seal. A re-run continues, and ends with the same bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flame.errors import CorpusError, FlameError
from flame.files import exclusive_lock, remove_tree, sha256_of_json, write_json
from flame.preprocess.ceiling import ErrorCount, too_many_errors
from flame.preprocess.config import BuildOptions
from flame.preprocess.engine_check import SMALL_INPUT_BYTES, require_installed
from flame.preprocess.engine_screen import write_screen
from flame.preprocess.engines import ENGINES
from flame.preprocess.executors import EXECUTORS, Executor
from flame.preprocess.folder import (
    LOCK,
    PLAN,
    SCREEN,
    VAL_PARTS,
    WORKERS_LOCK,
    check_folder,
    differences,
    read_receipts,
    remove_strays,
)
from flame.preprocess.inputs import FoundFile, find_inputs
from flame.preprocess.plan import PLAN_VERSION, InputFile, Task, plan_tasks
from flame.preprocess.progress import BuildProgress, log
from flame.preprocess.readers.columns import Columns
from flame.preprocess.scan import scan_inputs
from flame.preprocess.seal import seal
from flame.preprocess.task import Progress, TaskSettings
from flame.preprocess.tokenizer import TokenizerSpec, copy_tokenizer, read_tokenizer
from flame.preprocess.workers import LoadRequest
from flame.shards.format import MANIFEST, TOKENIZER_FOLDER
from flame.shards.manifest import Manifest, read_manifest

SECONDS_TO_DIE = 30.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a build will do. `options` and `inputs` are all that decides its bytes, and what `digest` covers."""

    options: Mapping[str, Any]
    inputs: Sequence[Mapping[str, Any]]
    on_error: str
    columns: Columns
    tasks: tuple[Task, ...]

    @property
    def digest(self) -> str:
        return sha256_of_json({"version": PLAN_VERSION, "options": self.options, "inputs": self.inputs})

    @property
    def input_bytes(self) -> int:
        return sum(entry["size"] for entry in self.inputs)

    def to_json(self) -> dict[str, Any]:
        """Return the object that plan.json holds."""
        return {
            "version": PLAN_VERSION,
            "digest": self.digest,
            "options": self.options,
            "on_error": self.on_error,
            "num_tasks": len(self.tasks),
            "inputs": self.inputs,
        }


def build(options: BuildOptions) -> int:
    """Build the corpus that `options` describe, or go on with it; returns the exit code.

    Nothing is written before the inputs, the tokenizer and the output folder are known to be usable.
    """
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
        if (options.output / VAL_PARTS).exists():  # a kill came between sealing and sweeping
            with exclusive_lock(options.output / LOCK, what="this corpus"):
                remove_tree(options.output / VAL_PARTS)
        return code
    request = LoadRequest(
        engine=options.engine,
        tokenizer_json=tokenizer.json,
        parse_special=tokenizer.parse_special,
        screens=(options.output / SCREEN,),
        small_input=_input_bytes_at_most(options, found) < SMALL_INPUT_BYTES,
    )
    with EXECUTORS[options.executor](request, options.num_workers) as executor:
        plan = make_plan(options, found, tokenizer)
        loaded = executor.wait_until_loaded()
        with exclusive_lock(options.output / LOCK, what="this corpus"):
            if (options.output / MANIFEST).is_file():
                return say_finished(options.output, plan)
            adopt(options.output, plan)
            if not (options.output / TOKENIZER_FOLDER).is_dir():
                copy_tokenizer(tokenizer, options.output / TOKENIZER_FOLDER)
            if loaded.screen is not None and loaded.screen_key is not None:
                write_screen(options.output / SCREEN, loaded.screen, loaded.screen_key)
            settings = task_settings(options, plan, tokenizer)
            num_tokens = _run_tasks(options, plan, settings, executor, loaded.engine)
            manifest = _seal(options, plan, settings, tokenizer, loaded.engine)
    print(summary(options.output, manifest, num_tokens=num_tokens, seconds=time.monotonic() - started))
    return 0


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
    )
    seed = options.seed if options.shuffled else None
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
        },
        inputs=[input_entry(file) for file in files],
        on_error=options.on_error,
        columns=columns,
        tasks=plan_tasks(files, shard_tokens=options.shard_tokens, shuffle_seed=seed),
    )


def input_entry(file: InputFile) -> dict[str, Any]:
    entry = {"path": file.path, "size": file.size_bytes, "mtime_ns": file.mtime_ns, "rows": file.num_rows}
    return entry if file.etag is None else entry | {"etag": file.etag}


def say_finished(corpus: Path, plan: Plan) -> int:
    """Return 0 if the sealed corpus is the one asked for; `CorpusError` naming the difference otherwise."""
    _check_same_plan(corpus, plan)
    manifest = read_manifest(corpus)
    print(f"{corpus} is already built with these options and inputs: nothing to do ({manifest.fingerprint})")
    return 0


def adopt(corpus: Path, plan: Plan) -> None:
    """Begin the build, or take over what an earlier process left of the same one."""
    check_folder(corpus)
    if (corpus / PLAN).is_file():
        _check_same_plan(corpus, plan)
    with _no_workers(corpus):
        write_json(corpus / PLAN, plan.to_json())
        remove_strays(corpus, read_receipts(corpus, plan.digest).values())


def _check_same_plan(corpus: Path, plan: Plan) -> None:
    old = json.loads((corpus / PLAN).read_bytes())
    if old["digest"] != plan.digest:
        found = differences(old, plan.to_json())
        if old["version"] != PLAN_VERSION:
            found = [f"the plan's version was {old['version']} and is {PLAN_VERSION}", *found]
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        raise CorpusError(
            "the output folder holds a build with other options or inputs",
            where=corpus,
            got="; ".join(found[:3]) + more,
            fix="Name a new folder in --output, or delete this one to build it again",
        )
    # What a build that never skipped anything wrote is what one that may skip writes too; not the other way round.
    if old["on_error"] == "skip" and plan.on_error == "fail":
        raise CorpusError(
            "the output folder holds a build that skips malformed input",
            where=corpus,
            got='on_error was "skip" and is "fail"',
            fix="Go on with --on_error skip, or name a new folder in --output",
        )


@contextmanager
def _no_workers(corpus: Path) -> Iterator[None]:
    """Hold the workers' lock, once the workers of a killed build are gone: they die with it, but not at once."""
    deadline = time.monotonic() + SECONDS_TO_DIE
    while True:
        try:
            with exclusive_lock(corpus / WORKERS_LOCK, what="the tasks of this corpus"):
                yield
                return
        except FlameError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


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
    )


def _run_tasks(options: BuildOptions, plan: Plan, settings: TaskSettings, executor: Executor, engine: str) -> int:
    """Run the tasks that have no receipt; returns the tokens written by them."""
    done = read_receipts(settings.corpus, plan.digest)
    count = ErrorCount.of(done.values())
    left = [task for task in plan.tasks if task.index not in done]
    total_bytes, left_bytes = (sum(task.num_bytes for task in tasks) for tasks in (plan.tasks, left))
    log(
        f"{len(plan.inputs)} files, {plan.input_bytes:,} bytes, {len(plan.tasks)} tasks"
        + (f", {len(done)} of them done before" if done else "")
        + f"; tokenizing with {engine} {ENGINES[engine].version}"
    )
    with BuildProgress(total_bytes, total_bytes - left_bytes) as progress:

        def report(news: Progress) -> None:
            progress.add(news)
            count.documents += news.num_documents + news.num_refused
            count.errors += news.num_errors
            if news.num_errors > 0:
                _check_errors(options, plan, count, progress.share_read)

        if left:
            executor.run(left, settings, lock=settings.corpus / WORKERS_LOCK, report=report)
        return progress.num_tokens


def _check_errors(options: BuildOptions, plan: Plan, count: ErrorCount, share_read: float = 1.0) -> None:
    """Raise `InputError` if more documents are malformed than may be, whatever is still to be read."""
    fraction = options.max_error_fraction
    if fraction is not None and count.exceeds(fraction, share_read=share_read):
        receipts = read_receipts(options.output, plan.digest).values()
        raise too_many_errors(options.output, count, fraction, receipts)


def _seal(options: BuildOptions, plan: Plan, settings: TaskSettings, tokenizer: TokenizerSpec, engine: str) -> Manifest:
    receipts = read_receipts(options.output, plan.digest)
    lacking = [task.index for task in plan.tasks if task.index not in receipts]
    if lacking:
        raise CorpusError("finished tasks lost their files", where=options.output, got=f"tasks {lacking[:5]}")
    _check_errors(options, plan, ErrorCount.of(receipts.values()))
    return seal(
        options.output,
        receipts,
        tokenizer=tokenizer.info,
        held_out=options.val_fraction > 0,
        shard_tokens=options.shard_tokens,
        docs_schema=settings.docs_schema,
        engine={
            "name": engine,
            "version": ENGINES[engine].version,
            "redone_tasks": sum(receipt.get("redone") is not None for receipt in receipts.values()),
        },
        options={**plan.options, "on_error": options.on_error, "dataset": list(options.dataset)},
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
