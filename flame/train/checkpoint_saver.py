"""Saving a run's checkpoints one at a time: while training waits, or beside it.

Beside it: the tensors are copied to host memory ("staged"), and a thread writes the copy with collectives of its own,
while training goes on. A checkpoint is published in the same way, and just as whole, either way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from flame.train.checkpoint import TrainState, write_checkpoint
from flame.train.checkpoint_files import step_folder
from flame.train.distributed import World, raise_together
from flame.train.log import log

DISABLED, ASYNC, PINNED = "disabled", "async", "async_with_pinned_mem"
_PATIENCE_AFTER_FAILURE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class _Save:
    """A save that a thread works on: `outcome` is what it raised, or None."""

    state: TrainState
    path: Path
    thread: threading.Thread
    outcome: Future[None]
    began: float
    stalled_seconds: float


class CheckpointSaver:
    """Saves to `folder`; every rank makes one and calls its methods alike.

    `mode` is a value of checkpoint.async_mode. `tensors_of(state)` are what to save; `of_every_checkpoint` are the
    other arguments of `write_checkpoint`. `published(state, path)` is called in the training thread once a checkpoint
    is whole; `latest` is the last one that is. Raises as `write_checkpoint` does, a save beside training at the next
    call.
    """

    def __init__(
        self,
        folder: Path,
        *,
        world: World,
        mode: str,
        tensors_of: Callable[[TrainState], Mapping[str, Tensor]],
        published: Callable[[TrainState, Path], None],
        latest: Path | None,
        shutdown_timeout_seconds: float,
        **of_every_checkpoint: Any,
    ) -> None:
        self.latest = latest
        self._folder, self._world = folder, world
        self._tensors_of, self._published = tensors_of, published
        self._of_every_checkpoint = of_every_checkpoint
        self._running: _Save | None = None
        self._staged: Future[Any] | None = None
        self._stager: DefaultStager | None = None
        if mode != DISABLED:
            on_gpu = world.device.type == "cuda"
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=on_gpu and mode == PINNED,
                    use_shared_memory=False,
                    use_async_staging=on_gpu and mode == PINNED,
                    use_non_blocking_copy=on_gpu and mode == PINNED,
                )
            )
            # Of its own: the training thread's collectives must not meet those of the thread that writes.
            timeout = timedelta(seconds=shutdown_timeout_seconds)
            self._beside = replace(world, patient_group=dist.new_group(backend="gloo", timeout=timeout))

    def save(self, state: TrainState, *, wait: bool = False) -> None:
        """Begin the checkpoint of `state`, and with `wait`, or where nothing is saved beside training, finish it.

        Waits for the one before it.
        """
        self.wait()
        began = time.monotonic()
        tensors = self._tensors_of(state)
        if self._stager is None or wait:
            path = write_checkpoint(
                self._folder, tensors=tensors, state=state, world=self._world, **self._of_every_checkpoint
            )
            log.info("saved %s in %.1f s", path, time.monotonic() - began)
            self._publish(state, path)
            return
        if self._world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the copies are made on another stream
        staged = self._stager.stage(dict(tensors))
        self._staged = staged if isinstance(staged, Future) else None
        self._start(state, staged, began)

    def _start(self, state: TrainState, staged: Future[Any] | Mapping[str, Tensor], began: float) -> None:
        outcome: Future[None] = Future()
        path = step_folder(self._folder, state.step)

        def work() -> None:
            try:
                tensors = staged.result() if isinstance(staged, Future) else staged
                write_checkpoint(
                    self._folder, tensors=tensors, state=state, world=self._beside, **self._of_every_checkpoint
                )
                outcome.set_result(None)
            except BaseException as error:
                outcome.set_exception(error)

        thread = threading.Thread(target=work, name="flame-save", daemon=True)
        stalled = time.monotonic() - began
        self._running = _Save(
            state=state, path=path, thread=thread, outcome=outcome, began=began, stalled_seconds=stalled
        )
        thread.start()

    def before_update(self) -> None:
        """Wait until what is being saved is copied: the next update would change it."""
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def poll(self) -> None:
        """Publish what has been finished since the last call, without waiting."""
        running = self._running
        if running is not None and running.outcome.done() and running.outcome.exception() is None:
            self._finish(running)

    def wait(self) -> None:
        """Wait for a save beside training, and raise on every rank what it raised on any."""
        running = self._running
        if running is None:
            return
        running.thread.join()
        error = running.outcome.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        raise_together(error, self._world, "saving a checkpoint beside training")
        self._finish(running)

    def _finish(self, running: _Save) -> None:
        self._running = None
        log.info(
            "saved %s in %.1f s, of which training stood still for %.2f s",
            *(running.path, time.monotonic() - running.began, running.stalled_seconds),
        )
        self._publish(running.state, running.path)

    def _publish(self, state: TrainState, path: Path) -> None:
        self.latest = path
        self._published(state, path)

    def close(self) -> None:
        """Let go of what is held, also after a failure: then a running save gets a little time to end."""
        if self._running is not None:
            self._running.thread.join(_PATIENCE_AFTER_FAILURE_SECONDS)
        if self._stager is not None and self._running is None:
            self._stager.close()
