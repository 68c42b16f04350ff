"""Saving a run's checkpoints one at a time: while training waits, or beside it.

Beside it: the tensors are copied to host memory, and a thread writes the copies with collectives of its own, while
training goes on. A checkpoint is published in the same way, and just as whole, either way.
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
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flame.train.checkpoint import tensors_to_save, write_checkpoint
from flame.train.checkpoint_files import step_folder
from flame.train.distributed import World, raise_together
from flame.train.interval import SaveTimes
from flame.train.log import log
from flame.train.train_state import TrainState

DISABLED, PINNED = "disabled", "async_with_pinned_mem"
_PATIENCE_AFTER_FAILURE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class _Save:
    """A save that a thread works on: `outcome` is what it raised, or None."""

    state: TrainState
    thread: threading.Thread
    outcome: Future[None]
    began: float
    stalled_seconds: float


class HostCopies:
    """Copies of tensors in host memory, one a key, made anew into the same memory at each call of `copy`.

    With `pinned` they are made on a stream of their own: `copy` returns at once, `wait_on_device` has the device wait
    for them before what it is given next, and `wait` has the caller wait.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._stream = torch.cuda.Stream() if pinned else None
        self._done: torch.cuda.Event | None = None

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the copies; of a DTensor its own part, as the same part of a DTensor."""
        if self._stream is None:
            return {key: self._copied(key, tensor) for key, tensor in tensors.items()}
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = {key: self._copied(key, tensor) for key, tensor in tensors.items()}
            self._done = self._stream.record_event()
        return copies

    def _copied(self, key: str, tensor: Tensor) -> Tensor:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != own.shape or buffer.dtype != own.dtype:
            buffer = torch.empty(own.shape, dtype=own.dtype, pin_memory=self._stream is not None)
            self._buffers[key] = buffer
        buffer.copy_(own, non_blocking=self._stream is not None)
        return DTensor(buffer, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else buffer

    def wait_on_device(self) -> None:
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()


class CheckpointSaver:
    """Saves to `folder`; every rank makes one and calls its methods alike.

    `mode` is a value of checkpoint.async_mode; `of_every_checkpoint` are the other arguments of `write_checkpoint`.
    `published(state, path)` is called in the training thread once a checkpoint is whole; `latest` is the last one that
    is. Raises as `write_checkpoint` does, a save beside training at the next call.
    """

    def __init__(
        self,
        folder: Path,
        *,
        world: World,
        mode: str,
        model: nn.Module,
        optimizer: Optimizer,
        published: Callable[[TrainState, Path], None],
        latest: Path | None,
        shutdown_timeout_seconds: float,
        **of_every_checkpoint: Any,
    ) -> None:
        self.latest = latest
        self._folder, self._world = folder, world
        self._model, self._optimizer, self._published = model, optimizer, published
        self._last_began = time.monotonic()
        self._of_every_checkpoint = of_every_checkpoint
        self._running: _Save | None = None
        self._times = SaveTimes()
        self._copies: HostCopies | None = None
        if mode != DISABLED:
            self._copies = HostCopies(pinned=mode == PINNED and world.device.type == "cuda")
            # Of its own: the training thread's collectives must not meet those of the thread that writes.
            timeout = timedelta(seconds=shutdown_timeout_seconds)
            self._beside = replace(world, patient_group=dist.new_group(backend="gloo", timeout=timeout))

    @property
    def seconds_since_save(self) -> float:
        """How long ago the last save began, or this process."""
        return time.monotonic() - self._last_began

    def save(self, state: TrainState, *, wait: bool = False, weights_only: bool = False) -> None:
        """Begin the checkpoint of `state`, and with `wait`, or where nothing is saved beside training, finish it.

        Waits for the one before it. With `weights_only` no run can be resumed from it.
        """
        began = time.monotonic()
        self._save(state, wait=wait, weights_only=weights_only)
        stalled = self._times.stalled_seconds + time.monotonic() - began
        self._times = replace(self._times, stalled_seconds=stalled)

    def take_times(self) -> SaveTimes:
        """Return what saving took since the last call."""
        times, self._times = self._times, SaveTimes()
        return times

    def _save(self, state: TrainState, *, wait: bool, weights_only: bool) -> None:
        self.wait()
        began = self._last_began = time.monotonic()
        tensors = tensors_to_save(self._model, None if weights_only else self._optimizer, state)
        rest = {**self._of_every_checkpoint, "has_optimizer": not weights_only}
        if self._copies is None or wait:
            path = write_checkpoint(self._folder, tensors=tensors, state=state, world=self._world, **rest)
            seconds = time.monotonic() - began
            log.info("saved %s in %.1f s", path, seconds)
            self._publish(state, path, seconds)
            return
        copies = self._copies
        copied = copies.copy(tensors)
        outcome: Future[None] = Future()

        def work() -> None:
            try:
                copies.wait()
                write_checkpoint(self._folder, tensors=copied, state=state, world=self._beside, **rest)
                outcome.set_result(None)
            except BaseException as error:
                outcome.set_exception(error)

        thread = threading.Thread(target=work, name="flame-save", daemon=True)
        self._running = _Save(
            state=state,
            thread=thread,
            outcome=outcome,
            began=began,
            stalled_seconds=time.monotonic() - began,
        )
        thread.start()

    def before_update(self) -> None:
        """Have the next update wait for the copies of what it changes."""
        if self._copies is not None:
            self._copies.wait_on_device()

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
        path = step_folder(self._folder, running.state.step)
        seconds = time.monotonic() - running.began
        log.info("saved %s in %.1f s, of which training stood still for %.2f s", path, seconds, running.stalled_seconds)
        self._publish(running.state, path, seconds)

    def _publish(self, state: TrainState, path: Path, seconds: float) -> None:
        self.latest = path
        self._times = replace(self._times, save_seconds=seconds)
        self._published(state, path)

    def close(self) -> None:
        """Let go of what is held, also after a failure: then a running save gets a little time to end."""
        if self._running is not None:
            self._running.thread.join(_PATIENCE_AFTER_FAILURE_SECONDS)
