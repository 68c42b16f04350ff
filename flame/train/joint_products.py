"""Products of one input with several matrices as one: where a compiler joins their gradients, or each is narrow.

A gate and an up projection, or queries and keys before their rotation, are followed by formulas of single numbers. In
a compiled block these write their gradients into one wide tensor, so that the gradient of the input is one product:
apart, each would write a gradient of the input for the next kernel to read and add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def joint_products(x: Tensor, *projections: Any) -> list[Tensor]:
    """Return each linear projection of `x` `[…, D]`, `[…, N]`; in a compiled graph all of them by one product.

    What of a result is kept for backward keeps all of them in memory. In eager mode, where joining gradients would be a
    copy, and with biases, they stay apart.
    """
    if not torch.compiler.is_compiling() or any(projection.bias is not None for projection in projections):
        return [projection(x) for projection in projections]
    return _as_one(x, projections, multiple=1)


def narrow_products(x: Tensor, *projections: Any) -> list[Tensor]:
    """Return linear projections of `x` to a few numbers each, without biases, by one product: each alone reads all.

    Rows of the matrices are filled up to a multiple of 8, which is what kernels for the matrix units of a GPU ask for.
    """
    return _as_one(x, projections, multiple=8)


def _as_one(x: Tensor, projections: Sequence[Any], *, multiple: int) -> list[Tensor]:
    weights = [projection.weight for projection in projections]
    widths = [len(weight) for weight in weights]
    missing = -sum(widths) % multiple
    if missing:
        weights.append(weights[0].new_zeros(missing, x.shape[-1]))
    y = F.linear(x, torch.cat(weights))
    return list(y[..., : sum(widths)].split(widths, dim=-1))
