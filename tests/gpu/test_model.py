"""Whole models on a GPU: compiled, sharded, in bf16, close to the same model in fp32 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from flame.train.model import CausalLMLoss, build_model
from flame.train.parallelize import parallelize
from tests.unit.test_model import make_config, packed_batch

pytestmark = [
    pytest.mark.usefixtures("tuned_configurations"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)
SIZES = {"hidden_size": 256, "num_hidden_layers": 3}
BATCHES = ([400], [3, 397], [100] * 4, [1] * 200 + [200], [200, 1, 199])


def on_gpu(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(GPU) if isinstance(value, Tensor) else value for name, value in batch.items()}


def build(model_type: str, device: torch.device, dtype: torch.dtype) -> CausalLMLoss:
    heads = {"head_dim": 64} if model_type != "transformer" else {}
    config = make_config(model_type, **SIZES, **heads)
    return build_model(config, seed=1, rank=0, device=device, dtype=dtype, varlen=True)


@pytest.mark.parametrize("compile_blocks", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "transformer"])
def test_it_trains_as_on_a_cpu(model_type: str, compile_blocks: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    plain = build(model_type, torch.device("cpu"), torch.float32)
    torch.cuda.set_device(GPU)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    try:
        module = build(model_type, GPU, torch.bfloat16)
        mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
        parallelize(module, mesh, device=GPU, param_dtype=torch.bfloat16, compile_blocks=compile_blocks)
        graphs = []
        for lengths in BATCHES:
            batch = packed_batch(lengths)
            loss, num_labels, *_ = module(**on_gpu(batch))
            loss.backward()
            expected, expected_labels = plain(**batch)
            expected.backward()
            graphs.append(counters["stats"]["unique_graphs"])
            assert int(num_labels) == int(expected_labels)
            assert loss.item() == pytest.approx(expected.item(), rel=3e-3, abs=1e-3)
        for ours, exact in zip(module.parameters(), plain.parameters(), strict=True):
            gradient = ours.grad.full_tensor().cpu()
            assert gradient.dtype == torch.float32
            assert (gradient - exact.grad).norm() / exact.grad.norm() < 3e-2
    finally:
        dist.destroy_process_group()
    if compile_blocks:
        assert graphs == [1, 2, 2, 2, 2] and not counters["graph_break"]
