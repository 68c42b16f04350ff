"""TensorBoard's event file, written at once.

torch's SummaryWriter leaves that to a thread of its own, which dies with a traceback on the terminal where the disk is
full. A logger has a thread already (`loggers.py`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

_VERSION = "brain.Event:2"


class EventFile:
    """A new event file in `folder`; TensorBoard drops what earlier files tell of `first_step` and later ones."""

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(folder / name, "xb")  # noqa: SIM115
        self._records = RecordWriter(self._file)
        try:
            self._add(Event(file_version=_VERSION))
            self._add(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))
        except BaseException:
            self.close()
            raise

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a step's numbers, by their names; a process that is killed afterwards has told them."""
        pairs = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(Event(step=step, summary=Summary(value=pairs)))

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        """Close the file, whatever the disk says to what it has not taken."""
        self._file.close()
