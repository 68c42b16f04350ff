"""In which number format a tensor leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from flame.errors import CheckpointError


def exported_dtype(kind: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return what a tensor of `kind` becomes: floating point numbers `dtype` (None: no change), all else what it is."""
    return dtype if dtype is not None and kind.is_floating_point else kind


def exported(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a checkpoint's tensor as it is exported; `CheckpointError` where a finite number would become infinite."""
    result = tensor.to(exported_dtype(tensor.dtype, dtype)).contiguous()
    if result.dtype != tensor.dtype and bool((result.isinf() & tensor.isfinite()).any()):
        raise CheckpointError(
            f"{name} holds numbers too large for {str(dtype).removeprefix('torch.')}",
            got=f"up to {tensor.abs().max().item():g}",
            fix="Export with --dtype bfloat16 or float32",
        )
    return result


def main_dtype(tensors: Iterable[tuple[torch.Size, torch.dtype]]) -> torch.dtype:
    """Return the floating point format that most numbers of some tensors are in: what config.json calls the dtype."""
    numbers: Counter[torch.dtype] = Counter()
    for size, kind in tensors:
        if kind.is_floating_point:
            numbers[kind] += size.numel()
    return numbers.most_common(1)[0][0] if numbers else torch.float32
