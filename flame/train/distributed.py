"""The ranks of a run: process groups, the device mesh, and the few collectives that the loop speaks itself.

Always a process group and a mesh `(dp_replicate, dp_shard)`, also for one process, so that every run takes one path.
Collectives on CPU tensors go through gloo, also on GPUs: counting labels or agreeing to stop never waits for a kernel.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flame.errors import TrainingError, UsageError
from flame.words import counted

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class World:
    """Where this process stands.

    `mesh` has the dimensions `dp_replicate` and `dp_shard`; every rank reads its own rows, so `dp_size` is the world's
    size and `dp_rank` the rank. `patient_group` is a gloo group of all ranks whose timeout is
    `comm.shutdown_timeout_seconds`: what may rightly take minutes (publishing a checkpoint) waits there.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh
    patient_group: dist.ProcessGroup

    @property
    def dp_rank(self) -> int:
        return self.rank

    @property
    def dp_size(self) -> int:
        return self.size

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def environment_rank() -> tuple[int, int, int]:
    """Return (rank, world size, local rank) as torchrun or our launcher set them; (0, 1, 0) where nobody did."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    present = [name for name in names if name in os.environ]
    if not present:
        return 0, 1, 0
    if len(present) < len(names):
        raise UsageError(
            "the environment names only a part of a rank",
            got=", ".join(f"{name}={os.environ[name]}" for name in present),
            expected="RANK, WORLD_SIZE and LOCAL_RANK together, or none of them",
            fix="Start with torchrun, or with NGPU=<n> flame-train",
        )
    rank, size, local_rank = (int(os.environ[name]) for name in names)
    return rank, size, local_rank


def mesh_shape(world_size: int, replicate: int, shard: int | None) -> tuple[int, int]:
    """Return (dp_replicate, dp_shard); a `shard` of None takes the ranks that are left over."""
    if shard is None:
        shard, left = divmod(world_size, replicate)
        if left:
            raise UsageError(
                "the ranks cannot be divided among the replicas",
                got=f"{counted(world_size, 'rank')}, training.data_parallel_replicate_degree {replicate}",
                expected="a replicate degree that divides the number of ranks",
            )
    if replicate * shard != world_size:
        raise UsageError(
            "the data-parallel degrees do not multiply to the number of ranks",
            got=f"data_parallel_replicate_degree {replicate} × data_parallel_shard_degree {shard}, "
            f"{counted(world_size, 'rank')}",
            expected=f"a product of {world_size}",
            fix="Leave training.data_parallel_shard_degree at -1 to take the ranks that are left over",
        )
    return replicate, shard


@contextlib.contextmanager
def join_world(
    *, replicate: int, shard: int | None, init_timeout_seconds: float, shutdown_timeout_seconds: float
) -> Iterator[World]:
    """Join the process group for the length of the block, and leave it at its end."""
    rank, size, local_rank = environment_rank()
    shape = mesh_shape(size, replicate, shard)
    device = _own_device(local_rank)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=init_timeout_seconds)
    if size == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout)
    try:
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=shutdown_timeout_seconds))
        yield World(rank=rank, size=size, local_rank=local_rank, device=device, mesh=mesh, patient_group=patient)
    finally:
        dist.destroy_process_group()


def _own_device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            "there are more processes on this host than GPUs",
            got=f"local rank {local_rank}",
            expected=f"local ranks below {torch.cuda.device_count()}",
            fix="Lower --nproc-per-node (or NGPU)",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def set_collective_timeout(world: World, seconds: float) -> None:
    """Give every collective outside the patient group this timeout from now on."""
    groups = [dist.group.WORLD, *world.mesh.get_all_groups()]
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def sum_across_ranks(values: Sequence[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """Return the element-wise sums of small lists of integers over all ranks: one gloo all-reduce."""
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor, group=group)
    return [int(value) for value in tensor]


def broadcast_from_main(value: Any, world: World) -> Any:
    """Return rank 0's `value` on every rank (pickled; small)."""
    box = [value if world.is_main else None]
    dist.broadcast_object_list(box, src=0, group=world.patient_group)
    return box[0]


def raise_together(error: Exception | None, world: World, what: str) -> None:
    """Raise on every rank if any rank failed, so that none waits for one that has gone.

    The rank that failed raises its own error; the others raise a `TrainingError` that names the first such rank.
    """
    told = None if error is None else str(error)
    reasons: list[str | None] = [None] * world.size
    dist.all_gather_object(reasons, told, group=world.patient_group)
    if error is not None:
        raise error
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise TrainingError(f"{what} failed on rank {rank}: {reason}")


def on_main(what: str, act: Callable[[], T], world: World) -> T:
    """Return on every rank what `act` returns on rank 0 (pickled; small); where it raises, every rank does.

    `what` is being done, for the message of the other ranks.
    """
    result: T | None = None
    error: Exception | None = None
    if world.is_main:
        try:
            result = act()
        except Exception as caught:
            error = caught
    raise_together(error, world, what)
    return cast(T, broadcast_from_main(result, world))
