"""What a build's options and inputs come to: its plan, and what its tasks are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flame.preprocess.config import BuildOptions
from flame.preprocess.file_kinds import FoundFile
from flame.preprocess.plan import plan_tasks
from flame.preprocess.plan_file import Plan, input_entry
from flame.preprocess.readers.columns import Columns
from flame.preprocess.scan import scan_inputs
from flame.preprocess.task_settings import TaskSettings
from flame.preprocess.tokenizer import TokenizerSpec


def input_bytes_at_most(options: BuildOptions, found: Sequence[FoundFile]) -> int:
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
    tasks = plan_tasks(files, shard_tokens=options.shard_tokens, shuffle_seed=options.shuffle_seed)
    return Plan(
        options={
            **tokenizer.plan_options,
            "text_column": columns.text,
            **output_options(options, columns),
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


def output_options(options: BuildOptions, columns: Columns) -> dict[str, Any]:
    """Return what decides how documents are written, by the names that plan.json gives it; conversions share it."""
    return {
        "keep_columns": {field.name: str(field.type) for field in columns.kept},
        "provenance": options.provenance,
        "shuffle": options.shuffled,
        "seed": options.shuffle_seed,
        "shuffle_block_tokens": options.shuffle_block_tokens if options.shuffled else None,
        "shard_tokens": options.shard_tokens,
        "val_fraction": options.val_fraction,
    }


def task_settings(options: BuildOptions, plan: Plan, tokenizer: TokenizerSpec) -> TaskSettings:
    """Return what every task is told."""
    return TaskSettings(
        corpus=options.output,
        plan_digest=plan.digest,
        columns=plan.columns,
        provenance=options.provenance,
        eos_id=tokenizer.info.eos_id,
        bos_id=tokenizer.info.bos_id,
        batch_size=options.batch_size,
        shuffle_seed=options.shuffle_seed,
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
