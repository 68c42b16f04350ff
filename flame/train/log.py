"""What the trainer says while it runs: one logger, `flame`, to stderr; rank 0 speaks, the others only when worried."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("flame")


def configure_logging(rank: int, world_size: int) -> None:
    """Send `flame`'s records to stderr: everything from rank 0, warnings and worse from the others, named by rank."""
    prefix = "" if world_size == 1 or rank == 0 else f"rank {rank}: "
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    log.propagate = False
