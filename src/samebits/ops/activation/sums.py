"""Sums of a backward in torch only: dp over the columns of a row, dbias over the rows."""

from itertools import pairwise

from torch import Tensor
from torch.nn import functional

from samebits.ops.activation.blocks import live_rows
from samebits.ops.activation.operands import Operands, wide_dtype

# Columns of a sum of dp.
_PARTIAL = 64


def sum_columns(product: Tensor) -> Tensor:
    """Return the sum of each row: sums of 64 columns, then these in ascending order.

    Determinism: one order, whatever the number of rows.
    """
    rows, columns = product.shape
    missing = -columns % _PARTIAL
    padded = functional.pad(product, (0, missing)) if missing else product
    partials = padded.view(rows, -1, _PARTIAL).sum(-1)
    # The last running sum is the sum from left to right.
    return partials.cumsum(-1)[:, -1]


def sum_bias(dz: Tensor, operands: Operands, dbias: Tensor) -> None:
    """Write the sums of the rows of ``dz`` into ``dbias``, expert by expert.

    Determinism: as torch's sums.
    """
    wide, live = wide_dtype(dz.dtype), live_rows(operands)
    if operands.offsets is None:
        dbias.copy_(dz[:live].sum(0, dtype=wide))
        return
    bounds = [min(bound, live) for bound in operands.offsets.tolist()]
    for expert, (first, end) in enumerate(pairwise(bounds)):
        dbias[expert] = dz[first:end].sum(0, dtype=wide)
