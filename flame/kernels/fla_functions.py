"""What a graph must know of flash-linear-attention's chunk kernels without running them: `KERNELS`.

Each is a `torch.autograd.Function` of fla. Written down are its inputs, what it keeps from forward to backward and how
large that is, and what it is told. `flame/kernels/linear_attention.py` compares all that whenever one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flame.kernels.chunks import most_chunks

CHUNK = 64
Tensors = Mapping[str, Tensor]
Shapes = Mapping[str, tuple[Sequence[int], torch.dtype]]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One of fla's functions, or one of ours of that form; names are those of its forward's parameters.

    `inputs` are its tensors that have gradients: the first gives the output its dtype, `v` its shape. `settings` are
    what callers choose beside `scale`, with their types in a schema; `options` is what is always so. `saved` is what
    it keeps for backward, in its order: an input, `offsets` (`cu_seqlens`), `indices` (of the chunks), `-` for None,
    or what it makes. `makes(inputs, chunk, offsets)` tells shapes and dtypes of the latter.
    `stands_for` names, for an input that is not kept, what is kept and has its shape.
    """

    function: str
    inputs: tuple[str, ...]
    saved: str
    makes: Callable[[Tensors, int, Tensor | None], Shapes]
    settings: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    stands_for: Mapping[str, str] = field(default_factory=dict)
    chunk: Callable[[Tensor], int] = lambda q: CHUNK
    computed: Callable[[Tensors], Tensors] = lambda inputs: {}
    """Further tensors of its forward, without gradients."""

    @property
    def kept(self) -> tuple[str, ...]:
        """Return the names of what backward is given: inputs, and what forward made."""
        return tuple(name for name in self.saved.split() if name not in ("offsets", "indices", "-"))

    @property
    def made(self) -> tuple[str, ...]:
        return tuple(name for name in self.kept if name not in self.inputs)


NEVER: dict[str, Any] = {
    **dict.fromkeys(("initial_state", "hk0", "hv0", "cu_seqlens_cpu", "cp_context", "g_gamma")),
    **dict.fromkeys(("output_final_state", "disable_recompute", "use_graph"), False),
}


# ---- what is known of fla's functions -------------------------------------------------------------------------------


def _gla_chunk(q_BTHK: Tensor) -> int:
    return CHUNK if q_BTHK.shape[1] > 32 else 32 if q_BTHK.shape[1] > 16 else 16


def _gla_makes(x: Tensors, chunk: int, offsets: Tensor | None) -> Shapes:
    rows, length, heads, width = x["k"].shape
    return {
        "states": ((rows, most_chunks(length, chunk, offsets), heads, x["v"].shape[-1], width), x["k"].dtype),
        "scores": ((*x["q"].shape[:3], chunk), torch.float32),
    }


def _normed(x: Tensors) -> dict[str, tuple[Sequence[int], torch.dtype]]:
    """Return what is kept of queries and keys that the function itself gives the length 1."""
    return {
        "q_normed": (x["q"].shape, x["q"].dtype),
        "q_factor": (x["q"].shape[:3], torch.float32),
        "k_normed": (x["k"].shape, x["k"].dtype),
        "k_factor": (x["k"].shape[:3], torch.float32),
    }


def _delta_rule_makes(x: Tensors, chunk: int, offsets: Tensor | None) -> Shapes:
    return {**_normed(x), "scores": ((*x["k"].shape[:3], chunk), x["k"].dtype)}


def _gated_delta_rule_makes(x: Tensors, chunk: int, offsets: Tensor | None) -> Shapes:
    return {
        **_normed(x),
        "g_sum": (x["g"].shape, torch.float32),
        "beta_used": (x["beta"].shape, torch.float32),
        "scores": ((*x["v"].shape[:3], chunk), x["k"].dtype),
    }


def _kda_makes(x: Tensors, chunk: int, offsets: Tensor | None) -> Shapes:
    return {
        **_normed(x),
        "beta_used": (x["beta"].shape, torch.float32),
        "scores": ((*x["v"].shape[:3], chunk), x["k"].dtype),
        "inverse": ((*x["v"].shape[:3], chunk), x["k"].dtype),
    }


