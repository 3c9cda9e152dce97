"""See ``samebits.ops.row_norm``; torch only."""

import torch
from torch import Tensor


def row_norm(y: Tensor, scale: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return the norm of each row of ``y`` (R, H), computed in its dtype, rounded to ``dtype``.

    Determinism: repeatable.
    """
    scaled = y * scale.to(y.dtype)
    return (scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + eps)).to(dtype)


def row_norm_backward(y: Tensor, scale: Tensor, dn: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``y`` (R, H) and, as terms to add over the rows, of the scale.

    Determinism: repeatable.
    """
    scale = scale.to(y.dtype)
    v = y * scale
    inverse = torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    normed = v * inverse
    dv = inverse * (dn - normed * (dn * normed).mean(-1, keepdim=True))
    return dv * scale, dv * y
