"""``y`` of ``samebits.ops.scaled_gemm``, one launch over a device-side tile table.

A tile is (expert, first row, end) from the table of ``samebits.ops.permute``, as for the other
products. Few rows are the second operand, so that weights still make whole instructions; many are the
first, so that a thread has few rows, and their scales. The block of a scale is one step of the
contraction; its sum starts from zero and is scaled and added in registers. What is loaded past a
tile's end is never stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.formats.matrix import QuantizedMatrix
from samebits.ops._triton.launch import recordable
from samebits.ops._triton.operand import row_operand, weight_operand
from samebits.ops._triton.product import tile_of_position, weight_tile
from samebits.ops.permute.tuning import Tiles
from samebits.ops.scaled_gemm.tuning import Config


@triton.jit
def _row_tile(
    rows, first_row, source, k, K,
    TMA: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load ``BLOCK_K`` columns of neighbouring rows."""
    if TMA:
        return rows.load([first_row, k])
    else:
        ks = k + tl.arange(0, BLOCK_K)
        place = rows + (source * K)[:, None] + ks[None, :]
        return tl.load(place, mask=(ks < K)[None, :], other=0.0)


@triton.jit
def _scaled_sums(
    rows, row_scales_ptr, first_row, source,
    w, stride_we, stride_wn, stride_wk, scales_ptr, stride_se, stride_sn, stride_sk,
    expert, column, N, K,
    ROWS_TMA: tl.constexpr, TMA: tl.constexpr, SWAP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return ``[BLOCK_R, BLOCK_N]`` scaled sums over the blocks of K, ascending."""
    blocks = tl.cdiv(K, BLOCK_K)
    row_scale_ptrs = row_scales_ptr + source * blocks
    # Rows of the matrix past the last have the scale of the last; nothing of them is kept. One scale,
    # where all rows of the tile have the same.
    n = column + tl.arange(0, 1 if SCALE_ROWS % BLOCK_N == 0 else BLOCK_N)
    scale_ptrs = scales_ptr + expert.to(tl.int64) * stride_se
    scale_ptrs += (tl.minimum(n, N - 1) // SCALE_ROWS).to(tl.int64) * stride_sn
    # Scales are loaded a block ahead: nothing else would hide the time that takes.
    row_scale, scale = tl.load(row_scale_ptrs), tl.load(scale_ptrs)
    if SWAP:
        sums = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    else:
        sums = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for block in range(blocks):
        following = tl.minimum(block + 1, blocks - 1).to(tl.int64)
        next_row_scale = tl.load(row_scale_ptrs + following)
        next_scale = tl.load(scale_ptrs + following * stride_sk)
        k = block * BLOCK_K
        w_tile = weight_tile(
            w, stride_we, stride_wn, stride_wk, expert, column, k, N, K, N,
            False, TMA, False, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        a = _row_tile(rows, first_row, source, k, K, ROWS_TMA, BLOCK_K)
        if SWAP:
            sums += (tl.dot(w_tile, a.T) * row_scale[None, :]) * scale[:, None]
        else:
            sums += (tl.dot(a, w_tile.T) * row_scale[:, None]) * scale[None, :]
        row_scale, scale = next_row_scale, next_scale
    if SWAP:
        sums = sums.T
    return sums


@recordable
@triton.jit(do_not_specialize=["stride_se", "stride_sn"])
def _scaled_product_kernel(
    rows_operand, row_scales_ptr,
    w, stride_we, stride_wn, stride_wk, scales_ptr, stride_se, stride_sn, stride_sk,
    bias_ptr, probs_ptr, y_ptr,
    slots_ptr, tile_expert_ptr, tile_row_ptr, tile_end_ptr, tiles_ptr,
    N, K,
    ROWS_TMA: tl.constexpr, TMA: tl.constexpr, SWAP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles = tl.load(tiles_ptr)
    column_blocks = tl.cdiv(N, BLOCK_N)
    for position in range(tl.program_id(0), tiles * column_blocks, tl.num_programs(0)):
        tile, block = tile_of_position(position, tiles, column_blocks, GROUP)
        expert = tl.load(tile_expert_ptr + tile)
        first_row = tl.load(tile_row_ptr + tile)
        rows = first_row + tl.arange(0, BLOCK_R)
        live = rows < tl.load(tile_end_ptr + tile)
        source = tl.where(live, rows, 0).to(tl.int64)
        sums = _scaled_sums(
            rows_operand, row_scales_ptr, first_row, source,
            w, stride_we, stride_wn, stride_wk, scales_ptr, stride_se, stride_sn, stride_sk,
            expert, block * BLOCK_N, N, K,
            ROWS_TMA, TMA, SWAP, SCALE_ROWS, BLOCK_R, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = columns < N
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert.to(tl.int64) * N + columns, mask=inside, other=0.0)
            bias = bias.to(tl.float32)[None, :]
            if probs_ptr is not None:
                slots = tl.load(slots_ptr + rows, mask=live, other=0)
                p = tl.load(probs_ptr + slots, mask=live, other=0.0).to(tl.float32)
                bias = bias * p[:, None]
            sums = sums + bias
        y_ptrs = y_ptr + (source * N)[:, None] + columns[None, :]
        tl.store(y_ptrs, sums.to(y_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


def launch_scaled_gemm(
    rows: Tensor,
    row_scales: Tensor,
    slots: Tensor,
    tiles: Tiles,
    weight: QuantizedMatrix,
    bias: Tensor | None,
    probs: Tensor | None,
    dtype: torch.dtype,
    config: Config,
) -> Tensor:
    """Return ``y``, ``(R, N)``; rows of no tile stay unwritten.

    Args:
        rows: ``(R, K)`` E4M3, contiguous, sorted by expert.
        row_scales: ``(R, ⌈K / C⌉)`` fp32, contiguous.
        slots: ``(R,)`` int32 slot of each row; read with ``probs`` only.
        tiles: Tiles of ``config.block_r`` rows.
        weight: E4M3 with fp32 scales of C columns, C a power of two from 32 on, any strides.
        bias: ``(E, N)``.
        probs: Factor of the bias, by slot.
        dtype: Of y.
        config: Tile; see ``tuning``.

    Determinism: each step of the contract's rule, blocks ascending; a row's bits depend on that row
    alone.
    """
    bias = None if bias is None else bias.contiguous()
    total, contraction = rows.shape
    columns, held = weight.shape[1], weight.format
    y = torch.empty(total, columns, dtype=dtype, device=rows.device)
    if total == 0:
        return y
    if config.specialized:
        from samebits.ops.scaled_gemm.specialized.kernel import launch_specialized

        operands = (rows, row_scales, slots, tiles, weight, bias, probs, y)
        if launch_specialized(*operands, config):
            return y
        config = config.of_plain_rows()
    box, row_box = (config.block_n, held.columns), (config.block_r, held.columns)
    source, strides, described = weight_operand(weight.values, box if config.tma else None)
    rows_operand, rows_described = row_operand(rows, row_box if config.tma else None)
    if config.tma and not (described and rows_described and weight.values.stride(2) == 1):
        config = config.for_pointers()
        source, strides, described = weight_operand(weight.values, None)
        rows_operand, rows_described = rows, False
    work = tiles.expert.shape[0] * triton.cdiv(columns, config.block_n)
    _scaled_product_kernel[(min(work, config.programs),)](
        rows_operand, row_scales, source, *strides, weight.scales, *weight.scales.stride(),
        bias, probs, y,
        slots, tiles.expert, tiles.row, tiles.end, tiles.count,
        columns, contraction,
        ROWS_TMA=rows_described, TMA=described, SWAP=config.swap, SCALE_ROWS=held.rows,
        GROUP=config.group, BLOCK_R=config.block_r, BLOCK_N=config.block_n, BLOCK_K=held.columns,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return y
