"""Where tasks run. An executor is an entry in `EXECUTORS`; all of them give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from flame.preprocess.local import LocalExecutor
from flame.preprocess.plan import Task
from flame.preprocess.ray_cluster import RayExecutor
from flame.preprocess.reports import Progress
from flame.preprocess.workers import Loaded, Request, Settings


class Executor(Protocol):
    """A context that runs tasks; on leaving, whatever happened, nothing of it runs any more.

    `num_workers` tasks run at a time. With `shared`, other builders run other tasks of the same corpus meanwhile.
    """

    num_workers: int

    def __enter__(self) -> Executor: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def wait_until_loaded(self) -> Loaded: ...

    def run(
        self,
        tasks: Sequence[Task],
        settings: Settings,
        *,
        lock: Path,
        report: Callable[[Progress], None],
        shared: bool = False,
    ) -> None: ...


EXECUTORS: dict[str, Callable[[Request, int | None], Executor]] = {"local": LocalExecutor, "ray": RayExecutor}
