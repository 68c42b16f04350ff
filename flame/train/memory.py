"""How much memory a rank's step takes, told without running it.

What is kept from step to step (weights, gradients, moments) is arithmetic. The rest is watched: the forward and
backward of one micro-batch run on fake tensors, which have shapes and no bytes, while every storage that
comes and goes is counted. So activation checkpointing, chunked logits and tied weights count as they are. Kernels that
need a device are watched by real tensors on one (`memory_estimation.disable_fake_mode`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flame.kernels.linear_cross_entropy import OPERATOR, scratch_bytes
from flame.train.activations import checkpoint_blocks
from flame.train.log import log
from flame.train.model import CausalLMLoss

_FP32_BYTES = 4
_NUMBERS_A_WIDTH = 17  # of a block's activations, for a token: 17 × hidden_size, where nothing could be watched


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """One micro-batch, what it is computed in, and which blocks compute their activations again."""

    micro_batch: int
    seq_len: int
    param_dtype: torch.dtype
    checkpoint_mode: str = "none"
    checkpoint_option: str = "2"
    real_tensors_on: torch.device | None = None
    """Where the micro-batch really runs; None watches fake tensors."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank, at the highest point of a step.

    `gathered` are weights in the compute dtype, `activations` all that forward keeps and backward makes, the chunk of
    logits included; `watched` is False where they are a rule of thumb.
    """

    weights: int
    gradients: int
    moments: int
    gathered: int
    activations: int
    watched: bool

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.moments + self.gathered + self.activations


def estimate_memory(
    module: CausalLMLoss, shape: StepShape, *, dp_shard: int, moments_per_weight: float, reshard_after_forward: str
) -> RankMemory:
    """Return what a step of `module`, which lies on the meta device, takes on one of `dp_shard` ranks.

    Changes the module: its blocks are wrapped and cast. Not counted: what libraries keep for themselves (a CUDA
    context, some 0.5 GiB), the allocator's fragments, buffers of NCCL.
    """
    parameters = list(module.parameters())
    numbers = sum(parameter.numel() for parameter in parameters)
    own_bytes = -(-numbers * _FP32_BYTES // dp_shard)
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in module.blocks()]
    freed = reshard_after_forward == "always" or (reshard_after_forward == "default" and dp_shard > 1)
    at_once = numbers - sum(blocks) + 2 * max(blocks, default=0) if freed else numbers
    activations, watched = _activations(module, shape)
    return RankMemory(
        weights=own_bytes,
        gradients=own_bytes,
        moments=int(own_bytes * moments_per_weight),
        gathered=at_once * shape.param_dtype.itemsize,
        activations=activations,
        watched=watched,
    )


def _activations(module: CausalLMLoss, shape: StepShape) -> tuple[int, bool]:
    try:
        return watched_activations(module, shape), True
    except Exception as error:  # kernels that need a device raise as they happen to
        how = "on fake tensors" if shape.real_tensors_on is None else f"on {shape.real_tensors_on}"
        log.info("activations are a rule of thumb, for this model cannot be watched %s: %r", how, error)
    numbers = _NUMBERS_A_WIDTH * module.model.config.hidden_size
    tokens = shape.micro_batch * shape.seq_len
    kept = 1 if shape.checkpoint_mode == "full" else len(module.blocks())
    return tokens * numbers * kept * shape.param_dtype.itemsize, False


def watched_activations(module: CausalLMLoss, shape: StepShape) -> int:
    """Return the most bytes that are alive at once in forward and backward, beside the weights and their gradients.

    Rows are watched as one document each: packed documents keep as much, for attention keeps no scores.
    """
    checkpoint_blocks(module, module.blocks(), mode=shape.checkpoint_mode, option=shape.checkpoint_option)
    module.to(shape.param_dtype)
    device = shape.real_tensors_on or torch.device("cpu")  # the one kind that checkpointing cannot name is meta
    fake = FakeTensorMode(allow_non_fake_inputs=True) if shape.real_tensors_on is None else contextlib.nullcontext()
    with fake:
        module.to_empty(device=device)
        module.model.tie_weights()
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(_forget_gradient)
        ids = torch.zeros(shape.micro_batch, shape.seq_len, dtype=torch.int64, device=device)
        live = LiveBytes((*module.parameters(), *module.buffers(), ids))
        with live, _attention_outlined():
            module(ids, ids, ids)[0].backward()
    return live.peak


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None  # counted by arithmetic: ranks keep their part only


@contextlib.contextmanager
def _attention_outlined() -> Iterator[None]:
    """Let attention keep what flash attention does: queries, keys, values and the result, no scores.

    Not by a mode of torch's, which backward, where blocks may be computed again, would run without.
    """

    def outline(query: Tensor, key: Tensor, value: Tensor, *_: Any, **_options: Any) -> Any:
        return _Outline.apply(query, key, value)

    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = outline
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


class _Outline(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, result)
        return result

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _result = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, for as long as each lives; `peak` is the most at once."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = {id(tensor.untyped_storage()) for tensor in known}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        if operation is OPERATOR:
            self.peak = max(self.peak, self.now + scratch_bytes(*args))
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def parameters_by_kind(model: Any) -> dict[str, int]:
    """Return how many parameters a model has: embedding, head (0 where it is the embedding), matrices, vectors."""
    embedding = model.get_input_embeddings().weight
    output = model.get_output_embeddings()
    head = None if output is None or output.weight is embedding else output.weight
    kinds = dict.fromkeys(("embedding", "head", "matrices", "vectors"), 0)
    for parameter in model.parameters():
        kind = "matrices" if parameter.ndim >= 2 else "vectors"
        kinds["embedding" if parameter is embedding else "head" if parameter is head else kind] += parameter.numel()
    return kinds
