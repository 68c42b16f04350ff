"""Memory snapshots of a run: what holds memory after the last step of every period, and where a GPU ran out of it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

_MAX_EVENTS = 100_000  # allocations and frees that are remembered, with their stacks


@dataclass(frozen=True, kw_only=True)
class SnapshotKind:
    """How a kind of device tells of its memory: `begin` and `end` frame what is watched, `dump` writes a file."""

    suffix: str
    begin: Callable[[], object]
    end: Callable[[], object]
    dump: Callable[[Path], object]


@contextlib.contextmanager
def memory_snapshots(
    kind: SnapshotKind,
    folder: Path,
    period: int,
    *,
    rank: int,
    step: int,
    write: Callable[[str, Path, Callable[[Path], object]], object],
) -> Iterator[Callable[[], None]]:
    """Yield what is to be called after each step; `step` is the last that was done before.

    Has `write` make folder/iteration_N/rankR_memory_snapshot.*, and iteration_N_exit where memory runs out in step N.
    """
    done = step

    def dump(name: str) -> None:
        write("the memory snapshot", folder / name / f"rank{rank}_memory_snapshot.{kind.suffix}", kind.dump)

    def step_done() -> None:
        nonlocal done
        done += 1
        if (done - step) % period == 0:
            dump(f"iteration_{done}")

    kind.begin()
    try:
        yield step_done
    except torch.OutOfMemoryError:
        dump(f"iteration_{done + 1}_exit")
        raise
    finally:
        kind.end()


def _watch_cuda() -> None:
    torch.cuda.memory._record_memory_history(max_entries=_MAX_EVENTS)


def _forget_cuda() -> None:
    torch.cuda.memory._record_memory_history(enabled=None)


def _dump_cuda(path: Path) -> None:
    torch.cuda.memory._dump_snapshot(str(path))


def _dump_cpu(path: Path) -> None:
    """Write which tensors Python holds, by shape, and what the process takes: the CPU's allocator keeps no record."""
    storages: dict[int, tuple[int, str, tuple[int, ...]]] = {}
    for found in gc.get_objects():
        if issubclass(type(found), Tensor) and found.device.type == "cpu" and found.layout is torch.strided:
            own = found.to_local() if isinstance(found, DTensor) else found
            if isinstance(own, FakeTensor):  # what a compiler traces with has no memory
                continue
            storage = own.untyped_storage()
            if storage.nbytes():  # FSDP frees by giving storages no bytes
                kind = str(own.dtype).removeprefix("torch.")
                storages[storage.data_ptr()] = (storage.nbytes(), kind, tuple(own.shape))
    groups = Counter(storages.values())
    tensors = [
        {"bytes": size * count, "count": count, "dtype": dtype, "shape": list(shape)}
        for (size, dtype, shape), count in sorted(groups.items(), key=lambda pair: -pair[0][0] * pair[1])
    ]
    resident = _resident_bytes()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
    told = {
        "resident_bytes": resident,
        "max_resident_bytes": max(most, resident or 0),  # the system counts the most only now and then
        "tensor_bytes": sum(size * count for (size, _, _), count in groups.items()),
        "tensors": tensors,
    }
    path.write_text(json.dumps(told, indent=1) + "\n")


_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def _resident_bytes() -> int | None:
    """Return what the process holds in memory now; None where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _nothing() -> None:
    pass


SNAPSHOTS = {
    "cuda": SnapshotKind(suffix="pickle", begin=_watch_cuda, end=_forget_cuda, dump=_dump_cuda),
    "cpu": SnapshotKind(suffix="json", begin=_nothing, end=_nothing, dump=_dump_cpu),
}
