"""Whether gated backward is right on this Hopper GPU: tried at start, with a Triton that is known to miscompile it.

With a decay a head, fla's `chunk_bwd_dqkwg` raises on Hopper under Triton 3.4.0 to 3.7.0: that compiler miscompiles a
transposed product in it, and gradients of keys and decays come out wrong (flash-linear-attention, issue 640); on an
H200 with Triton 3.6 it also read memory that was not its own. Our operators have a kernel of their own in its place
(`gated_delta_rule.chunk_gradients`), which has transposed products too. So they run here once, with the model's own
heads and dtype over a packed sequence, and the result and gradients of its first documents are compared with the
recurrence itself in fp32. Where they do not agree, training does not begin.

What these kernels are tuned to does not depend on the number of tokens, and this is where they are tuned: on a GPU
further documents follow, so that the configuration that is kept is not that of a few hundred tokens.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flame.errors import TrainingError
from flame.kernels.dispatch import walks_refusal
from flame.kernels.linear_attention import linear_attention
from flame.kernels.reference import gated_delta_rule

log = logging.getLogger("flame")

_LENGTHS = (70, 1, 64, 121)
"""Documents that are compared: on both sides of a chunk of 64, and of one token."""
_TOLERANCES = {torch.bfloat16: 0.03, torch.float16: 0.03, torch.float32: 0.01}
"""Of ‖ours − exact‖ / ‖exact‖, for each head. The fault that is feared makes it about 1/2."""


@dataclass(frozen=True, kw_only=True, order=True)
class GatedHeads:
    """What the kernel is compiled for, beside the dtype."""

    kernel: str
    """`gated_delta_rule` or `simple_gla`."""
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def __str__(self) -> str:
        heads = f"{self.key_heads} key and {self.value_heads} value heads of {self.key_dim} and {self.value_dim}"
        return f"{self.kernel}, {heads}"


def gated_heads(model: nn.Module) -> list[GatedHeads]:
    """Return the distinct shapes of a model's layers that have the backward in question."""
    return sorted({heads for module in model.modules() if (heads := _heads_of(module)) is not None})


def _heads_of(module: Any) -> GatedHeads | None:
    names = {kind.__name__ for kind in type(module).__mro__}
    if "GatedDeltaNet" in names:
        return GatedHeads(
            kernel="gated_delta_rule",
            key_heads=module.num_heads,
            value_heads=module.num_v_heads,
            key_dim=module.head_k_dim,
            value_dim=module.head_v_dim,
        )
    if "PackedMamba2" in names:
        channels, convolved, heads = module.widths
        key_dim = (convolved - channels) // (2 * module.num_groups)
        return GatedHeads(
            kernel="simple_gla", key_heads=heads, value_heads=heads, key_dim=key_dim, value_dim=channels // heads
        )
    return None


def log_walks(shapes: Iterable[GatedHeads], device: torch.device, dtype: torch.dtype) -> None:
    """Say whose kernels carry the states of the gated delta rule along documents, and if fla's, why."""
    for heads in shapes:
        if heads.kernel == "gated_delta_rule":
            refusal = walks_refusal(device=device, dtype=dtype, key_dim=heads.key_dim, value_dim=heads.value_dim)
            log.info("%s: states by %s", heads, "walks along documents" if refusal is None else f"fla, for {refusal}")


def is_suspect(device: torch.device) -> bool:
    """Tell whether this compiler is one that miscompiles for this device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    import triton

    return (3, 4, 0) <= tuple(map(int, re.findall(r"\d+", triton.__version__)[:3])) <= (3, 7, 0)


def check_gated_backward(shapes: Iterable[GatedHeads], device: torch.device, dtype: torch.dtype) -> None:
    """Raise `TrainingError` if the backward is wrong for one of `shapes`, where the compiler is suspected of it.

    Leaves torch's random numbers as they are.
    """
    shapes = list(shapes)
    if shapes and is_suspect(device):
        for heads in shapes:
            _check(heads, device, dtype)


def _check(heads: GatedHeads, device: torch.device, dtype: torch.dtype) -> None:
    errors = relative_errors(heads, device, dtype)
    # a NaN is no agreement
    wrong = {name: error for name, error in errors.items() if not error <= _TOLERANCES[dtype]}
    if wrong:
        raise TrainingError(
            f"gated backward is wrong on this GPU with this Triton ({heads})",
            got=", ".join(f"{name} off by {error:.2g}" for name, error in wrong.items()) + " of its norm",
            expected=f"at most {_TOLERANCES[dtype]}, against the recurrence in fp32",
            fix="Install Triton 3.7.1 or newer",
        )
    worst = max(errors, key=errors.__getitem__)
    log.info(
        "gated backward, which this Triton may miscompile on Hopper, is right here: %s, %s, over documents of %s "
        "tokens, result and all gradients are within %.2g (%s) of the recurrence in fp32",
        *(heads, str(dtype).removeprefix("torch."), _LENGTHS, errors[worst], worst),
    )


def relative_errors(heads: GatedHeads, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Return how far our operator is from the recurrence, by the name of its result and of each gradient."""
    lengths, compared = (*_LENGTHS, *_further(device)), sum(_LENGTHS)
    inputs = _inputs(heads, device, dtype)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(1, compared, heads.value_heads, heads.value_dim, generator=generator).to(device, dtype)
    weights = F.pad(weights, (0, 0, 0, 0, 0, sum(lengths) - compared))  # no gradient comes from further documents
    own = {name: _continued(x, sum(lengths)).requires_grad_() for name, x in inputs.items()}
    few = {name: x.float().requires_grad_() for name, x in inputs.items()}
    results = []
    with torch.enable_grad():
        for function, given, documents in ((_by_kernel, own, lengths), (_by_recurrence, few, _LENGTHS)):
            offsets = torch.tensor([0, *documents], device=device).cumsum(0).to(torch.int32)
            o = function(heads, given, offsets)
            gradients = torch.autograd.grad(o, list(given.values()), weights[:, : o.shape[1]].to(o.dtype))
            named = {"o": o, **{f"d{name}": x for name, x in zip(given, gradients, strict=True)}}
            results.append({name: _cut(x, compared) for name, x in named.items()})
    return {name: _relative_error(value, results[1][name]) for name, value in results[0].items()}


