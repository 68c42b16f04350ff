"""Chunks of tokens, by which fla's kernels and those after their form divide packed documents."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def most_chunks(num_tokens: int, chunk: int, offsets: Tensor | None) -> int:
    """Return how many chunks a row makes at the most: each document may end within one."""
    if offsets is None:
        return (num_tokens + chunk - 1) // chunk
    return num_tokens // chunk + offsets.shape[0] - 1


def packed_arguments(cu_seqlens: Tensor | None, chunk_size: int) -> dict[str, Any]:
    """Return what all of fla's chunk functions take to keep documents apart; imports fla."""
    from fla.ops.utils.index import prepare_chunk_indices

    indices = None if cu_seqlens is None else prepare_chunk_indices(cu_seqlens, chunk_size)
    return {"cu_seqlens": cu_seqlens, "chunk_size": chunk_size, "chunk_indices": indices}
