"""Spread a model over the ranks: wrap and compile its blocks, shard them and then the whole, send the weights out.

Parameters stay fp32 DTensors, sharded over `dp_shard` and repeated over `dp_replicate`; each block gathers a copy in
the compute dtype when it is needed. Gradients are sums over all ranks, not means: the loss is divided by the number of
labels of the whole global batch, once, when gradients are scaled.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from flame.errors import UsageError
from flame.train.activations import checkpoint_blocks
from flame.train.log import log
from flame.train.model import CausalLMLoss

RESHARD_POLICIES = ("default", "always", "never")
KEPT_MARKS = ("_no_weight_decay",)
"""What models write on their parameters for the optimizer, and sharding would lose."""


def parallelize(
    module: CausalLMLoss,
    mesh: DeviceMesh,
    *,
    device: torch.device,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype = torch.float32,
    reshard_after_forward: str = "default",
    compile_blocks: bool = False,
    checkpoint_mode: str = "none",
    checkpoint_option: str = "2",
    cpu_offload: bool = False,
) -> None:
    """Make `module` ready to train on every rank of `mesh`, whose dimensions are `dp_replicate` and `dp_shard`.

    Every rank must call it, after `build_model`: rank 0 holds the weights, the others none. `param_dtype` is what
    blocks compute in, `reduce_dtype` what gradients are summed in. `reshard_after_forward` says when a block's gathered
    weights are freed: "always", "never", or "default", after forward except for the last block, whose backward is next,
    and never where they are not sharded. `checkpoint_mode` and `checkpoint_option` are those of `checkpoint_blocks`.
    With `cpu_offload` shards, their gradients and so their moments stay in host memory, pinned where there is a GPU.
    """
    checkpoint_blocks(module, module.blocks(), mode=checkpoint_mode, option=checkpoint_option)
    weights = _full_tensors(module)
    marks = {name: _marks(parameter) for name, parameter in module.named_parameters()}
    blocks = module.blocks()
    if compile_blocks:
        _compile(module, blocks)
        if module.cuts_graphs and checkpoint_mode != "none":
            log.warning(
                "training.compile: blocks whose activations are computed again run as they are, for sdpa attention "
                "over documents leaves their graphs"
            )
    sharded = mesh["dp_shard"].size() > 1
    options: dict[str, Any] = {
        "mesh": mesh if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"],
        # What passes between blocks stays as it is: activations have param_dtype already, rotary angles are fp32.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
        ),
    }
    if cpu_offload:
        anyway = " anyway" if device.type == "cpu" else ""
        log.info("training.enable_cpu_offload: shards, gradients and moments lie in host memory%s", anyway)
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    freed = [_reshards(reshard_after_forward, block is blocks[-1], sharded) for block in blocks]
    for part, frees in [*zip(blocks, freed, strict=True), (module, reshard_after_forward == "always")]:
        fully_shard(part, reshard_after_forward=frees, **options)
        if not frees:
            module.stay_gathered.append(part)
    if sharded:
        _gather_ahead([module, *blocks])
    for part in module.modules():
        if isinstance(part, FSDPModule) and mesh.size() > 1:  # one rank would divide by 1, in a pass of its own
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    _materialize(module, weights, device, shards_at=torch.device("cpu") if cpu_offload else device)
    for name, parameter in module.named_parameters():
        for mark, value in marks[name].items():
            setattr(parameter, mark, value)


def reduce_gradients(module: CausalLMLoss, on: bool) -> None:
    """Say whether the backwards to come sum gradients over the ranks: the last of a step does, for all of them.

    Those before it add up whole gradients, in the dtype of the reduction, on each rank: a step has one reduction, and
    with several micro-batches each rank needs memory for a whole gradient. Weights that stay gathered from forward to
    backward stay so up to the last backward: at its peak a micro-batch has them all anyway.
    """
    assert isinstance(module, FSDPModule), "parallelize made it one"
    module.set_requires_gradient_sync(on)
    module.set_is_last_backward(on)
    for part in module.stay_gathered:
        assert isinstance(part, FSDPModule)
        part.set_reshard_after_backward(on, recurse=False)


def reshard(module: nn.Module) -> None:
    """Free gathered weights, so that `module`'s parameters are its fp32 shards again; to call after evaluation.

    A forward without a backward leaves the outermost weights gathered: parameters then are copies in the compute dtype.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _gather_ahead(parts: list[nn.Module]) -> None:
    """Have each part, in the order of forward, ask for the next one's weights before it computes.

    torch asks when it comes to a part. Where Python is slower than the device, as with many small kernels, the device
    would wait for the weights then. In backward torch asks ahead by itself.
    """
    for part, following in itertools.pairwise(parts):
        assert isinstance(part, FSDPModule) and isinstance(following, FSDPModule)
        part.set_modules_to_forward_prefetch([following])


def _compile(module: CausalLMLoss, blocks: list[nn.Module]) -> None:
    """Compile each block in place; blocks of one kind share their graphs, so that depth adds no compile time."""
    family = module.family
    refusal = None if family.compiles else "their kernels are compiled already, or their shapes are data"
    if family.traceable is not None:
        refusal = family.traceable(blocks)
    if refusal is not None:
        log.info("training.compile: the blocks stay as they are, for %s", refusal)
        return
    if family.traceable is not None:
        log.info("training.compile: linear attention by flame's operators around fla's kernels; the rest is compiled")
    for block in blocks:
        block.compile()


def _reshards(policy: str, last: bool, sharded: bool) -> bool:
    if policy not in RESHARD_POLICIES:
        raise UsageError(
            "there is no such policy of resharding",
            got=policy,
            expected=", ".join(RESHARD_POLICIES),
        )
    return policy == "always" or (policy == "default" and sharded and not last)


def _full_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer, the non-persistent ones too, without a copy."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor.detach() for name, tensor in named}


def _marks(parameter: Tensor) -> dict[str, Any]:
    return {mark: getattr(parameter, mark) for mark in KEPT_MARKS if hasattr(parameter, mark)}


@torch.no_grad()
def _materialize(
    module: nn.Module, weights: dict[str, Tensor], device: torch.device, *, shards_at: torch.device
) -> None:
    """Fill the shards of every rank, which lie on `shards_at`, from rank 0's full tensors, one tensor at a time.

    On the device this needs the memory of the largest tensor beside the shards; `weights` are meta tensors elsewhere.
    """
    if any(tensor.is_meta for tensor in weights.values()):
        module.to_empty(device=shards_at)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device != device:
                part._buffers[name] = torch.empty_like(buffer, device=device)
    for name, parameter in (*module.named_parameters(), *module.named_buffers()):
        full = weights[name]
        sent = torch.empty_like(full, device=device) if full.is_meta else full.to(device)
        if isinstance(parameter, DTensor):
            own = distribute_tensor(sent, parameter.device_mesh, parameter.placements, src_data_rank=0)
            parameter.to_local().copy_(own.to_local())
        else:
            torch.distributed.broadcast(sent, src=0)
            parameter.copy_(sent)
