"""See ``samebits.ops.scaled_gemm``; torch only, on any device, one expert at a time."""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.amp import is_autocast_available as _has_autocast

from samebits.errors import must
from samebits.formats.matrix import QuantizedMatrix


def scaled_product(
    rows: QuantizedMatrix, weight: QuantizedMatrix, expert: int, addend: Tensor | None = None
) -> Tensor:
    """Return ``rows · weight[expert]ᵀ + addend`` in fp32, ``(R, N)``, not yet rounded to D.

    With fp32 scales, for each block b of the contraction in ascending order, every step rounded to
    fp32::

        t = Σ a[r, k] * w[n, k]  over k in b      (one accumulator; here: the exact sum, rounded)
        sum += (t * a_scale[r, b]) * w_scale[n, b]

    With E8M0 scales, the product of the numbers themselves in one fp32 accumulator.

    Args:
        rows: ``(1, R, K)``.
        weight: ``(E, N, K)``, scales of the same kind and as many columns to a block.
        expert: Which matrix.
        addend: ``(R, N)`` or ``(N,)`` fp32: a bias.

    Raises:
        ValueError: The formats do not go together, or there is no such matrix.

    Determinism: with fp32 scales exact, hence independent of other rows; otherwise torch's product.
    """
    a, w = rows.format, weight.format
    if (a.scales, a.columns) != (w.scales, w.columns) or weight.columns != rows.columns:
        rule = f"have the blocks of the rows ({a}, K = {rows.columns})"
        raise ValueError(must("weight", rule, f"{w}, K = {weight.columns}"))
    if rows.shape[0] != 1:
        raise ValueError(must("rows", "be one matrix, (1, R, K)", rows.shape))
    if not 0 <= expert < weight.shape[0]:
        raise ValueError(must("expert", f"be in [0, {weight.shape[0]})", expert))
    if a.scales == "e8m0":
        only = weight.select([expert]).dequantize(torch.float32)[0]
        numbers = rows.dequantize(torch.float32)[0]
        device = numbers.device.type
        # Autocast would narrow the fp32 product.
        with torch.autocast(device, enabled=False) if _has_autocast(device) else nullcontext():
            total = numbers @ only.T
        return total if addend is None else total + addend
    # Products of two E4M3 numbers and sums of 128 of them are exact in fp64, in any order.
    left, right = rows.values[0].double(), weight.values[expert].double()
    left_scales = rows.scales[0]
    right_scales = weight.scales[expert].repeat_interleave(w.rows, 0)[: weight.shape[1]]
    total = torch.zeros(left.shape[0], right.shape[0], device=left.device)
    for block in range(left_scales.shape[1]):
        span = slice(block * a.columns, (block + 1) * a.columns)
        term = (left[:, span] @ right[:, span].T).float()
        total += term * left_scales[:, block, None] * right_scales[:, block]
    return total if addend is None else total + addend
