"""``y`` of ``samebits.ops.scaled_gemm``, one launch over a device-side tile table.

A tile is (expert, first row, end) from the table of ``samebits.ops.permute``, as for the other
products. Weights are the first operand, so that few rows still make whole instructions. The block of
a scale is one step of the contraction; its sum starts from zero and is scaled and added in registers.
Rows past a tile's end are not loaded, and never stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.formats.matrix import QuantizedMatrix
from samebits.ops._triton.launch import recordable
from samebits.ops._triton.operand import weight_operand
from samebits.ops._triton.product import tile_of_position, weight_tile
from samebits.ops.permute.tuning import Tiles
from samebits.ops.scaled_gemm.tuning import Config


@triton.jit
def _scaled_sums(
    rows_ptr, row_scales_ptr, source, live,
    w, stride_we, stride_wn, stride_wk, scales_ptr, stride_se, stride_sn, stride_sk,
    expert, column, N, K,
    TMA: tl.constexpr, SCALE_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return ``[BLOCK_N, BLOCK_R]`` scaled sums over the blocks of K, ascending."""
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = rows_ptr + (source * K)[:, None] + ks[None, :]
    row_scale_ptrs = row_scales_ptr + source * tl.cdiv(K, BLOCK_K)
    # Rows past the last have the scale of the last; nothing of them is kept. One scale, where all
    # rows of the tile have the same.
    n = column + tl.arange(0, 1 if SCALE_ROWS % BLOCK_N == 0 else BLOCK_N)
    scale_ptrs = scales_ptr + expert.to(tl.int64) * stride_se
    scale_ptrs += (tl.minimum(n, N - 1) // SCALE_ROWS).to(tl.int64) * stride_sn
    sums = tl.zeros((BLOCK_N, BLOCK_R), tl.float32)
    for k in range(0, K, BLOCK_K):
        block = k // BLOCK_K
        w_tile = weight_tile(
            w, stride_we, stride_wn, stride_wk, expert, column, k, N, K, N,
            False, TMA, False, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        a = tl.load(a_ptrs + k, mask=live[:, None] & (k + ks < K)[None, :], other=0.0)
        row_scale = tl.load(row_scale_ptrs + block, mask=live, other=0.0)
        scale = tl.load(scale_ptrs + block.to(tl.int64) * stride_sk)
        term = tl.dot(w_tile, a.T)
        sums += (term * row_scale[None, :]) * scale[:, None]
    return sums


@recordable
@triton.jit
def _scaled_product_kernel(
    rows_ptr, row_scales_ptr,
    w, stride_we, stride_wn, stride_wk, scales_ptr, stride_se, stride_sn, stride_sk,
    bias_ptr, probs_ptr, y_ptr,
    slots_ptr, tile_expert_ptr, tile_row_ptr, tile_end_ptr, tiles_ptr,
    N, K,
    TMA: tl.constexpr, SCALE_ROWS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles = tl.load(tiles_ptr)
    column_blocks = tl.cdiv(N, BLOCK_N)
    for position in range(tl.program_id(0), tiles * column_blocks, tl.num_programs(0)):
        tile, block = tile_of_position(position, tiles, column_blocks, GROUP)
        expert = tl.load(tile_expert_ptr + tile)
        rows = tl.load(tile_row_ptr + tile) + tl.arange(0, BLOCK_R)
        live = rows < tl.load(tile_end_ptr + tile)
        source = tl.where(live, rows, 0).to(tl.int64)
        sums = _scaled_sums(
            rows_ptr, row_scales_ptr, source, live,
            w, stride_we, stride_wn, stride_wk, scales_ptr, stride_se, stride_sn, stride_sk,
            expert, block * BLOCK_N, N, K,
            TMA, SCALE_ROWS, BLOCK_R, BLOCK_N, BLOCK_K,
        ).T  # fmt: skip
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
        config: Tile; one for all calls, see ``tuning``.

    Determinism: each step of the contract's rule, blocks ascending; a row's bits depend on that row
    and on the tile alone.
    """
    bias = None if bias is None else bias.contiguous()
    total, contraction = rows.shape
    columns, held = weight.shape[1], weight.format
    y = torch.empty(total, columns, dtype=dtype, device=rows.device)
    if total == 0:
        return y
    box = (config.block_n, held.columns)
    box = box if config.tma and weight.values.stride(2) == 1 else None
    source, strides, described = weight_operand(weight.values, box)
    work = tiles.expert.shape[0] * triton.cdiv(columns, config.block_n)
    _scaled_product_kernel[(min(work, config.programs),)](
        rows, row_scales, source, *strides, weight.scales, *weight.scales.stride(),
        bias, probs, y,
        slots, tiles.expert, tiles.row, tiles.end, tiles.count,
        columns, contraction,
        TMA=described, SCALE_ROWS=held.rows, GROUP=config.group,
        BLOCK_R=config.block_r, BLOCK_N=config.block_n, BLOCK_K=held.columns,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return y
