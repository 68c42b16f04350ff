"""Products of one input with several matrices as one, where a compiler puts their gradients side by side anyway.

A gate and an up projection, or queries and keys before their rotation, are followed by formulas of single numbers. In
a compiled block these write their gradients into one wide tensor, so that the gradient of the input is one product:
apart, each would write a gradient of the input for the next kernel to read and add up.
"""

from __future__ import annotations

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
    weights = [projection.weight for projection in projections]
    return list(F.linear(x, torch.cat(weights)).split([len(weight) for weight in weights], dim=-1))
