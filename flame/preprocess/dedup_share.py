"""`--dedup exact` by the processes of an array job: all shares are hashed before any is tokenized.

A share is run twice, first with `--hash_only`. The process that finds all of them hashed tells the copies, once. A
share that is to be tokenized before is refused: waiting would hold its machine for as long as the slowest other needs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flame.errors import CorpusError
from flame.files import file_lock
from flame.preprocess.array_job import shared_plan, shares_in_words
from flame.preprocess.build_plan import make_plan, task_settings
from flame.preprocess.config import BuildOptions
from flame.preprocess.dedup_pass import hash_texts, not_hashed, tell_copies
from flame.preprocess.file_kinds import FoundFile
from flame.preprocess.folder import COPIES, LOCK
from flame.preprocess.plan_file import Plan, say_finished
from flame.preprocess.ranges import stretches
from flame.preprocess.tokenizer import TokenizerSpec
from flame.shards.format import MANIFEST
from flame.words import counted


def hash_share(options: BuildOptions, found: Sequence[FoundFile], tokenizer: TokenizerSpec) -> int:
    """Do the first reading of a share, and tell the copies if it is the last; returns the exit code."""
    corpus, share = options.output, options.task_range
    assert share is not None
    with file_lock(corpus / LOCK, what="this corpus", shared=True):
        if (corpus / MANIFEST).is_file():
            return say_finished(corpus, make_plan(options, found, tokenizer))
        plan = shared_plan(options, found, tokenizer, lambda: make_plan(options, found, tokenizer))
        if not_hashed(plan, corpus):
            settings = task_settings(options, plan, tokenizer)
            hash_texts(plan, settings, options.executor, options.num_workers, shared=True)
        left = not_hashed(plan, corpus)
        if not left:
            tell_copies(plan, corpus)
    tasks, done = len(share.tasks(plan.num_tasks)), plan.num_tasks - len(left)
    print(
        f"share {share} of {corpus} is hashed: {counted(tasks, 'task')}; "
        f"{done:,} of all {counted(plan.num_tasks, 'task')} are"
    )
    if not left:
        print("every share is hashed and the copies are known: run all shares again, without --hash_only")
    return 0


def require_copies(plan: Plan, options: BuildOptions) -> None:
    """See that the copies are told before a share is tokenized; `CorpusError` where shares are to be hashed first."""
    if (options.output / COPIES).is_dir():
        return
    left = not_hashed(plan, options.output)
    if left:
        raise hashes_missing(plan, left, options)
    tell_copies(plan, options.output)  # a process that was killed had not


def hashes_missing(plan: Plan, left: Collection[int], options: BuildOptions) -> CorpusError:
    """Return the error that names the shares which lack their first reading."""
    shares = shares_in_words(left, plan, options)
    return CorpusError(
        "--dedup does not know the copies yet: not every share is hashed",
        where=options.output,
        got=f"{plan.num_tasks - len(left):,} of {counted(plan.num_tasks, 'task')}; tasks {stretches(left)} are missing",
        fix="Run the same flame-preprocess build command again, without --seal"
        if shares is None
        else f"Run --hash_only with --task_range {shares}; when these are done, all shares without --hash_only",
    )
