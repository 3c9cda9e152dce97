"""One launch for ``samebits.ops.row_norm``: a program owns a row.

Squares are added in pairs of neighbours, then the pair sums in pairs, up to the whole row padded to
a power of two: an order that depends on H alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.ops._triton.launch import recordable
from samebits.ops._triton.rows import add_neighbours

# Elements of a row for each thread.
_PER_THREAD = 16


@recordable
@triton.jit
def _row_norm_kernel(y_ptr, scale_ptr, out_ptr, kept_ptr, H, eps, BLOCK_H: tl.constexpr):
    row = tl.program_id(0)
    if row < tl.load(kept_ptr):
        columns = tl.arange(0, BLOCK_H)
        inside = columns < H
        place = row.to(tl.int64) * H + columns
        scale = tl.load(scale_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(y_ptr + place, mask=inside, other=0.0) * scale
        total = add_neighbours(tl.reshape(v * v, (1, BLOCK_H)), 1, BLOCK_H)
        mean = tl.div_rn(tl.reshape(total, (1,)), tl.cast(H, tl.float32))
        inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
        tl.store(out_ptr + place, (v * inverse).to(out_ptr.dtype.element_ty), mask=inside)


def launch_row_norm(
    y: Tensor, scale: Tensor, kept: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """Return the norm of each row, ``(R, H)`` in ``dtype``; rows from ``kept`` on stay unwritten.

    Args:
        y: ``(R, H)`` fp32, contiguous.
        scale: ``(H,)``.
        kept: ``(1,)`` int32, number of rows.
        eps: Added to the mean square.
        dtype: Of the result.

    Determinism: repeatable; each row independent of the others.
    """
    rows, hidden = y.shape
    out = y.new_empty(rows, hidden, dtype=dtype)
    if out.numel() == 0:
        return out
    block = triton.next_power_of_2(hidden)
    _row_norm_kernel[(rows,)](
        y, scale.contiguous(), out, kept, hidden, eps, BLOCK_H=block,
        num_warps=min(max(block // (32 * _PER_THREAD), 1), 16), enable_fp_fusion=False,
    )  # fmt: skip
    return out
