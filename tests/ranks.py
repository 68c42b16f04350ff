"""Ranks as processes of a test: forked from one that has imported what takes long, once."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

from flame.train.distributed import join_world

_IMPORTED_ONCE = ["tests.tiny_states", "tests.unit.test_model"]


def fork_ranks(size: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work(rank, *arguments)` in `size` fresh processes; any failure there fails the test here."""
    multiprocessing.set_forkserver_preload(_IMPORTED_ONCE)
    mp.start_processes(work, args=arguments, nprocs=size, start_method="forkserver")


def on_ranks(size: int, work: Callable[..., None], *arguments: Any) -> None:
    """The same with `work(world, *arguments)`, where all ranks share one copy of the weights."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork_ranks(size, _rank, size, port, work, arguments)


def _rank(rank: int, size: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with join_world(replicate=1, shard=None, init_timeout_seconds=120, shutdown_timeout_seconds=120) as world:
        work(world, *arguments)
