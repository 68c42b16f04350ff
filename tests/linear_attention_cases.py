"""Inputs of each linear attention of `KERNELS`, with fla's own function for it, on any device; imports fla."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fla.ops import delta_rule, gated_delta_rule, gla, gsa, kda, retention, rwkv7, simple_gla
from torch import Tensor

from flame.kernels import reference
from flame.kernels.fla_functions import _IN_KERNEL, KERNELS
from flame.train.fla_traceable_rwkv7 import _LOWEST_DECAY


class Case(NamedTuple):
    """`theirs(*inputs)` is fla's, a tuple whose first is the result; `settings` are what our operator takes."""

    inputs: tuple[Tensor, ...]
    theirs: Callable[..., Any]
    settings: dict[str, Any]


def make_cases(offsets: Tensor, *, heads: int, key_width: int, value_width: int, dtype: torch.dtype) -> dict[str, Case]:
    """Return a case a kernel, of documents between these offsets, on their device; some may be empty."""
    torch.manual_seed(0)
    tokens, device = int(offsets[-1]), offsets.device
    widths = (key_width, key_width, value_width, key_width)
    q, k, v, g = (torch.randn(1, tokens, heads, n, device=device).to(dtype) for n in widths)
    one = torch.randn(1, tokens, heads, device=device).to(dtype)
    number, wide = torch.randn(heads, device=device), torch.randn(heads * key_width, device=device)
    packed: dict[str, Any] = {"cu_seqlens": offsets}
    in_kernel: dict[str, Any] = dict.fromkeys(_IN_KERNEL, True)
    gates = {"allow_neg_eigval": False, "safe_gate": False, "lower_bound": None}
    return {
        "gla": Case((q, k, v, F.logsigmoid(g) / 16), lambda *x: gla.chunk_gla(*x, state_v_first=True, **packed), {}),
        "delta_rule": Case(
            (q, k, v, one.sigmoid()),
            lambda *x: delta_rule.chunk_delta_rule(*x, use_qk_l2norm_in_kernel=True, **packed),
            {},
        ),
        "gated_delta_rule": Case(
            (q, k, v, one, one, number, number),
            lambda *x: gated_delta_rule.chunk_gated_delta_rule(*x[:5], A_log=x[5], dt_bias=x[6], **in_kernel, **packed),
            {"allow_neg_eigval": False},
        ),
        "kda": Case(
            (q, k, v, g, one, number, wide),
            lambda *x: kda.chunk_kda(*x[:5], A_log=x[5], dt_bias=x[6], **in_kernel, **packed),
            gates,
        ),
        "gsa": Case((q, k, v, g, F.logsigmoid(g)), lambda *x: gsa.chunk_gsa(*x, **packed), {}),
        "retention": Case((q, k, v), lambda *x: retention.chunk_retention(*x, **packed), {}),
        "simple_gla": Case((q, k, v, F.logsigmoid(one)), lambda *x: simple_gla.chunk_simple_gla(*x, **packed), {}),
        "rwkv7": Case(
            (q, k, v, 0.1 * g, 0.1 * k, _LOWEST_DECAY * g.sigmoid()),
            lambda q, k, v, a, b, w: rwkv7.chunk_rwkv7(
                *(q, w, k, v, a, b),
                scale=key_width**-0.5,
                safe_gate=True,
                lower_bound=_LOWEST_DECAY,
                chunk_size=64,
                **packed,
            ),
            {"lower_bound": _LOWEST_DECAY},
        ),
    }


def differentiated(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return a function's result and the gradients of its inputs, of a sum with weights that any dtype has."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    out = function(*inputs)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).to(torch.bfloat16).to(out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


def same_bits(case: Case, ours: Callable[..., Tensor]) -> list[bool]:
    """Tell of the result and of each gradient whether our operator has the bits of fla's function."""
    expected = differentiated(lambda *x: case.theirs(*x)[0], case.inputs)
    return [torch.equal(a, b) for a, b in zip(expected, differentiated(ours, case.inputs), strict=True)]


RECURRENCES = ("gla", "gated_delta_rule", "simple_gla", "retention", "delta_rule")


def recurrence(name: str, *inputs: Tensor, offsets: Tensor, most: float = 1.0) -> Tensor:
    """Return a kernel of `RECURRENCES` of its inputs, a token at a time; a β that is a sigmoid is at most `most`."""
    q, k, v, *others = inputs
    scale = q.shape[-1] ** -0.5
    if name == "gla":
        return reference.gated_linear_attention(q, k, v, *others, offsets, scale=scale)
    if name == "simple_gla":
        return reference.gated_delta_rule(q, k, v, *others, None, offsets, scale=scale)
    if name == "retention":
        decay = KERNELS[name].computed({"q": q})["g_gamma"].to(q.dtype).expand(q.shape[:3])
        return reference.gated_delta_rule(q, k, v, decay, None, offsets, scale=scale)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    if name == "delta_rule":
        return reference.gated_delta_rule(q, k, v, torch.zeros_like(others[0]), *others, offsets, scale=scale)
    g, beta, A_log, dt_bias = others
    decay = -A_log.exp() * F.softplus(g + dt_bias)
    return reference.gated_delta_rule(q, k, v, decay, most * beta.sigmoid(), offsets, scale=scale)


def relative_error(x: Tensor, exact: Tensor) -> float:
    """Return ‖x − exact‖ / ‖exact‖."""
    return float((x - exact).norm() / exact.norm())
