"""Sharding: the same weights and the same summed gradients on 1 and 2 ranks, and no compilation that grows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from flame.errors import UsageError
from flame.kernels.dispatch import ATTENTION, Implementation
from flame.train.model import CausalLMLoss
from flame.train.parallelize import parallelize, reshard
from tests.ranks import fork_ranks
from tests.unit.test_model import CPU, build, build_model, make_config, packed_batch

# Two micro-batches with 36 and 13 labels.
BATCHES = ([7, 1, 20, 12], [3, 11, 1])
# Model type, tied embeddings, (replicas, shards), and what is gathered again after forward.
WAYS: dict[str, tuple[str, bool, tuple[int, int], str]] = {
    "shards": ("llama", False, (1, 2), "default"),
    "tied-replicas": ("llama", True, (2, 1), "never"),
    "tied-shards-of-fla": ("transformer", True, (1, 2), "always"),
}


@contextlib.contextmanager
def process_group(rank: int, world_size: int, store: Path | None = None) -> Iterator[None]:
    where: dict[str, Any] = {"store": HashStore()} if store is None else {"init_method": f"file://{store}"}
    dist.init_process_group("gloo", rank=rank, world_size=world_size, **where)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_module(model_type: str, tied: bool, rank: int) -> CausalLMLoss:
    config = make_config(model_type)
    config.tie_word_embeddings = tied
    module = build_model(config, seed=1, rank=rank, device=CPU, dtype=torch.float32, varlen=True)
    module.model.base_model.norm.weight._no_weight_decay = True
    return module


def sharded_module(model_type: str, tied: bool, rank: int, shape: tuple[int, int], **options: Any) -> CausalLMLoss:
    module = make_module(model_type, tied, rank)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    parallelize(module, mesh, device=CPU, param_dtype=torch.float32, **options)
    return module


def rank_of_two(rank: int, folder: Path) -> None:
    """One of two ranks: builds, shards, trains on its own micro-batch, and leaves what came out in a file, each way."""
    torch.set_num_threads(1)
    with process_group(rank, 2, folder / "store"):
        for name, way in WAYS.items():
            torch.save(sharded_step(rank, *way), folder / f"{name}-{rank}.pt")


def sharded_step(rank: int, model_type: str, tied: bool, shape: tuple[int, int], reshard: str) -> tuple[Any, ...]:
    """Weights, buffers and gradients by name, all whole, and the ranks' sum of losses and labels."""
    module = sharded_module(model_type, tied, rank, shape, reshard_after_forward=reshard)
    parameters = dict(module.named_parameters())
    for parameter in parameters.values():
        assert isinstance(parameter, DTensor) and parameter.dtype == torch.float32
    assert module.model.base_model.norm.weight._no_weight_decay
    assert (module.model.lm_head.weight is module.model.get_input_embeddings().weight) == tied
    weights = {name: parameter.detach().full_tensor() for name, parameter in parameters.items()}
    buffers = dict(module.named_buffers())
    with GathersAndBlocks(module) as order:
        loss, num_labels, *_ = module(**packed_batch(BATCHES[rank]))
    # A block's weights are on their way before the block ahead of it computes.
    assert order.noted == (["gather"] * 3 if shape[1] > 1 else []) + ["block 0", "block 1"]
    loss.backward()
    gradients = {name: parameter.grad.full_tensor() for name, parameter in parameters.items()}
    sums = torch.tensor([loss.detach(), num_labels])
    dist.all_reduce(sums)
    return weights, buffers, gradients, sums


class GathersAndBlocks(TorchDispatchMode):
    """Notes in which order a forward gathers weights, and computes its blocks."""

    def __init__(self, module: CausalLMLoss) -> None:
        super().__init__()
        self.noted: list[str] = []
        for index, block in enumerate(module.blocks()):
            block.register_forward_pre_hook(lambda *_, told=f"block {index}": self.noted.append(told))

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if str(function).startswith("c10d._allgather_base_"):
            self.noted.append("gather")
        return function(*arguments, **(options or {}))


