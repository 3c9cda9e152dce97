"""Products of rows with one expert's matrix: which tile, which matrix rows, and the one sum."""

import triton
import triton.language as tl


@triton.jit
def tile_of_position(position, tiles, column_blocks, GROUP: tl.constexpr):
    """Return (row tile, column block): ``GROUP`` row tiles share each column block in turn."""
    per_group = GROUP * column_blocks
    first = (position // per_group) * GROUP
    size = tl.minimum(tiles - first, GROUP)
    inside = position % per_group
    return first + inside % size, inside // size


@triton.jit
def stored_columns(column, span, PAIRED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return for each of ``BLOCK_N`` tile columns the place to bound and the row of the matrix.

    Paired tiles hold BLOCK_N / 2 columns of each part from ``column`` on: the parts alternate in
    blocks of ``span`` rows (``span`` = F for halves).
    """
    n = tl.arange(0, BLOCK_N)
    if PAIRED:
        place = column + n % (BLOCK_N // 2)
        rows = (place // span) * (2 * span) + place % span + (n // (BLOCK_N // 2)) * span
        return place, rows
    else:
        return column + n, column + n


@triton.jit
def _described_tile(
    w, expert, column, k,
    PAIRED: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``weight_tile`` through a tensor descriptor, by what its box covers."""
    if TRANSPOSED:
        box = w.load([expert, k, 0, column]) if PAIRED else w.load([expert, k, column])
        return box.reshape(BLOCK_K, BLOCK_N).T
    else:
        box = w.load([expert, 0, column, k]) if PAIRED else w.load([expert, column, k])
        return box.reshape(BLOCK_N, BLOCK_K)


@triton.jit
def _pointed_tile(
    w, stride_we, stride_wn, stride_wk, expert, column, k, N, K, span,
    PAIRED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``weight_tile`` through pointers: any strides, any alignment, any layout."""
    place, rows = stored_columns(column, span, PAIRED, BLOCK_N)
    ks = k + tl.arange(0, BLOCK_K)
    ptrs = w + expert.to(tl.int64) * stride_we + rows[:, None].to(tl.int64) * stride_wn
    return tl.load(
        ptrs + ks[None, :].to(tl.int64) * stride_wk,
        mask=(place < N)[:, None] & (ks < K)[None, :],
        other=0.0,
    )


@triton.jit
def weight_tile(
    w, stride_we, stride_wn, stride_wk, expert, column, k, N, K, span,
    PAIRED: tl.constexpr, TMA: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load ``[BLOCK_N, BLOCK_K]`` of one expert's matrix; ``N`` and ``K`` bound it."""
    if TMA:
        return _described_tile(w, expert, column, k, PAIRED, TRANSPOSED, BLOCK_N, BLOCK_K)
    else:
        return _pointed_tile(
            w,
            stride_we,
            stride_wn,
            stride_wk,
            expert,
            column,
            k,
            N,
            K,
            span,
            PAIRED,
            BLOCK_N,
            BLOCK_K,
        )


@triton.jit
def contract_halves(
    a_ptrs, w, expert, column, N, K,
    TRANSPOSED: tl.constexpr, K_TAIL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``contract`` of paired columns, the weights as first operand: a product for each half.

    A box of both halves would be reshaped, which makes Triton 3.6 read that operand into registers
    and overwrite them while the product before still runs: values changed from run to run.
    """
    ks = tl.arange(0, BLOCK_K)
    first = tl.zeros((BLOCK_N // 2, BLOCK_R), tl.float32)
    second = tl.zeros((BLOCK_N // 2, BLOCK_R), tl.float32)
    for k in range(0, K, BLOCK_K):
        left = _described_tile(w, expert, column, k, False, TRANSPOSED, BLOCK_N // 2, BLOCK_K)
        right = _described_tile(w, expert, N + column, k, False, TRANSPOSED, BLOCK_N // 2, BLOCK_K)
        a_place = a_ptrs + (k + ks)[None, :]
        if K_TAIL:
            a = tl.load(a_place, mask=(k + ks < K)[None, :], other=0.0)
        else:
            a = tl.load(a_place)
        first = tl.dot(left, a.T, first, input_precision="ieee")
        second = tl.dot(right, a.T, second, input_precision="ieee")
    return tl.reshape(tl.permute(tl.join(first, second), (1, 2, 0)), (BLOCK_R, BLOCK_N))


@triton.jit
def contract(
    a_ptrs, w, stride_we, stride_wn, stride_wk, expert, column, N, K, span,
    PAIRED: tl.constexpr, TMA: tl.constexpr, TRANSPOSED: tl.constexpr, SWAP: tl.constexpr,
    K_TAIL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return ``[BLOCK_R, BLOCK_N]`` fp32 sums over K ascending; ``a_ptrs`` is ``[BLOCK_R, 1]``."""
    ks = tl.arange(0, BLOCK_K)
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    else:
        acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        w_tile = weight_tile(
            w, stride_we, stride_wn, stride_wk, expert, column, k, N, K, span,
            PAIRED, TMA, TRANSPOSED, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        a_place = a_ptrs + (k + ks)[None, :]
        if K_TAIL:
            a = tl.load(a_place, mask=(k + ks < K)[None, :], other=0.0)
        else:
            a = tl.load(a_place)
        if SWAP:
            acc = tl.dot(w_tile, a.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(a, w_tile.T, acc, input_precision="ieee")
    if SWAP:
        acc = acc.T
    return acc


@triton.jit
def contract_described(
    rows, first_row, w, stride_we, stride_wn, stride_wk, expert, column, N, K,
    TMA: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``contract`` of neighbouring rows behind a descriptor, from ``first_row`` on."""
    acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        w_tile = weight_tile(
            w, stride_we, stride_wn, stride_wk, expert, column, k, N, K, N,
            False, TMA, TRANSPOSED, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        acc = tl.dot(rows.load([first_row, k]), w_tile.T, acc, input_precision="ieee")
    return acc
