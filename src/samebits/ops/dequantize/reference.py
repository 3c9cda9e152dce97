"""See ``samebits.ops.dequantize``; torch only."""

import torch
from torch import Tensor

from samebits.formats.matrix import QuantizedMatrix


def dequantize(matrix: QuantizedMatrix, dtype: torch.dtype, offsets: Tensor | None) -> Tensor:
    """Return ``(E, N, K)`` in ``dtype``; experts without rows in ``offsets`` are NaN.

    Determinism: elementwise.
    """
    dense = matrix.dequantize(dtype)
    if offsets is not None:
        dense[offsets.diff() == 0] = torch.nan
    return dense
