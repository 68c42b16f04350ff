"""What the ranks of a step send to one another, foretold from the shapes of a model's weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shapes = Sequence[tuple[int, ...]]
"""Of the weights that are gathered together: those of a block, or of all that is in no block."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """All collectives of a kind in a step: how many, over how many ranks, and the bytes of the whole tensors."""

    count: int
    ranks: int
    size_bytes: int
    passes: int = 1
    """How often a byte goes around: once to gather or to scatter sums, twice to do both."""

    @property
    def sent_bytes(self) -> float:
        """What a rank sends (and receives) in rings: all but its own part of a tensor, in each pass."""
        return self.passes * self.size_bytes * (self.ranks - 1) / self.ranks


def step_traffic(
    blocks: Sequence[Shapes],
    rest: Shapes,
    *,
    replicas: int,
    shards: int,
    micro_batches: int = 1,
    param_bytes: int = 2,
    reduce_bytes: int = 4,
) -> dict[str, Collective]:
    """Return the collectives of a step by kind, under `fsdp_reshard_after_forward` "default".

    A block's weights are gathered for forward and for backward, in each micro-batch; those of the last block, and what
    is in no block, once a step. Gradients are summed once a step: scattered over the shards, then over the replicas.
    """
    groups = [*blocks, rest]
    sizes = [_padded(shapes, shards) for shapes in groups]
    again = 2 * micro_batches
    gathered = sum(again * size for size in sizes[:-2]) + sum(sizes[-2:])
    found: dict[str, Collective] = {}
    if shards > 1:
        count = again * len(sizes[:-2]) + len(sizes[-2:])
        found["all_gather"] = Collective(count=count, ranks=shards, size_bytes=gathered * param_bytes)
        found["reduce_scatter"] = Collective(count=len(groups), ranks=shards, size_bytes=sum(sizes) * reduce_bytes)
    if replicas > 1:
        size = sum(sizes) // shards * reduce_bytes
        found["all_reduce"] = Collective(count=len(groups), ranks=replicas, size_bytes=size, passes=2)
    return found


def exposed_bytes(rest: Shapes, *, replicas: int, shards: int, param_bytes: int = 2, reduce_bytes: int = 4) -> float:
    """Return what a rank sends while it has nothing to compute: at a step's start and end, for what is in no block.

    The first block's weights are gathered beside the embeddings; all other blocks' beside a block's forward or
    backward.
    """
    alone = step_traffic([], rest, replicas=replicas, shards=shards, param_bytes=param_bytes, reduce_bytes=reduce_bytes)
    return sum(collective.sent_bytes for collective in alone.values())


def _padded(shapes: Shapes, shards: int) -> int:
    """Return the numbers in tensors whose rows are filled up to as many for each shard."""
    return sum(math.ceil(shape[0] / shards) * shards * math.prod(shape[1:]) for shape in shapes)
