"""One corpus by many processes, each with its share of the tasks: who makes the plan, and what seals it.

The first process plans under a lock; the others wait for it, and read the plan instead of the inputs. Tasks are claimed
(`claims.py`), so that a share may run twice at once; `--seal` begins when all have their receipts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from flame.errors import CorpusError
from flame.files import file_lock, sha256_of_json
from flame.preprocess.config import BuildOptions
from flame.preprocess.file_kinds import FoundFile
from flame.preprocess.folder import PIECES, PLAN, PLAN_LOCK, check_folder, differences, input_differences
from flame.preprocess.plan_file import (
    Plan,
    another_build,
    check_same_plan,
    check_same_policy,
    read_plan,
    read_tasks,
    write_pieces,
    write_plan,
)
from flame.preprocess.ranges import stretches, unfinished
from flame.preprocess.tokenizer import TokenizerSpec
from flame.words import counted

SHOWN_RANGES = 20
# What may differ between the processes of one build: where and how fast it runs, and what is compared in other ways.
_FREE = {
    *("dataset", "data_dir", "data_files", "dataset_name", "dataset_split", "dataset_revision"),
    *("tokenizer", "output", "num_workers", "batch_size", "engine", "executor", "task_range", "hash_only", "seal"),
    *("dry_run", "on_error"),
}


def what_is_asked(options: BuildOptions, found: Sequence[FoundFile], tokenizer: TokenizerSpec) -> dict[str, Any]:
    """Return all that decides a build's bytes and is known before its inputs are read."""
    asked = {name: value for name, value in dataclasses.asdict(options).items() if name not in _FREE}
    listing = [[file.path, file.size_bytes, file.state.mtime_ns, file.state.etag] for file in found]
    return {
        **{name: list(value) if isinstance(value, tuple) else value for name, value in asked.items()},
        "tokenizer": [tokenizer.info.fingerprint, tokenizer.eos_token, tokenizer.info.bos],
        "files": sha256_of_json(listing),
    }


def shared_plan(
    options: BuildOptions, found: Sequence[FoundFile], tokenizer: TokenizerSpec, make_plan: Callable[[], Plan]
) -> Plan:
    """Return the plan that lies in the folder, with the tasks of the share; the first process makes it.

    Cost for the others: the listing of the inputs, and one reading of the plan. Raises `CorpusError` where the folder
    holds another build.
    """
    assert options.task_range is not None
    corpus = options.output
    with file_lock(corpus / PLAN_LOCK, what="the plan of this corpus", wait=True):
        check_folder(corpus)
        asked = what_is_asked(options, found, tokenizer)
        plan = read_plan(corpus)
        if plan is None or plan.asked is None or not (corpus / PIECES).is_file():
            made = dataclasses.replace(make_plan(), asked=asked, num_ranges=options.task_range.count)
            if (corpus / PLAN).is_file():
                check_same_plan(corpus, made)  # a build without shares began it
            plan = dataclasses.replace(made, pieces=write_pieces(corpus, made))
            write_plan(corpus, plan)
    _check_asked(corpus, plan, asked, found, options.on_error)
    wanted = options.task_range.tasks(plan.num_tasks)
    return dataclasses.replace(plan, tasks=read_tasks(corpus, plan, wanted))


def _check_asked(corpus: Path, plan: Plan, asked: dict[str, Any], found: Sequence[FoundFile], on_error: str) -> None:
    assert plan.asked is not None
    if plan.asked != asked:
        words = differences({"options": {**plan.asked, "files": 0}}, {"options": {**asked, "files": 0}})
        planned = [{name: entry.get(name) for name in ("path", "size", "mtime_ns", "etag")} for entry in plan.inputs]
        now = [
            {"path": file.path, "size": file.size_bytes, "mtime_ns": file.state.mtime_ns, "etag": file.state.etag}
            for file in found
        ]
        words += input_differences(planned, now)
        raise another_build(corpus, words or ["the inputs were others when it was planned"])
    check_same_policy(corpus, plan.on_error, on_error)


def missing_tasks(corpus: Path, plan: Plan, done: Collection[int], options: BuildOptions) -> CorpusError | None:
    """Return the error that names the shares which are not finished, None where all tasks are."""
    missing = [task for task in range(plan.num_tasks) if task not in done]
    if not missing:
        return None
    shares = shares_in_words(missing, plan, options)
    return CorpusError(
        "the build is not finished",
        where=corpus,
        got=f"{len(done):,} of {counted(plan.num_tasks, 'task')}; tasks {stretches(missing)} are missing",
        fix="Run the same flame-preprocess build command again, without --seal"
        if shares is None
        else f"Run again --task_range {shares}, then --seal: finished tasks are kept",
    )


def shares_in_words(tasks: Collection[int], plan: Plan, options: BuildOptions) -> str | None:
    """Return which shares have the tasks, `1/3, 2/3`; None where no share of the build was ever run."""
    count = options.task_range.count if options.task_range else plan.num_ranges
    if count is None:
        return None
    shares = [str(share) for share in unfinished(tasks, plan.num_tasks, count)]
    return ", ".join(shares[:SHOWN_RANGES]) + (
        f" and {len(shares) - SHOWN_RANGES} more" if len(shares) > SHOWN_RANGES else ""
    )
