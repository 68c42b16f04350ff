"""Ranks as processes of a test: forked from one that has imported what takes long, once."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from flame.train.__main__ import main
from flame.train.distributed import join_world
from tests import faults
from tests.runs import rank_environment

_IMPORTED_ONCE = ["flame.train.loop", "flame.export.hf", "tests.ranks", "tests.tiny_states", "tests.unit.test_model"]


def fork_ranks(size: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work(rank, *arguments)` in `size` fresh processes; any failure there fails the test here."""
    multiprocessing.set_forkserver_preload(_IMPORTED_ONCE)
    mp.start_processes(work, args=arguments, nprocs=size, start_method="forkserver")


def on_ranks(size: int, work: Callable[..., None], *arguments: Any) -> None:
    """The same with `work(world, *arguments)`, where all ranks share one copy of the weights."""
    fork_ranks(size, _rank, size, _free_port(), work, arguments)


def train_in_ranks(
    argv: Sequence[str], *, ranks: int, code: int = 0, variables: Mapping[str, str] | None = None
) -> None:
    """Train until each rank ends with `code`, as `tests.runs.run_training` does, without a launcher and its imports.

    `variables` may be those of faults.py.
    """
    with tempfile.TemporaryDirectory() as logs:
        try:
            environment = rank_environment(ranks, variables)
            fork_ranks(ranks, _train, ranks, _free_port(), list(argv), code, environment, Path(logs))
        except Exception as error:
            told = "\n".join(f"{log.name}:\n{log.read_text()[-4000:]}" for log in sorted(Path(logs).iterdir()))
            raise AssertionError(told) from error


def _train(
    rank: int, size: int, port: int, argv: list[str], code: int, environment: Mapping[str, str], logs: Path
) -> None:
    os.environ.clear()
    os.environ |= environment
    with open(logs / f"rank-{rank}.txt", "w") as log:
        os.dup2(log.fileno(), 2)
    _become(rank, size, port)
    if "FLAME_FAULTS" in environment:
        faults.install(environment["FLAME_FAULTS"])
    found = main(argv)
    assert found == code, f"rank {rank} ended with {found}"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _become(rank: int, size: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)


def _rank(rank: int, size: int, port: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    _become(rank, size, port)
    with join_world(replicate=1, shard=None, init_timeout_seconds=120, shutdown_timeout_seconds=120) as world:
        work(world, *arguments)
