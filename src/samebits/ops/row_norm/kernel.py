"""The launches of ``samebits.ops.row_norm``: a program owns a row.

Squares are added in pairs of neighbours, then the pair sums in pairs, up to the whole row padded to
a power of two: an order that depends on H alone. The backward adds blocks of 1024 columns that way,
and the blocks in ascending order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.ops._triton.launch import recordable
from samebits.ops._triton.rows import add_neighbours, expert_of_row, sum_ascending

# Elements of a row for each thread.
_PER_THREAD = 16
# Columns that the backward adds in pairs.
_COLUMNS = 1024


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


@triton.jit
def _sum_of(values, BLOCK: tl.constexpr):
    """Return the sum of ``[BLOCK]`` numbers, by pairs."""
    sums = add_neighbours(tl.reshape(values, (1, BLOCK)), 1, BLOCK)
    return tl.sum(tl.reshape(sums, (1,)), 0)


@recordable
@triton.jit(do_not_specialize=["R"])
def _row_norm_backward_kernel(
    y_ptr, scale_ptr, dout_ptr, stride_dt, y_probs_ptr, h_probs_ptr, bias_ptr,
    slots_ptr, offsets_ptr, inverse_ptr,
    dy_ptr, term_ptr, dp_ptr, done_ptr, bounds_ptr,
    R, H, eps, topk,
    E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    kept = tl.load(offsets_ptr + E)
    dtype = dy_ptr.dtype.element_ty
    if row == 0:
        tl.store(bounds_ptr, 0)
        tl.store(bounds_ptr + 1, kept)
    if dp_ptr is not None:
        # There are as many rows as slots: a dropped slot is written by the row of its number.
        if tl.load(inverse_ptr + row) >= R:
            tl.store(dp_ptr + row, 0.0)
            if done_ptr is not None:
                tl.store(done_ptr + row, 1)
    if row < kept:
        slot = tl.load(slots_ptr + row)
        y_row = y_ptr + row.to(tl.int64) * H
        dout_row = dout_ptr + (slot // topk).to(tl.int64) * stride_dt
        block = tl.arange(0, BLOCK)
        p = 1.0
        if y_probs_ptr is not None:
            p = tl.load(y_probs_ptr + slot).to(tl.float32)

        square = 0.0
        for start in range(0, H, BLOCK):
            columns = start + block
            inside = columns < H
            scale = tl.load(scale_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(y_row + columns, mask=inside, other=0.0) * scale
            square += _sum_of(v * v, BLOCK)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square, tl.cast(H, tl.float32)) + eps))

        along = 0.0
        dp = 0.0
        for start in range(0, H, BLOCK):
            columns = start + block
            inside = columns < H
            scale = tl.load(scale_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            normed = tl.load(y_row + columns, mask=inside, other=0.0) * scale * inverse
            dout = tl.load(dout_row + columns, mask=inside, other=0.0).to(tl.float32)
            along += _sum_of(dout * p * normed, BLOCK)
            if y_probs_ptr is not None:
                dp += _sum_of(dout * normed.to(dtype).to(tl.float32), BLOCK)
        mean = tl.div_rn(along, tl.cast(H, tl.float32))

        expert = 0
        if bias_ptr is not None:
            expert = expert_of_row(offsets_ptr, row, E)
        for start in range(0, H, BLOCK):
            columns = start + block
            inside = columns < H
            scale = tl.load(scale_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            y = tl.load(y_row + columns, mask=inside, other=0.0)
            dout = tl.load(dout_row + columns, mask=inside, other=0.0).to(tl.float32)
            dv = inverse * (dout * p - y * scale * inverse * mean)
            dy = dv * scale
            place = row.to(tl.int64) * H + columns
            tl.store(dy_ptr + place, dy.to(dtype), mask=inside)
            tl.store(term_ptr + place, dv * y, mask=inside)
            if bias_ptr is not None:
                bias_row = bias_ptr + expert.to(tl.int64) * H
                bias = tl.load(bias_row + columns, mask=inside, other=0.0).to(tl.float32)
                dp += _sum_of(dy * bias, BLOCK)

        if dp_ptr is not None:
            if h_probs_ptr is not None:
                # Where the norm undoes p, what is left of its gradient is a small difference of
                # large numbers, but it has a form without one: Σ dn · n · eps · inverse² / p.
                rest = eps * inverse * inverse
                done = rest <= 0.5
                factor = tl.where(done, tl.load(h_probs_ptr + slot).to(tl.float32), 1.0)
                dp = tl.where(done, tl.div_rn(rest * along, factor), dp)
                tl.store(done_ptr + slot, done.to(tl.int32))
            tl.store(dp_ptr + slot, dp)


@recordable
@triton.jit(do_not_specialize=["R"])
def _row_norm_probs_kernel(
    partial_ptr, inverse_ptr, found_ptr, done_ptr, dp_ptr, R, partials, BLOCK_S: tl.constexpr
):
    slots = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    inside = slots < R
    rows = tl.load(inverse_ptr + slots, mask=inside, other=0).to(tl.int64)
    open_ = inside & (tl.load(done_ptr + slots, mask=inside, other=1) == 0)
    sums = sum_ascending(partial_ptr + tl.where(open_, rows, 0) * partials, open_, partials)
    dp = tl.load(found_ptr + slots, mask=inside, other=0.0)
    tl.store(dp_ptr + slots, tl.where(open_, sums + dp, dp), mask=inside)


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


class NormGradients(NamedTuple):
    """What the backward of the norm leaves."""

    # Gradient of y, (R, H), in D; rows of no expert stay unwritten.
    y: Tensor
    # Terms of the gradient of the scale, (R, H) fp32, and the bounds of their rows, (2,) int32.
    terms: Tensor
    bounds: Tensor
    # (T, K) fp32 gradient of the probabilities, 0 where dropped; None where they scale the input.
    # Where they scale h: that of the slots that are ``done``, and what the bias adds to the others'.
    probs: Tensor | None
    done: Tensor | None


def launch_row_norm_backward(
    y: Tensor,
    scale: Tensor,
    dout: Tensor,
    offsets: Tensor,
    slots: Tensor,
    inverse: Tensor,
    eps: float,
    *,
    y_probs: Tensor | None,
    h_probs: Tensor | None,
    bias: Tensor | None,
) -> NormGradients:
    """Return the gradients of the norm of each row; see ``samebits.ops.row_norm``.

    Args:
        y: ``(R, H)`` fp32 as the forward had it, contiguous; becomes ``terms``.
        scale: ``(H,)``.
        dout: ``(T, H)`` gradient of the output in D, last dimension contiguous.
        offsets: ``(E + 1,)`` int32.
        slots: ``(R,)`` int32 slot of each row.
        inverse: ``(R,)`` int32 row of each slot.
        eps: Added to the mean square.
        y_probs: ``(T, K)`` factor of the normed rows, contiguous.
        h_probs: ``(T, K)`` factor of h, contiguous; one of both at most.
        bias: ``(E, H)``, contiguous, whose factor ``h_probs`` is too; read with ``h_probs`` only.

    Determinism: repeatable; each row independent of the others.
    """
    rows, hidden = y.shape
    probs = h_probs if y_probs is None else y_probs
    dp = None if probs is None else torch.empty_like(probs, dtype=torch.float32)
    done = None
    if dp is not None and h_probs is not None:
        done = y.new_empty(rows, dtype=torch.int32)
    bounds = y.new_empty(2, dtype=torch.int32)
    dy = y.new_empty(rows, hidden, dtype=dout.dtype)
    if rows == 0:
        return NormGradients(dy, y, bounds.zero_(), dp, done)
    block = min(triton.next_power_of_2(hidden), _COLUMNS)
    _row_norm_backward_kernel[(rows,)](
        y, scale.contiguous(), dout, dout.stride(0), y_probs, h_probs,
        None if h_probs is None else bias,
        slots, offsets, inverse,
        dy, y, dp, done, bounds,
        rows, hidden, eps, rows // dout.shape[0],
        E=offsets.shape[0] - 1, BLOCK=block,
        num_warps=max(block // 256, 1), enable_fp_fusion=False,
    )  # fmt: skip
    return NormGradients(dy, y, bounds, dp, done)


def launch_row_norm_probs(partial: Tensor, inverse: Tensor, found: Tensor, done: Tensor) -> Tensor:
    """Return ``dp``, ``(T, K)`` fp32: ``found``, and for slots that are not done, sums beside it.

    Args:
        partial: ``(R, n)`` fp32 sums by row.
        inverse: ``(R,)`` int32 row of each slot.
        found: Of ``NormGradients``.
        done: Of ``NormGradients``.

    Determinism: partial sums in ascending order.
    """
    dp = torch.empty_like(found)
    if dp.numel():
        _row_norm_probs_kernel[(triton.cdiv(dp.numel(), 128),)](
            partial, inverse, found, done, dp, dp.numel(), partial.shape[1],
            BLOCK_S=128, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return dp
