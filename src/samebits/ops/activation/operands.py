"""The tensors of an activation call, and what a backward returns."""

from typing import NamedTuple

import torch
from torch import Tensor


class Operands(NamedTuple):
    """Tensors of a forward call; all that its backward needs besides ``dh``."""

    # First projection of each row, (R, 2F) or (R, F), any row stride.
    z: Tensor
    # Added to z in fp32 before its rounding: (2F,) or (F,), or (E, 2F) or (E, F) with offsets.
    bias: Tensor | None = None
    # (E + 1,) int32 or int64: rows of expert e are offsets[e] … offsets[e + 1] − 1.
    offsets: Tensor | None = None
    # Factor of each row of h, (R,).
    row_probs: Tensor | None = None
    # (1,) int32 or int64 on the device: rows from there on are neither read nor written.
    num_rows: Tensor | None = None
    # (2,) fp32: limit and linear offset, in place of those of an activation that has them.
    scalars: Tensor | None = None


class Wanted(NamedTuple):
    """Which optional results a backward computes."""

    dp: bool = False
    h: bool = False
    dbias: bool = False


class Backward(NamedTuple):
    """Results of a backward; None where not wanted."""

    # Gradient of z (and of every row of the bias), shape and dtype of z, contiguous.
    dz: Tensor
    # Gradient of row_probs, (R,), the wide dtype.
    dp: Tensor | None
    # h, recomputed: the operand of the gradient of the second projection.
    h: Tensor | None
    # Gradient of the bias, its shape and dtype.
    dbias: Tensor | None


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of everything between two roundings: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
