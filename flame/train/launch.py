"""Launch the ranks of one host: `NGPU=8 flame-train …`.

Why not torchrun: it kills its ranks 30 seconds after SIGTERM, which is shorter than a large save, and it exits 1
whatever the ranks' exit codes. Here each rank is a process in a session of its own, signals are handed on, nothing is
cut short, and the exit code is the ranks' own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from flame.errors import TrainingError, UsageError
from flame.train.signals import EXIT_PREEMPTED, hold_stop_signals

FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
STOP_GRACE_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """How many ranks this host starts, and where they meet."""

    num_local_ranks: int
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int | None = None

    @property
    def world_size(self) -> int:
        return self.num_local_ranks * self.num_nodes

    def environment(self, local_rank: int, master_port: int) -> dict[str, str]:
        """Return the variables that one rank reads."""
        return {
            "RANK": str(self.node_rank * self.num_local_ranks + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.num_local_ranks),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(master_port),
        }


def plan_from_environment(environment: dict[str, str]) -> LaunchPlan | None:
    """Return the launch that NGPU, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT ask for; None for one process.

    None also inside a rank (RANK is set). Raises `UsageError` for values that are no counts, or several nodes without
    a meeting place.
    """
    if "RANK" in environment or ("NGPU" not in environment and "NNODES" not in environment):
        return None
    num_nodes = _count(environment, "NNODES", default=1, least=1)
    plan = LaunchPlan(
        num_local_ranks=_count(environment, "NGPU", default=1, least=1),
        num_nodes=num_nodes,
        node_rank=_count(environment, "NODE_RANK", default=0, least=0),
        master_addr=environment.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_count(environment, "MASTER_PORT", default=0, least=0) or None,
    )
    if plan.world_size == 1:
        return None
    if num_nodes > 1 and ("MASTER_ADDR" not in environment or plan.master_port is None):
        raise UsageError(
            "several nodes need a place to meet",
            got=f"NNODES={num_nodes} without MASTER_ADDR and MASTER_PORT",
            fix="Set MASTER_ADDR to the first node's address and MASTER_PORT to a free port, the same on every node",
        )
    if plan.node_rank >= num_nodes:
        raise UsageError(
            "NODE_RANK is not one of the nodes", got=f"NODE_RANK={plan.node_rank}", expected=f"below {num_nodes}"
        )
    return plan


def _count(environment: dict[str, str], name: str, *, default: int, least: int) -> int:
    text = environment.get(name, "").strip()
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise UsageError(f"{name} is no count", got=text, expected=f"a whole number of at least {least}")
    return int(text)


def launch(plan: LaunchPlan, argv: Sequence[str]) -> int:
    """Start this host's ranks with `argv`, hand signals on to them, and return the run's exit code.

    0: all ranks ended well. 75: all stopped on a signal after a complete save. 130: Ctrl-C. Otherwise the first failed
    rank's code (1 if a signal killed it); the other ranks are then asked to stop, and killed after a grace period.
    """
    port = plan.master_port or _free_port(plan.master_addr)
    ranks: list[subprocess.Popen[bytes]] = []
    interrupted = threading.Event()

    def hand_on(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            interrupted.set()
        _signal_all(ranks, signal.Signals(number))

    before = {number: signal.signal(number, hand_on) for number in FORWARDED_SIGNALS}
    try:
        for local_rank in range(plan.num_local_ranks):
            ranks.append(_start_rank(plan, local_rank, port, argv))
        codes = _wait_for_all(ranks)
    finally:
        _stop_all(ranks)
        for number, handler in before.items():
            signal.signal(number, handler)
    if interrupted.is_set():
        return 130
    return exit_code_of(codes)


def exit_code_of(codes: Sequence[int | None]) -> int:
    """Return the run's exit code from the ranks' (in order of rank; negative: killed by that signal)."""
    if all(code == 0 for code in codes):
        return 0
    if all(code == EXIT_PREEMPTED for code in codes):
        return EXIT_PREEMPTED
    return next((code for code in codes if code is not None and code > 0 and code != EXIT_PREEMPTED), 1)


def _start_rank(plan: LaunchPlan, local_rank: int, port: int, argv: Sequence[str]) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None, use_errno=True)
    launcher = os.getpid()

    def before_exec() -> None:
        # A launcher killed by SIGKILL forwards nothing: the kernel then ends its ranks.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        hold_stop_signals()  # a rank that only starts is not killed by one: it stops, with 75, once it can
        if os.getppid() != launcher:
            os._exit(1)

    # Ranks that each took all cores for torch's CPU threads would only wait for one another.
    threads = str(max(1, (os.cpu_count() or 1) // plan.num_local_ranks))
    return subprocess.Popen(
        [sys.executable, "-m", "flame.train", *argv],
        env={"OMP_NUM_THREADS": threads, **os.environ, **plan.environment(local_rank, port)},
        start_new_session=True,
        preexec_fn=before_exec,
    )


def _wait_for_all(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Wait until every rank has ended, or one has failed; then stop the rest. Returns codes in order of rank."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [(rank, code) for rank, code in enumerate(codes) if code not in (None, 0, EXIT_PREEMPTED)]
        if failed:
            _explain(failed[0])
            _stop_all(ranks)
            return codes
        if all(code is not None for code in codes):
            return codes
        time.sleep(0.1)


def _explain(failed: tuple[int, int | None]) -> None:
    rank, code = failed
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        error = TrainingError(
            f"local rank {rank} was killed by {name}"
            + ", as the system does when memory runs out" * (name == "SIGKILL"),
            fix="The other ranks are stopped; start the same command again to go on from the last complete checkpoint",
        )
        print(f"flame-train: {error}", file=sys.stderr)


def _stop_all(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask the ranks that still run to stop, and kill them after the grace period."""
    _signal_all(ranks, signal.SIGTERM)
    deadline = time.monotonic() + STOP_GRACE_SECONDS
    for rank in ranks:
        try:
            rank.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def _signal_all(ranks: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(number)


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
