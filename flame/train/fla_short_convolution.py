"""flash-linear-attention's short convolutions by our own operator, which does not cut the graph of a compiled block.

An object gets another class: it keeps its parameters, their names and its settings, and only its forward is another.
"""

from __future__ import annotations

from typing import Any

from fla.modules import ShortConvolution
from torch import Tensor, nn

from flame.kernels.short_convolution import positions_in_documents, short_convolution


class PackedShortConvolution(ShortConvolution):
    """fla's `ShortConvolution` of `[B, T, C]`, for training: it reads no cache, returns none, and adds no residual."""

    is_short_convolution = True

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, cache: None = None, output_final_state: bool = False
    ) -> tuple[Tensor, None]:
        assert cache is None and not output_final_state, "flame's layers are for training: they read no cache"
        y = short_convolution(
            x,
            self.weight.squeeze(1),
            self.bias,
            positions_BT=positions_in_documents(x, cu_seqlens),
            silu=self.activation is not None,
        )
        return y, None


def replace_short_convolutions(model: nn.Module) -> None:
    """Make `PackedShortConvolution` of each of fla's `ShortConvolution`."""
    for module in model.modules():
        if type(module) is ShortConvolution:
            module.__class__ = PackedShortConvolution
        if hasattr(module, "_use_fused_qkv_conv"):  # by which GatedDeltaNet joins three for fla's kernel
            vars(module)["_use_fused_qkv_conv"] = _never


def _never(*_: Any, **__: Any) -> bool:
    return False
