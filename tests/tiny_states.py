"""A tiny model and optimizer in the middle of training, for tests of checkpoints and exports."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

from flame.train.checkpoint import save_checkpoint
from flame.train.checkpoint_tensors import named_tensors, optimizer_tensors
from flame.train.distributed import World, join_world
from flame.train.identity import DataIdentity
from flame.train.train_state import TrainState

IDENTITY = DataIdentity(
    mixture_fingerprint="sha256:m",
    corpora={"web": "sha256:w"},
    tokenizer_fingerprint="sha256:t",
    data_seed=42,
    window_len=16,
)


@contextmanager
def one_rank() -> Iterator[World]:
    with join_world(replicate=1, shard=None, init_timeout_seconds=60, shutdown_timeout_seconds=60) as world:
        yield world


def tiny_llama(*, seed: int = 0, vocab_size: int = 40, tied: bool = False, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": vocab_size,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "tie_word_embeddings": tied,
            **changes,
        }
    )
    return LlamaForCausalLM(config)


class OddShapes(nn.Module):
    """Parameters that do not divide: one row (so that a second rank holds nothing of it), seven rows, and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one = nn.Parameter(torch.randn(1, 5))
        self.seven = nn.Parameter(torch.randn(7, 3))
        self.register_buffer("table", torch.randn(4))


def shard(model: nn.Module, world: World) -> nn.Module:
    """Shard as the trainer does: each block, then the whole."""
    blocks = model.model.layers if isinstance(model, LlamaForCausalLM) else []
    for block in blocks:
        fully_shard(block, mesh=world.mesh)
    fully_shard(model, mesh=world.mesh)
    return model


def adamw(model: nn.Module, *, lr: float = 1e-2, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, **options)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, *, seed: int) -> None:
    """One optimizer step on random gradients that depend on the seed and the parameter only, not on the sharding."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        full = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        if isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(full, parameter.device_mesh, parameter.placements)
        else:
            parameter.grad = full
    optimizer.step()
    optimizer.zero_grad()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Every tensor of model and optimizer, gathered, by its checkpoint name."""
    named = named_tensors(model)
    tensors = {f"model.{name}": tensor for name, tensor in named.items()}
    if optimizer is not None:
        tensors |= optimizer_tensors(optimizer, named)
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()
        for name, tensor in tensors.items()
    }


def differences(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """The names whose tensors are not equal in shape, dtype and every bit (NaN and −0.0 included)."""
    names = left.keys() ^ right.keys()
    for name in left.keys() & right.keys():
        one, other = left[name], right[name]
        same_kind = one.shape == other.shape and one.dtype == other.dtype
        if not same_kind or one.numpy().tobytes() != other.numpy().tobytes():
            names.add(name)
    return sorted(names)


def save(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int, world: World, **changes: Any
) -> Path:
    """`save_checkpoint` with made-up surroundings."""
    arguments: dict[str, Any] = {
        "state": TrainState(
            step=step, consumed_samples=8 * step, consumed_tokens=128 * step, elapsed_seconds=0.1 * step
        ),
        "identity": IDENTITY,
        "config_toml": "[training]\nsteps = 10\n",
        "hf_files": {"config.json": b"{}"},
        **changes,
    }
    return save_checkpoint(folder, model=model, optimizer=optimizer, world=world, **arguments)


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """No file may grow past so many bytes: the same errors, from the same places, as a disk without room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
