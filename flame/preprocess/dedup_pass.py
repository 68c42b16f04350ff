"""The first of the two readings of `--dedup exact`: every task's texts are hashed, then the copies are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flame.files import file_lock, named_disk_errors, remove_tree
from flame.preprocess.claims import claimed
from flame.preprocess.dedup import RunWriter, is_done, merge, read_done, records_of
from flame.preprocess.executors import EXECUTORS
from flame.preprocess.folder import COPIES, COPIES_LOCK, HASHES, WORKERS_LOCK
from flame.preprocess.plan import Task
from flame.preprocess.plan_file import Plan
from flame.preprocess.progress import BuildProgress, log
from flame.preprocess.rejects import Rejects
from flame.preprocess.reports import Progress
from flame.preprocess.task import read_documents
from flame.preprocess.task_settings import TaskSettings
from flame.preprocess.workers import Loaded
from flame.words import counted


@dataclass(frozen=True, kw_only=True)
class HashRequest:
    """Loads nothing but the modules: hashing needs no tokenizer."""

    def load(self) -> tuple[None, Loaded]:
        import flame.preprocess.dedup_pass  # noqa: F401 (what workers need, before they are forked)

        return None, Loaded()


@dataclass(frozen=True, kw_only=True)
class HashSettings:
    """What every task of the first reading is told; `files` numbers the inputs in their order.

    `claims`: processes of several machines run tasks, and one that was given up may still run.
    """

    build: TaskSettings
    files: Mapping[str, int]
    claims: bool = False

    def run(
        self,
        task: Task,
        tool: None,
        report: Callable[[Progress], None],
        *,
        careful: bool = False,
        wait: bool = True,
    ) -> bool:
        """Hash the texts of a task; False, and nothing done, if another process has claimed it."""
        if not self.claims:
            self._hash(task, report)
            return True
        with claimed(self.build.corpus, task.index, wait=wait) as ours:
            if ours and not self._is_done(task):
                self._hash(task, report)
        return ours

    def _is_done(self, task: Task) -> bool:
        corpus = self.build.corpus
        done = is_done(corpus / HASHES, task.index, self.build.plan_digest)
        return done or (corpus / COPIES).is_dir()  # looked for last: the hashes go after it came

    def _hash(self, task: Task, report: Callable[[Progress], None]) -> None:
        """Write the records of a task's texts, refusing what is refused when it is tokenized: there it is counted."""
        settings = self.build
        writer = RunWriter(settings.corpus / HASHES, task.index, settings.plan_digest)
        place = 0
        try:
            with named_disk_errors(settings.corpus):
                for documents in read_documents(task, settings, Rejects(on_error=settings.on_error)):
                    report(Progress(input_bytes=documents.progress_bytes))
                    writer.add(records_of(documents, file=self.files[documents.path], first_place=place))
                    place += len(documents)
                writer.finish()
        except BaseException:
            writer.abort()
            raise


def find_copies(plan: Plan, settings: TaskSettings, executor: str, num_workers: int | None) -> None:
    """Write which documents of each task are copies, unless an earlier process has; the hashes are then deleted."""
    if not (settings.corpus / COPIES).is_dir():
        hash_texts(plan, settings, executor, num_workers)
    tell_copies(plan, settings.corpus)


def hash_texts(
    plan: Plan, settings: TaskSettings, executor: str, num_workers: int | None, *, shared: bool = False
) -> None:
    """Do the first reading of the plan's tasks that had none; `shared`: other processes hash texts as well."""
    done = read_done(settings.corpus / HASHES, plan.digest)
    left = [task for task in plan.tasks if task.index not in done]
    total, left_bytes = (sum(task.num_bytes for task in tasks) for tasks in (plan.tasks, left))
    before = len(plan.tasks) - len(left)
    log(
        f"looking for copies: {counted(len(plan.tasks), 'task')} to read"
        + (f", {before} of them done before" if before else "")
    )
    if not left:
        return
    files = {entry["path"]: number for number, entry in enumerate(plan.inputs)}
    with (
        EXECUTORS[executor](HashRequest(), num_workers) as running,
        BuildProgress(total, total - left_bytes) as progress,
    ):
        running.wait_until_loaded()
        running.run(
            left,
            HashSettings(build=settings, files=files, claims=shared or executor != "local"),
            lock=settings.corpus / WORKERS_LOCK,
            report=progress.add,
            shared=shared,
        )


def not_hashed(plan: Plan, corpus: Path) -> list[int]:
    """Return which of all tasks lack their first reading; none once the copies are told, and the hashes gone."""
    done = read_done(corpus / HASHES, plan.digest)
    if (corpus / COPIES).is_dir():  # looked for last: the hashes go after it came
        return []
    return [task for task in range(plan.num_tasks) if task not in done]


def tell_copies(plan: Plan, corpus: Path) -> None:
    """Write which documents of each task are copies; of several processes one does, and the others wait for it."""
    with file_lock(corpus / COPIES_LOCK, what="the copies of this corpus", wait=True):
        if not (corpus / COPIES).is_dir():
            with named_disk_errors(corpus):
                number = merge(corpus / HASHES, range(plan.num_tasks), corpus / COPIES)
            log(f"copies of earlier ones: {counted(number, 'document')}")
        remove_tree(corpus / HASHES)