def unsharded(model_type: str, tied: bool) -> tuple[CausalLMLoss, dict[str, Tensor], Tensor]:
    module = make_module(model_type, tied, 0)
    sums = torch.zeros(2)
    for lengths in BATCHES:
        loss, num_labels, *_ = module(**packed_batch(lengths))
        loss.backward()
        sums += torch.tensor([loss.detach(), num_labels])
    return module, {name: parameter.grad for name, parameter in module.named_parameters()}, sums


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left: they start once for all the ways."""
    folder = tmp_path_factory.mktemp("ranks")
    fork_ranks(2, rank_of_two, folder)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_hold_the_weights_and_sum_the_gradients_of_one(two_ranks: Path, way: str) -> None:
    model_type, tied, _, _ = WAYS[way]
    module, expected_gradients, expected_sums = unsharded(model_type, tied)
    for rank in (0, 1):
        weights, buffers, gradients, sums = torch.load(two_ranks / f"{way}-{rank}.pt")
        for name, parameter in module.named_parameters():
            assert torch.equal(weights[name], parameter), name
        for name, buffer in module.named_buffers():
            assert torch.equal(buffers[name], buffer), name
        assert gradients.keys() == expected_gradients.keys()
        torch.testing.assert_close(gradients, expected_gradients, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(sums, expected_sums, rtol=1e-6, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_one_rank_takes_the_same_path(tied: bool) -> None:
    module, expected_gradients, _ = unsharded("llama", tied)
    with process_group(0, 1):
        sharded = sharded_module("llama", tied, 0, (1, 1))
        for lengths in BATCHES:
            sharded(**packed_batch(lengths))[0].backward()
        for (name, parameter), whole in zip(sharded.named_parameters(), module.parameters(), strict=True):
            assert torch.equal(parameter.full_tensor(), whole), name
            torch.testing.assert_close(parameter.grad.full_tensor(), expected_gradients[name], rtol=1e-6, atol=1e-6)


def test_weights_stay_fp32_while_blocks_compute_in_bf16() -> None:
    with process_group(0, 1):
        module = make_module("llama", False, 0)
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
        parallelize(module, mesh, device=CPU, param_dtype=torch.bfloat16)
        seen: list[torch.dtype] = []
        module.blocks()[1].register_forward_pre_hook(lambda block, args: seen.append(args[0].dtype))
        loss, *_ = module(**packed_batch())
        loss.backward()
        assert seen == [torch.bfloat16] and loss.dtype == torch.float32
        for parameter in module.parameters():
            assert parameter.dtype == parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("policy", ["default", "never"])
def test_after_evaluation_parameters_are_shards_again(policy: str) -> None:
    with process_group(0, 1):
        module = make_module("llama", False, 0)
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
        parallelize(module, mesh, device=CPU, param_dtype=torch.bfloat16, reshard_after_forward=policy)
        with torch.no_grad():
            module(**packed_batch())
        assert not all(isinstance(parameter, DTensor) for parameter in module.parameters())
        reshard(module)
        assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in module.parameters())


@pytest.fixture
def quick_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """`training.compile` without its code generator: the same graphs, guards and recompilations."""
    in_place = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda block: in_place(block, backend="eager"))
    torch._dynamo.reset()
    counters.clear()


@torch.library.custom_op("flame_tests::first_token_attention", mutates_args=())
def in_graph_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: Tensor, scale: float) -> Tensor:
    """Stands for torch_varlen, which needs a GPU: an operator that a compiled graph holds, and a longest sequence."""
    return q * scale


in_graph_attention.register_fake(lambda q, k, v, cu_seqlens, max_seqlen, scale: torch.empty_like(q))
in_graph_attention.register_autograd(lambda context, gradient: (gradient, None, None, None, None, None))
IN_GRAPH = Implementation(
    run=lambda q, k, v, cu_seqlens, max_seqlen, *, scale, **_: in_graph_attention(
        q, k, v, cu_seqlens, max_seqlen, scale
    ),
    refusal=lambda device, dtype, head_dim: None,
    deterministic=True,
)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("num_hidden_layers", [2, 5])
@pytest.mark.parametrize(
    ("model_type", "attention", "graphs"),
    [
        # torch's own SDPA, a call a sequence, cuts each block
        ("llama", "sdpa", [6] * 6),
        ("transformer", "sdpa", [4] * 6),
        # that the longest sequence varies is no reason to compile again
        ("llama", "in_graph", [1] * 6),
        ("qwen3", "in_graph", [1] * 6),
        ("transformer", "in_graph", [1] * 6),
    ],
)
def test_what_is_compiled_grows_with_neither_batches_nor_layers(
    model_type: str, attention: str, graphs: list[int], num_hidden_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ATTENTION, "in_graph", IN_GRAPH)
    compiled = []
    with process_group(0, 1):
        module = build(make_config(model_type, num_hidden_layers=num_hidden_layers), attention=attention)
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
        parallelize(module, mesh, device=CPU, param_dtype=torch.float32, compile_blocks=True)
        for lengths in ([40], [3, 37], [10] * 4, [1] * 40, [20, 1, 19], [39, 1]):
            module(**packed_batch(lengths))[0].backward()
            compiled.append(counters["stats"]["unique_graphs"])
    assert compiled == graphs
    if attention == "in_graph":
        assert not counters["graph_break"]


@pytest.mark.usefixtures("quick_compile")
def test_compiling_changes_no_value() -> None:
    plain = build(make_config("llama"))
    with process_group(0, 1):
        module = build(make_config("llama"))
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
        parallelize(module, mesh, device=CPU, param_dtype=torch.float32, compile_blocks=True)
        keys = [name for name, _ in module.model.named_parameters()]
        assert keys == [name for name, _ in plain.model.named_parameters()]
        torch.testing.assert_close(module(**packed_batch()), plain(**packed_batch()))


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize(
    ("model_type", "attention"), [("llama", "in_graph"), ("llama", "sdpa"), ("transformer", "sdpa")]
)
def test_blocks_that_are_computed_again_are_compiled_or_said_not_to_be(
    model_type: str,
    attention: str,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A graph that sdpa cuts within what is computed again is none at all."""
    monkeypatch.setitem(ATTENTION, "in_graph", IN_GRAPH)
    with process_group(0, 1), caplog.at_level("WARNING", logger="flame"):
        module = build(make_config(model_type), attention=attention)
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
        options = {"checkpoint_mode": mode, "checkpoint_option": "op", "compile_blocks": True}
        parallelize(module, mesh, device=CPU, param_dtype=torch.float32, **options)
        assert ("sdpa attention over documents leaves their graphs" in caplog.text) == (attention == "sdpa")
        module(**packed_batch())[0].backward()
        assert counters["stats"]["unique_graphs"] == (0 if attention == "sdpa" else 1)


def test_an_unknown_policy_is_refused() -> None:
    with process_group(0, 1), pytest.raises(UsageError, match="got sometimes; expected default, always, never"):
        sharded_module("llama", False, 0, (1, 1), reshard_after_forward="sometimes")
