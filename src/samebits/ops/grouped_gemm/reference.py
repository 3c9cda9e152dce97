"""See ``samebits.ops.grouped_gemm``; torch only, one expert after the other."""

from itertools import pairwise

import torch
from torch import Tensor


def grouped_gemm(
    rows: Tensor,
    offsets: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    row_probs: Tensor | None = None,
) -> Tensor:
    """Return ``y`` of the rows up to ``offsets[E]``, rounded to the dtype of ``rows``.

    Args:
        rows: ``(R, K)``.
        offsets: ``(E + 1,)``.
        w: ``(E, N, K)``.
        bias: ``(E, N)``.
        row_probs: ``(R,)``, factor of the bias alone.

    Determinism: repeatable.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    parts = [rows.new_empty(0, w.shape[1])]
    for expert, (start, stop) in enumerate(pairwise(offsets.tolist())):
        y = rows[start:stop].to(wide) @ w[expert].to(wide).T
        if bias is not None:
            term = bias[expert].to(wide)
            if row_probs is not None:
                term = term * row_probs[start:stop].to(wide)[:, None]
            y = y + term
        parts.append(y.to(rows.dtype))
    return torch.cat(parts)