def _gsa_makes(x: Tensors, chunk: int, offsets: Tensor | None) -> Shapes:
    return {
        "slots": (x["s"].shape, x["q"].dtype),
        "weights": (x["s"].shape, torch.float32),
        "scores": ((*x["q"].shape[:3], chunk), torch.float32),
    }


def _retention_decay(x: Tensors) -> Tensors:
    """Return the logarithm of each head's decay, 1 − 2^(−5−h). Source: Sun et al. 2023, "Retentive Network"."""
    head = torch.arange(x["q"].shape[2], dtype=torch.float32, device=x["q"].device)
    return {"g_gamma": (1 - 2.0 ** (-5.0 - head)).log()}


_NORMED = {"q": "q_normed", "k": "k_normed"}
_IN_KERNEL = ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "use_gate_in_kernel", "state_v_first")

KERNELS: dict[str, Kernel] = {
    "gla": Kernel(
        function="flame.kernels.gla.GatedLinearAttention",
        inputs=("q", "k", "v", "g"),
        saved="q k v g states scores",
        makes=_gla_makes,
        chunk=_gla_chunk,
    ),
    "delta_rule": Kernel(
        function="fla.ops.delta_rule.chunk.ChunkDeltaRuleFunction",
        inputs=("q", "k", "v", "beta"),
        saved="q_normed q_factor k_normed k_factor v beta scores - offsets indices",
        makes=_delta_rule_makes,
        options={"use_qk_l2norm_in_kernel": True},
        stands_for=_NORMED,
    ),
    "gated_delta_rule": Kernel(
        function="flame.kernels.gated_delta_rule.GatedDeltaRule",
        inputs=("q", "k", "v", "g", "beta", "A_log", "dt_bias"),
        saved="q_normed q_factor k_normed k_factor v g_sum beta beta_used scores g A_log dt_bias",
        makes=_gated_delta_rule_makes,
        settings={"allow_neg_eigval": "bool"},
        stands_for=_NORMED,
    ),
    "kda": Kernel(
        function="fla.ops.kda.chunk.ChunkKDAFunction",
        inputs=("q", "k", "v", "g", "beta", "A_log", "dt_bias"),
        saved="q_normed q_factor k_normed k_factor v - g beta beta_used A_log dt_bias scores inverse"
        " - - - - - - - offsets indices -",
        makes=_kda_makes,
        settings={"allow_neg_eigval": "bool", "safe_gate": "bool", "lower_bound": "float?"},
        options=dict.fromkeys(_IN_KERNEL, True),
        stands_for=_NORMED,
    ),
    "gsa": Kernel(
        function="fla.ops.gsa.chunk.ChunkGSAFunction",
        inputs=("q", "k", "v", "s", "g"),
        saved="q k v s g slots weights scores - - - - indices",
        makes=_gsa_makes,
        options={"checkpoint_level": 2},
    ),
    "retention": Kernel(
        function="fla.ops.simple_gla.chunk.ChunkSimpleGLAFunction",
        inputs=("q", "k", "v"),
        saved="q k v - decay - indices",
        makes=lambda x, chunk, offsets: {"decay": (x["q"].shape[2:3], torch.float32)},
        options={"state_v_first": False, "g": None},
        computed=_retention_decay,
    ),
    "simple_gla": Kernel(
        function="flame.kernels.simple_gla.SimpleGatedLinearAttention",
        inputs=("q", "k", "v", "g"),
        saved="q k v g_sum",
        makes=lambda x, chunk, offsets: {"g_sum": (x["g"].shape, torch.float32)},
        stands_for={"g": "g_sum"},
    ),
    "rwkv7": Kernel(
        function="fla.ops.generalized_delta_rule.dplr.chunk.ChunkDPLRDeltaRuleFunction",
        inputs=("q", "k", "v", "a", "b", "gk"),
        saved="q k v a b gk -",
        makes=lambda x, chunk, offsets: {},
        settings={"lower_bound": "float?"},
        options={"safe_gate": True},
    ),
}
"""fla's functions by the names that their operators have in `torch.ops.flame`."""
