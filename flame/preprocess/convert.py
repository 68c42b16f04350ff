"""`flame-preprocess convert`: other systems' token files to a sealed corpus. Plan, run, seal: as a build. And back."""

from __future__ import annotations

import time

from flame.files import exclusive_lock, named_disk_errors, remove_tree
from flame.preprocess.build_plan import output_options, task_settings
from flame.preprocess.build_seal import finished_receipts, summary
from flame.preprocess.convert_config import ConvertOptions
from flame.preprocess.convert_task import ConvertSettings, DecodeRequest
from flame.preprocess.executors import Executor
from flame.preprocess.exports.export import export
from flame.preprocess.folder import LOCK, VAL_PARTS, WORKERS_LOCK, check_folder, read_receipts
from flame.preprocess.local import LocalExecutor
from flame.preprocess.plan import plan_tasks
from flame.preprocess.plan_file import Plan, adopt, input_entry, say_finished
from flame.preprocess.progress import BuildProgress, log
from flame.preprocess.seal import seal
from flame.preprocess.sources.formats import SOURCES
from flame.preprocess.tokenizer import TokenizerSpec, copy_tokenizer, read_tokenizer
from flame.shards.format import MANIFEST, TOKENIZER_FOLDER
from flame.shards.manifest import Manifest
from flame.words import counted

SOURCE_VERSION = "1"  # raise it when the same token files give other documents


def convert(options: ConvertOptions) -> int:
    """Do what `options` ask for, in either direction; returns the exit code."""
    return export(options) if options.to is not None else make_corpus(options)


def make_corpus(options: ConvertOptions) -> int:
    """Convert the token files that `options` name into a corpus, or go on with it; returns the exit code.

    Nothing is written before the token files, the tokenizer and the output folder are known to be usable.
    """
    assert options.from_ is not None and options.tokenizer is not None
    started = time.monotonic()
    tokenizer = read_tokenizer(
        options.tokenizer, eos_token=options.eos_token, bos=options.bos, parse_special=options.parse_special
    )
    plan = make_plan(options, tokenizer)
    check_folder(options.output)
    if (options.output / MANIFEST).is_file():
        code = say_finished(options.output, plan)
        if (options.output / VAL_PARTS).exists():  # a kill came between sealing and sweeping
            with exclusive_lock(options.output / LOCK, what="this corpus"):
                remove_tree(options.output / VAL_PARTS)
        return code
    settings = ConvertSettings(
        build=task_settings(options.build_options, plan, tokenizer),
        source=options.from_,
        num_ids=max(tokenizer.info.vocab_size, tokenizer.largest_id + 1),
    )
    request = DecodeRequest(
        tokenizer_json=tokenizer.json,
        parse_special=tokenizer.parse_special,
        eos_id=tokenizer.info.eos_id,
        bos_id=tokenizer.info.bos_id,
    )
    with LocalExecutor(request, options.build_options.num_workers) as executor:
        executor.wait_until_loaded()  # a tokenizer that cannot be used is told before anything is written
        with exclusive_lock(options.output / LOCK, what="this corpus"):
            if (options.output / MANIFEST).is_file():
                return say_finished(options.output, plan)
            adopt(options.output, plan)
            with named_disk_errors(options.output, len(tokenizer.json)):
                copy_tokenizer(tokenizer, options.output / TOKENIZER_FOLDER)
            num_tokens = _run_tasks(options, plan, settings, executor)
            manifest = _seal(options, plan, settings, tokenizer)
    print(summary(options.output, manifest, num_tokens=num_tokens, seconds=time.monotonic() - started))
    return 0


def make_plan(options: ConvertOptions, tokenizer: TokenizerSpec) -> Plan:
    """Look at the token files and cut them into tasks."""
    assert options.from_ is not None and options.input is not None
    files, columns = SOURCES[options.from_].find(options.input, options.dataset_split, options.keep_columns)
    tasks = plan_tasks(files, shard_tokens=options.shard_tokens, shuffle_seed=options.build_options.shuffle_seed)
    return Plan(
        options={
            "from": options.from_,
            "source_version": SOURCE_VERSION,
            **tokenizer.plan_options,
            **output_options(options.build_options, columns),
        },
        inputs=[input_entry(file) for file in files],
        on_error="fail",
        columns=columns,
        tasks=tasks,
        num_tasks=len(tasks),
    )


def _run_tasks(options: ConvertOptions, plan: Plan, settings: ConvertSettings, executor: Executor) -> int:
    """Run the tasks that have no receipt; returns the tokens written by them."""
    done = read_receipts(options.output, plan.digest).keys()
    left = [task for task in plan.tasks if task.index not in done]
    total_bytes, left_bytes = (sum(task.num_bytes for task in tasks) for tasks in (plan.tasks, left))
    log(
        f"{counted(len(plan.inputs), 'file')}, {plan.input_bytes:,} bytes, {counted(len(plan.tasks), 'task')}"
        + (f", {len(done)} of them done before" if done else "")
    )
    with BuildProgress(total_bytes, total_bytes - left_bytes) as progress:
        if left:
            executor.run(left, settings, lock=options.output / WORKERS_LOCK, report=progress.add)
        return progress.num_tokens


def _seal(options: ConvertOptions, plan: Plan, settings: ConvertSettings, tokenizer: TokenizerSpec) -> Manifest:
    return seal(
        options.output,
        finished_receipts(options.output, plan),
        tokenizer=tokenizer.info,
        held_out=options.val_fraction > 0,
        shard_tokens=options.shard_tokens,
        docs_schema=settings.build.docs_schema,
        engine={"name": options.from_, "version": SOURCE_VERSION, "redone_tasks": 0},
        options={**plan.options, "input": str(options.input), "dataset_split": options.dataset_split},
        inputs=plan.inputs_in_short,
    )
