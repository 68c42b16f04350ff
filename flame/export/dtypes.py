"""In which number format a tensor leaves."""

from __future__ import annotations

import torch
from torch import Tensor

from flame.errors import CheckpointError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def exported_dtype(kind: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """Return what a tensor of `kind` becomes: floating point numbers `dtype`, all else what it is."""
    return dtype if kind.is_floating_point else kind


def exported(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a checkpoint's tensor as it is exported; `CheckpointError` where a finite number would become infinite."""
    result = tensor.to(exported_dtype(tensor.dtype, dtype)).contiguous()
    if result.dtype != tensor.dtype and bool((result.isinf() & tensor.isfinite()).any()):
        raise CheckpointError(
            f"{name} holds numbers too large for {str(dtype).removeprefix('torch.')}",
            got=f"up to {tensor.abs().max().item():g}",
            fix="Export with --dtype bfloat16 or float32",
        )
    return result
