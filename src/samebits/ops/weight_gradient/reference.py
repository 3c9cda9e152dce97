"""See ``samebits.ops.weight_gradient``; torch only, one expert after the other."""

from itertools import pairwise

import torch
from torch import Tensor


def weight_gradient(a: Tensor, b: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``(E, M, N)``: the sum of ``a[r] ⊗ b[r]`` over the rows of each expert.

    Args:
        a: ``(R, M)``.
        b: ``(R, N)``.
        offsets: ``(E + 1,)`` first row of each expert.
        dtype: Of the result.

    Determinism: repeatable.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    spans = pairwise(offsets.tolist())
    return torch.stack([(a[i:j].to(wide).T @ b[i:j].to(wide)).to(dtype) for i, j in spans])


def bias_gradient(
    rows: Tensor, offsets: Tensor, row_probs: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return ``(E, N)``: the sum of the rows of each expert, times their probabilities.

    Args:
        rows: ``(R, N)``.
        offsets: ``(E + 1,)`` first row of each expert.
        row_probs: ``(R,)`` factor of each row.
        dtype: Of the result.

    Determinism: repeatable.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    scaled = rows.to(wide) if row_probs is None else rows.to(wide) * row_probs.to(wide)[:, None]
    return torch.stack([scaled[i:j].sum(0).to(dtype) for i, j in pairwise(offsets.tolist())])
