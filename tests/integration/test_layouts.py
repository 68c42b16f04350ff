"""FSDP, HSDP and DDP on four ranks: the numbers of one rank, and checkpoints that pass between them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flame.train.checkpoint import load_checkpoint
from flame.train.checkpoint_files import open_checkpoint
from flame.train.distributed import World
from flame.train.model import CausalLMLoss, build_model
from flame.train.optimizer import JoinedOptimizer, build_optimizer, clip_and_scale
from flame.train.options import OptimizerOptions
from flame.train.parallelize import parallelize, reduce_gradients
from flame.train.update import UpdateInBackward
from tests.ranks import on_ranks
from tests.tiny_states import differences, one_rank, save, update, whole_state
from tests.unit.test_model import make_config, packed_batch
from tools.traffic import step_traffic

CPU = torch.device("cpu")
OPTIMIZERS = ("AdamW", "Muon")
# (dp_replicate, dp_shard): FSDP, DDP, HSDP
LAYOUTS = ((1, 4), (4, 1), (2, 2))
BATCHES = [packed_batch(lengths, seed=seed) for seed, lengths in enumerate(([7, 1, 20], [3, 25], [28], [14, 14]) * 2)]
NUM_LABELS = sum(int((batch["labels"] != -100).sum()) for batch in BATCHES)


def make(
    world: World, layout: tuple[int, int], name: str, *, seed: int, **options: Any
) -> tuple[CausalLMLoss, Optimizer]:
    """A model whose matrices have rows that four ranks cannot share evenly, and its optimizer."""
    config = make_config("llama", intermediate_size=27, vocab_size=101, num_hidden_layers=2)
    module = build_model(config, seed=seed, rank=world.rank, device=CPU, dtype=torch.float32, varlen=True)
    mesh = init_device_mesh("cpu", layout, mesh_dim_names=("dp_replicate", "dp_shard"))
    parallelize(module, mesh, device=CPU, param_dtype=torch.float32)
    return module, build_optimizer(module.model, OptimizerOptions(name=name, lr=0.01, **options), CPU)


def train(
    module: CausalLMLoss, optimizer: Optimizer, batches: list[dict[str, Any]], max_norm: float | None = 1.0
) -> dict[str, Tensor]:
    """Take a step over these micro-batches of a rank; returns the weights and the gradient's norm."""
    for index, batch in enumerate(batches):
        reduce_gradients(module, index == len(batches) - 1)
        module(**batch)[0].backward()
    norm = clip_and_scale(list(module.parameters()), 1 / NUM_LABELS, max_norm)
    optimizer.step()
    return {"norm": norm, **whole_state(module.model, None)}


def train_in_backward(world: World, layout: tuple[int, int], batch: dict[str, Any]) -> dict[str, Tensor]:
    """Take a step that updates weights in backward; returns the weights and the gradient's norm."""
    module, optimizer = make(world, layout, "AdamW", seed=1, early_step_in_backward=True)
    assert isinstance(optimizer, JoinedOptimizer)
    step = UpdateInBackward(optimizer, before_update=lambda: None)
    step.begin(NUM_LABELS)
    module(**batch)[0].backward()
    norm, skip = step.finish()
    assert not skip.read() and all(parameter.grad is None for parameter in module.parameters())
    return {"norm": norm, **whole_state(module.model, None)}