def _further(device: torch.device) -> tuple[int, ...]:
    """Return the lengths of the documents that follow, for which kernels are tuned."""
    return (1024,) * 31 if device.type == "cuda" else ()


def _continued(x: Tensor, num_tokens: int) -> Tensor:
    """Return what belongs to so many tokens, the same again and again; what has one number a head as it is."""
    if x.ndim == 1:
        return x.clone()
    return x.repeat(1, -(-num_tokens // x.shape[1]), *(1 for _ in x.shape[2:]))[:, :num_tokens]


def _cut(x: Tensor, num_tokens: int) -> Tensor:
    """Return what belongs to the first tokens; what has one number a head belongs to all."""
    return (x[:, :num_tokens] if x.ndim > 1 else x).detach()


def _inputs(heads: GatedHeads, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what the layer gives the kernel, before the gate and the norms that the kernel makes of it."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    length = sum(_LENGTHS)
    inputs = {
        "q": normal(1, length, heads.key_heads, heads.key_dim).to(dtype),
        "k": normal(1, length, heads.key_heads, heads.key_dim).to(dtype),
        "v": normal(1, length, heads.value_heads, heads.value_dim).to(dtype),
    }
    if heads.kernel == "simple_gla":
        scale = heads.key_dim**-0.5
        inputs["k"] *= scale
        inputs["g"] = -F.softplus(normal(1, length, heads.value_heads)) / 4
    else:
        inputs["g"] = normal(1, length, heads.value_heads).to(dtype)
        inputs["beta"] = normal(1, length, heads.value_heads).to(dtype)
        inputs["A_log"] = normal(heads.value_heads) / 4 - 1
        inputs["dt_bias"] = normal(heads.value_heads) / 4
    return {name: x.to(device) for name, x in inputs.items()}


def _by_kernel(heads: GatedHeads, inputs: dict[str, Tensor], offsets: Tensor) -> Tensor:
    """Return the operator's result, called as the layers call it."""
    settings = {"scale": 1.0} if heads.kernel == "simple_gla" else {"allow_neg_eigval": False}
    return linear_attention(heads.kernel, *inputs.values(), cu_seqlens=offsets, **settings)


def _by_recurrence(heads: GatedHeads, inputs: dict[str, Tensor], offsets: Tensor) -> Tensor:
    """Return the same, one token after the other."""
    q, k, v, g = (inputs[name] for name in "qkvg")
    beta, scale = None, 1.0
    if heads.kernel == "gated_delta_rule":
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        g = -inputs["A_log"].exp() * F.softplus(g + inputs["dt_bias"])
        beta, scale = inputs["beta"].sigmoid(), heads.key_dim**-0.5
    q, k = (x.repeat_interleave(heads.value_heads // heads.key_heads, dim=2) for x in (q, k))
    return gated_delta_rule(q, k, v, g, beta, offsets, scale=scale)


def _relative_error(ours: Tensor, exact: Tensor) -> float:
    """Return ‖ours − exact‖ / ‖exact‖ of the head in which it is largest; of a number a head, of all."""
    difference, exact = ours.float() - exact, exact.float()
    if exact.ndim > 1:
        difference, exact = (x[0].transpose(0, 1).flatten(1) for x in (difference, exact))
    return float((difference.norm(dim=-1) / exact.norm(dim=-1)).max())
