"""See ``samebits.ops.row_norm``; torch only."""

import torch
from torch import Tensor


def row_norm(y: Tensor, scale: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return the norm of each row of ``y`` (R, H), computed in its dtype, rounded to ``dtype``.

    Determinism: repeatable.
    """
    scaled = y * scale.to(y.dtype)
    return (scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + eps)).to(dtype)
