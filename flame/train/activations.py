"""Keeping fewer activations from forward to backward: computed again (`checkpoint_blocks`), or kept in host memory.

Neither changes a result: what is computed again is computed by the same operations on the same numbers.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from flame.kernels.linear_attention import OPERATORS
from flame.train.log import log

OP = "op"
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
# Products that are cheap to keep beside what they cost, and attention, which costs most to compute again.
_KEPT_NAMES = (
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
    "flame::torch_varlen",
    "flame::fa4",
    *OPERATORS,
)


def checkpoint_blocks(model: nn.Module, blocks: list[nn.Module], *, mode: str, option: str) -> None:
    """Wrap the blocks of `model` whose activations are computed again in backward.

    `mode` is "none", "full" (every block) or "selective": every n-th block, or with the option "op" every block, but
    for attention and every second matrix product, whose results are kept. A block keeps its names in checkpoints.
    """
    if mode == "none":
        return
    every = 1 if mode == "full" else None if option == OP else int(option)
    contexts: dict[str, Any] = {"context_fn": _keep_costly} if every is None else {}
    chosen = {id(block) for index, block in enumerate(blocks) if every is None or index % every == 0}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in chosen:
                parent.register_module(name, checkpoint_wrapper(child, **contexts))
    log.info("activations of %d of %d blocks are computed again in backward", len(chosen), len(blocks))


def _keep_costly() -> Any:
    """Return the two contexts (of forward, of its repetition) that keep what `_choose` says."""
    counts: dict[bool, int] = defaultdict(int)
    return create_selective_checkpoint_contexts(partial(_choose, counts))


def _choose(counts: dict[bool, int], context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in _PRODUCTS:
        counts[context.is_recompute] += 1
        keep = counts[context.is_recompute] % 2 == 1
    else:
        keep = getattr(operation, "_schema", None) is not None and operation._schema.name in _KEPT_NAMES
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def offloading(mode: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return the context that forward runs in: with "full", what backward needs waits in host memory, pinned."""
    if mode == "none":
        return contextlib.nullcontext
    return partial(torch.autograd.graph.save_on_cpu, pin_memory=device.type == "cuda")
