"""The short convolution of `short_convolution.py` in plain torch: anywhere, in fp32 (fp64 for fp64 inputs).

A tap is the sequence moved along by as many rows, with zeros for what lies in another document.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def torch_forward(x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, positions_T: Tensor, silu: bool) -> Tensor:
    """Return the convolution `[T, C]` in the dtype of `x_TC`."""
    z_TC = _before_activation(_wide(x_TC), weight_CW, bias_C, positions_T)
    return (F.silu(z_TC) if silu else z_TC).to(x_TC.dtype)


def torch_backward(
    d_y_TC: Tensor, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, positions_T: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of `x_TC`, in its dtype, and in that of sums of the taps `[C, W]` and of the bias."""
    wide_TC, d_z_TC = _wide(x_TC), _wide(d_y_TC)
    if silu:
        z_TC = _before_activation(wide_TC, weight_CW, bias_C, positions_T)
        s_TC = z_TC.sigmoid()
        d_z_TC = d_z_TC * (s_TC + z_TC * s_TC * (1 - s_TC))
    d_x_TC, d_taps = torch.zeros_like(wide_TC), []
    for distance, tap_C in _taps(weight_CW):
        own_T1 = (positions_T >= distance)[:, None]
        d_x_TC += _moved(torch.where(own_T1, d_z_TC, 0), -distance) * tap_C
        d_taps.append((d_z_TC * torch.where(own_T1, _moved(wide_TC, distance), 0)).sum(0))
    return d_x_TC.to(x_TC.dtype), torch.stack(d_taps[::-1], dim=1), None if bias_C is None else d_z_TC.sum(0)


def _before_activation(wide_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, positions_T: Tensor) -> Tensor:
    z_TC = torch.zeros_like(wide_TC) if bias_C is None else bias_C.to(wide_TC.dtype).repeat(wide_TC.shape[0], 1)
    for distance, tap_C in _taps(weight_CW):
        own_T1 = (positions_T >= distance)[:, None]
        z_TC += torch.where(own_T1, _moved(wide_TC, distance), 0) * tap_C
    return z_TC


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _taps(weight_CW: Tensor) -> list[tuple[int, Tensor]]:
    """Return each tap `[C]` with how many tokens back it looks; the last of a weight is the token's own."""
    return list(enumerate(_wide(weight_CW).flip(1).unbind(1)))


def _moved(x_TC: Tensor, distance: int) -> Tensor:
    """Return rows moved down by `distance` (up, where that is negative), zeros where none came."""
    rows = min(abs(distance), x_TC.shape[0])
    kept_TC = x_TC[: x_TC.shape[0] - rows] if distance > 0 else x_TC[rows:]
    return F.pad(kept_TC, (0, 0, rows, 0) if distance > 0 else (0, 0, 0, rows))