def on_four(world: World, folder: Path) -> None:
    """Load what one rank saved by FSDP, what that saved by DDP, and so on; from each go on as one rank did.

    A step of two micro-batches has the collectives that are foretold of it, and no others of weights and gradients.
    """
    for name in OPTIMIZERS:
        before, updated, trained = torch.load(folder / f"{name}.pt")
        for step, layout in enumerate(LAYOUTS, 2):
            module, optimizer = make(world, layout, name, seed=9)
            path = folder / name / f"step-{step}"
            choice = open_checkpoint(path, fast_open=False)
            load_checkpoint(choice, model=module.model, optimizer=optimizer, world=world)
            assert not differences(before, whole_state(module.model, optimizer)), (name, layout)
            save(folder / name, module.model, optimizer, step + 1, world)
            update(module.model, optimizer, seed=2)
            assert not differences(updated, whole_state(module.model, optimizer)), (name, layout)
            with Collectives() as collectives:
                result = train(module, optimizer, BATCHES[2 * world.rank : 2 * world.rank + 2])
            # Muon computes in bf16: what is nearly the same gradient may be rounded otherwise.
            close = {"rtol": 1e-6, "atol": 1e-6} if name == "AdamW" else {"rtol": 1e-3, "atol": 3e-4}
            torch.testing.assert_close(result, trained, **close)
            assert collectives.of_gradients_and_weights() == foretold(module, layout), layout
            norms = [4 * len(list(module.parameters()))] if layout[1] > 1 else []  # of all weights, in one
            assert collectives.found["_c10d_functional.all_reduce"] == norms, layout
    for layout in LAYOUTS:
        result = train_in_backward(world, layout, BATCHES[world.rank])
        torch.testing.assert_close(result, torch.load(folder / "in-backward.pt"), rtol=1e-6, atol=1e-6)


def foretold(module: CausalLMLoss, layout: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """How many collectives of each kind a step of two micro-batches in fp32 has, and the bytes of their tensors."""
    blocks = [[tuple(weight.shape) for weight in block.parameters()] for block in module.blocks()]
    inside = {id(weight) for block in module.blocks() for weight in block.parameters()}
    rest = [tuple(weight.shape) for weight in module.parameters() if id(weight) not in inside]
    replicas, shards = layout
    traffic = step_traffic(blocks, rest, replicas=replicas, shards=shards, micro_batches=2, param_bytes=4)
    return {kind: (collective.count, collective.size_bytes) for kind, collective in traffic.items()}


class Collectives(TorchDispatchMode):
    """Notes the bytes of each collective's larger side, by its operator's name."""

    KINDS: ClassVar = {
        "c10d._allgather_base_": "all_gather",
        "c10d._reduce_scatter_base_": "reduce_scatter",
        "c10d.allreduce_": "all_reduce",
    }

    def __init__(self) -> None:
        super().__init__()
        self.found: defaultdict[str, list[int]] = defaultdict(list)

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with its shards comes by here
        name = str(function).removesuffix(".default")
        if "c10d" in name:
            tensors = [tensor for tensor in tree_leaves(arguments) if isinstance(tensor, Tensor)]
            self.found[name].append(max((tensor.nbytes for tensor in tensors), default=0))
        return function(*arguments, **(options or {}))

    def of_gradients_and_weights(self) -> dict[str, tuple[int, int]]:
        """How many there were of each kind, and the bytes of their tensors."""
        named = {self.KINDS[name]: sizes for name, sizes in self.found.items() if name in self.KINDS}
        return {kind: (len(sizes), sum(sizes)) for kind, sizes in named.items()}


def test_what_four_ranks_do_in_any_layout_is_what_one_does(tmp_path: Path) -> None:
    with one_rank() as world:
        for name in OPTIMIZERS:
            module, optimizer = make(world, (1, 1), name, seed=1)
            for seed in range(2):
                update(module.model, optimizer, seed=seed)
            save(tmp_path / name, module.model, optimizer, 2, world)
            before = whole_state(module.model, optimizer)
            update(module.model, optimizer, seed=2)
            updated = whole_state(module.model, optimizer)
            torch.save((before, updated, train(module, optimizer, BATCHES)), tmp_path / f"{name}.pt")
        module, optimizer = make(world, (1, 1), "AdamW", seed=1)
        torch.save(train(module, optimizer, BATCHES[:4], max_norm=None), tmp_path / "in-backward.pt")
    on_ranks(4, on_four, tmp_path)
    with one_rank() as world:
        for name in OPTIMIZERS:
            before, _, _ = torch.load(tmp_path / f"{name}.pt")
            module, optimizer = make(world, (1, 1), name, seed=9)
            choice = open_checkpoint(tmp_path / name / f"step-{2 + len(LAYOUTS)}", fast_open=False)
            load_checkpoint(choice, model=module.model, optimizer=optimizer, world=world)
            assert not differences(before, whole_state(module.model, optimizer))
