"""Products of rows with one expert's quantised matrix, upcast on the way to the matrix unit.

The bits are those of ``samebits.ops._triton.product`` on the dequantised matrix. Weights become
operands in registers, so products are ``mma.sync`` (never asynchronous ``wgmma``, which may read
registers that the next step overwrites), and Triton orders the contraction of such operands by
itself: it deals 32 columns to two instructions of 16 as (2 halves, 4 threads, 2 instructions, 2),
where the other kernels take 16 neighbours. Both operands are therefore reordered first, in
registers: each instruction then has 16 neighbours again, in another order among themselves. That
changes no bit: on an H200 the sum of an instruction does not depend on the order of its products
(docs/quantized.md; tests/backends/test_quantized_gpu.py holds every tile to it).
"""

import triton
import triton.language as tl

from samebits.ops._triton.decoding import (
    e2m1_times,
    e2m1_times_power,
    e4m3_times,
    scale_factors,
)
from samebits.ops._triton.shuffled import contract_shuffled

# The largest E8M0 exponent that ``e2m1_times_power`` takes.
_LARGEST_POWER = tl.constexpr(128)


@triton.jit
def _dealt(tile, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return ``[BLOCK, BLOCK_K]`` with columns in the order of the matrix unit's registers."""
    parts = tl.reshape(tile, (BLOCK, BLOCK_K // 32, 2, 4, 2, 2))
    return tl.reshape(tl.permute(parts, (0, 1, 5, 3, 2, 4)), (BLOCK, BLOCK_K))


@triton.jit
def _dealt_pairs(first, second, DTYPE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the same of weights that come as pairs; see ``samebits.ops._triton.decoding``."""
    pairs = tl.join(first, second)
    tile = tl.join(pairs.to(tl.uint16), (pairs >> 16).to(tl.uint16)).to(DTYPE, bitcast=True)
    parts = tl.reshape(tile, (BLOCK, BLOCK_K // 32, 2, 4, 2, 2))
    return tl.reshape(tl.permute(parts, (0, 1, 4, 3, 2, 5)), (BLOCK, BLOCK_K))


@triton.jit
def _scales(
    ptrs, stride, k, K, SCALE_COLUMNS: tl.constexpr, NEAR: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load the scales of ``BLOCK_K`` columns, one of each ``GROUP``; ``ptrs`` is ``[BLOCK, 1]``.

    Up to ``NEAR`` of them are loaded at once: one by one they would keep the first cache busiest.
    """
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    EACH: tl.constexpr = NEAR if NEAR < GROUPS else GROUPS
    column = k // SCALE_COLUMNS + tl.arange(0, GROUPS)
    inside = (column < tl.cdiv(K, SCALE_COLUMNS))[None, :]
    places = ptrs + (column * stride)[None, :]
    if EACH > 1:
        inside = tl.max_constancy(inside, [1, EACH])
        places = tl.max_contiguous(tl.multiple_of(places, [1, EACH]), [1, EACH])
    return tl.load(places, mask=inside, other=0)


@triton.jit
def _weights(
    words, scales, factor, VALUES: tl.constexpr, SCALES: tl.constexpr, POWERS: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return the weights of a tile of words, ``[BLOCK, BLOCK_K]``, dealt."""
    FP16: tl.constexpr = DTYPE == tl.float16
    if POWERS:
        factors = scales.to(tl.uint32)
    else:
        factors = scale_factors(scales, factor, SCALES)
    spread = tl.broadcast_to(factors[:, :, None], (BLOCK, BLOCK_K // GROUP, GROUP // 4))
    spread = tl.reshape(spread, (BLOCK, BLOCK_K // 4))
    if VALUES == "e4m3":
        first, second = e4m3_times(words.to(tl.uint32, bitcast=True), spread, FP16)
    else:
        words = words.to(tl.uint16, bitcast=True)
        if POWERS:
            first, second = e2m1_times_power(words, spread)
        else:
            first, second = e2m1_times(words.to(tl.uint32), spread, FP16)
    return _dealt_pairs(first, second, DTYPE, BLOCK, BLOCK_K)


@triton.jit
def _sums(
    a_ptrs, live, words, scale_ptrs, stride, factor, expert, column, distance, K,
    VALUES: tl.constexpr, SCALES: tl.constexpr, SCALE_COLUMNS: tl.constexpr, NEAR: tl.constexpr,
    POWERS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the sums of one or two parts, ``[BLOCK, BLOCK_R]``, and the largest exponents.

    Scales are loaded one step ahead by hand: the pipeline of a loop takes no loads as narrow.
    """
    GROUP: tl.constexpr = BLOCK_K if SCALE_COLUMNS > BLOCK_K else SCALE_COLUMNS
    DTYPE: tl.constexpr = a_ptrs.dtype.element_ty
    first = tl.zeros((BLOCK, BLOCK_R), tl.float32)
    second = tl.zeros((BLOCK, BLOCK_R), tl.float32)
    one, other = scale_ptrs
    now = _scales(one, stride, 0, K, SCALE_COLUMNS, NEAR, GROUP, BLOCK_K)
    if PARTS == 2:
        now_other = _scales(other, stride, 0, K, SCALE_COLUMNS, NEAR, GROUP, BLOCK_K)
    largest = now
    ks = tl.arange(0, BLOCK_K)
    for k in range(0, K, BLOCK_K):
        inside = live[:, None] & (k + ks < K)[None, :]
        a = _dealt(tl.load(a_ptrs + (k + ks)[None, :], mask=inside, other=0.0), BLOCK_R, BLOCK_K).T
        tile = words.load([expert, column, k // 4]).reshape(BLOCK, BLOCK_K // 4)
        weights = _weights(
            tile, now, factor, VALUES, SCALES, POWERS, DTYPE, BLOCK, BLOCK_K, GROUP
        )  # fmt: skip
        first = tl.dot(weights, a, first)
        if POWERS:
            largest = tl.maximum(largest, now)
        now = _scales(one, stride, k + BLOCK_K, K, SCALE_COLUMNS, NEAR, GROUP, BLOCK_K)
        if PARTS == 2:
            tile = words.load([expert, column + distance, k // 4]).reshape(BLOCK, BLOCK_K // 4)
            weights = _weights(
                tile, now_other, factor, VALUES, SCALES, POWERS, DTYPE, BLOCK, BLOCK_K, GROUP
            )  # fmt: skip
            second = tl.dot(weights, a, second)
            if POWERS:
                largest = tl.maximum(largest, now_other)
            now_other = _scales(other, stride, k + BLOCK_K, K, SCALE_COLUMNS, NEAR, GROUP, BLOCK_K)
    return first, second, largest


@triton.jit
def contract_quantized(
    a_ptrs, live, words, scales_ptr, stride_se, stride_sn, stride_sk, global_ptr,
    expert, column, distance, N, K,
    FORMAT: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return ``[BLOCK_R, PARTS * BLOCK]`` fp32 sums over K ascending.

    Args:
        a_ptrs: ``[BLOCK_R, 1]`` pointers to rows; those that are not ``live`` are not read.
        words: Descriptor of the values, (E, N, K / 4) words of four columns.
        column: First row of the matrix in the tile; a second part is ``distance`` further.
        FORMAT: Kinds of values and scales, rows and columns of a block, and how many neighbouring
            scales lie at multiples of their size. "shuffled" and its WARPS where
            ``contract_shuffled`` takes the matrix.
    """
    if FORMAT[0] == "shuffled":
        return contract_shuffled(
            a_ptrs, live, words, scales_ptr, stride_se, stride_sn, stride_sk,
            expert, column, distance, N, K, FORMAT[1], PARTS, BLOCK_R, BLOCK, BLOCK_K,
        )  # fmt: skip
    else:
        return _contract_stored(
            a_ptrs, live, words, scales_ptr, stride_se, stride_sn, stride_sk, global_ptr,
            expert, column, distance, N, K, FORMAT, PARTS, BLOCK_R, BLOCK, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _contract_stored(
    a_ptrs, live, words, scales_ptr, stride_se, stride_sn, stride_sk, global_ptr,
    expert, column, distance, N, K,
    FORMAT: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``contract_quantized`` where no shuffled words are stored."""
    VALUES: tl.constexpr = FORMAT[0]
    SCALES: tl.constexpr = FORMAT[1]
    SCALE_ROWS: tl.constexpr = FORMAT[2]
    SCALE_COLUMNS: tl.constexpr = FORMAT[3]
    NEAR: tl.constexpr = FORMAT[4]
    n = column + tl.arange(0, BLOCK)
    scales_ptr += expert.to(tl.int64) * stride_se
    # Rows past the last have the scales of the last; nothing of them is kept.
    one = scales_ptr + (tl.minimum(n, N - 1) // SCALE_ROWS).to(tl.int64)[:, None] * stride_sn
    n += distance
    other = scales_ptr + (tl.minimum(n, N - 1) // SCALE_ROWS).to(tl.int64)[:, None] * stride_sn
    scale_ptrs = (one, other)
    factor = None
    if global_ptr is not None:
        factor = tl.load(global_ptr + expert)
    POWERS: tl.constexpr = (
        VALUES == "e2m1" and SCALES == "e8m0" and a_ptrs.dtype.element_ty == tl.bfloat16
    )
    first, second, largest = _sums(
        a_ptrs, live, words, scale_ptrs, stride_sk, factor, expert, column, distance, K,
        VALUES, SCALES, SCALE_COLUMNS, NEAR, POWERS, PARTS, BLOCK_R, BLOCK, BLOCK_K,
    )  # fmt: skip
    if POWERS:
        # Scales of 4 and more, and NaN: by fp32 products, which know no limit.
        if tl.max(largest.to(tl.int32)) > _LARGEST_POWER:
            first, second, largest = _sums(
                a_ptrs, live, words, scale_ptrs, stride_sk, factor, expert, column, distance, K,
                VALUES, SCALES, SCALE_COLUMNS, NEAR, False, PARTS, BLOCK_R, BLOCK, BLOCK_K,
            )  # fmt: skip
    if PARTS == 2:
        whole = tl.permute(tl.join(first, second), (1, 2, 0))
        return tl.reshape(whole, (BLOCK_R, 2 * BLOCK))
    else:
        return first.T
