"""The two projections of an expert layer, each one launch over a device-side tile table.

With ``t = slots[r] // K`` the token of row r, ``e`` the expert of a tile of rows::

    first    z[r, :] = D(Σ_i x[t, i] · gate_up[e, :, i] + gate_up_bias[e, :])     i ascending
             h[r, j] = D(glu(z[r])[j] [· p])
    second   y[r, :] = D(Σ_j h[r, j] · down[e, :, j] + down_bias[e, :] [· p])     j ascending

A tile is (expert, first row, end) from the table of ``samebits.ops.permute``; a program walks over
tiles × column blocks with the stride of the grid, row blocks that share a weight tile running
together (``GROUP``). One fp32 accumulator per output element, the contraction ascending, never
split: every tile shape, operand order (``SWAP``: weights as the first operand, for few rows) and
load path gives the same bits. Rows past a tile's end are loaded from row 0 and never stored.
A tile of at most ``SHORT`` rows (the last of an expert) is computed with that many.
Quantised matrices (``FORMAT``) are upcast on their way, see ``samebits.ops._triton.quantized``.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.activation import Activation
from samebits.formats.matrix import QuantizedMatrix
from samebits.formats.weights import Parameters
from samebits.ops._triton.columns import store_gate_up
from samebits.ops._triton.launch import recordable
from samebits.ops._triton.operand import matrix_operand, quantized_operand, row_operand
from samebits.ops._triton.product import (
    contract,
    contract_described,
    contract_halves,
    stored_columns,
    tile_of_position,
)
from samebits.ops._triton.quantized import contract_quantized
from samebits.ops.activation.tiles import TileOptions, act_tile, glu_tile
from samebits.ops.indirect_gemm.tuning import Config
from samebits.ops.permute.tuning import Tiles
from samebits.weights import Layout


@triton.jit
def split_parts(
    z, PAIRED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr
):
    """Return the first and second parts of ``[BLOCK_R, 2 * BLOCK_F]``, alternating by ``BLOCK``."""
    if PAIRED:
        return tl.split(tl.permute(tl.reshape(z, (BLOCK_R, 2, BLOCK_F)), (0, 2, 1)))
    elif BLOCK == 1:
        return tl.split(tl.reshape(z, (BLOCK_R, BLOCK_F, 2)))
    else:
        blocks = tl.reshape(z, (BLOCK_R, BLOCK_F // BLOCK, 2, BLOCK))
        first, second = tl.split(tl.permute(blocks, (0, 1, 3, 2)))
        return tl.reshape(first, (BLOCK_R, BLOCK_F)), tl.reshape(second, (BLOCK_R, BLOCK_F))


@triton.jit
def _first_tile(
    x_ptr, stride_xt, w, stride_we, stride_wn, stride_wk, bias_ptr, probs_ptr,
    h_ptr, z_ptr, slots_ptr,
    expert, first_row, end, block,
    H, F, topk, values,
    scales_ptr, stride_se, stride_sn, stride_sk, global_ptr,
    FORMAT: tl.constexpr,
    GATHER: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_UP_CAP: tl.constexpr,
    INTERLEAVE: tl.constexpr, UP_FIRST: tl.constexpr,
    TMA: tl.constexpr, TRANSPOSED: tl.constexpr, SWAP: tl.constexpr, K_TAIL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute ``BLOCK_F`` columns of up to ``BLOCK_R`` rows from ``first_row`` on."""
    # Columns that alternate in blocks which fit the tile come in one piece; others in two.
    PAIRED: tl.constexpr = GATED and (INTERLEAVE == 0 or BLOCK_F % INTERLEAVE != 0)
    PARTS: tl.constexpr = 2 if GATED else 1
    BLOCK_N: tl.constexpr = PARTS * BLOCK_F
    STEP: tl.constexpr = BLOCK_F if PAIRED else BLOCK_N
    dtype = h_ptr.dtype.element_ty
    bound = F if PAIRED else PARTS * F
    span = INTERLEAVE if INTERLEAVE else F
    rows = first_row + tl.arange(0, BLOCK_R)
    live = rows < end
    slots = tl.load(slots_ptr + rows, mask=live, other=0)
    source = slots // topk if GATHER else tl.where(live, rows, 0)
    a_ptrs = x_ptr + (source.to(tl.int64) * stride_xt)[:, None]

    if FORMAT is not None:
        place = block * BLOCK_F
        acc = contract_quantized(
            a_ptrs, live, w, scales_ptr, stride_se, stride_sn, stride_sk, global_ptr, expert,
            place + place // span * span if PAIRED else block * STEP, span, PARTS * F, H,
            FORMAT, 2 if PAIRED else 1, BLOCK_R, BLOCK_F if PAIRED else BLOCK_N, BLOCK_K,
        )  # fmt: skip
    elif SWAP and PAIRED and TMA:
        acc = contract_halves(
            a_ptrs, w, expert, block * STEP, F, H,
            TRANSPOSED, K_TAIL, BLOCK_R, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        acc = contract(
            a_ptrs, w, stride_we, stride_wn, stride_wk, expert, block * STEP, bound, H, span,
            PAIRED, TMA, TRANSPOSED, SWAP, K_TAIL, BLOCK_R, BLOCK_N, BLOCK_K,
        )  # fmt: skip

    place, columns = stored_columns(block * STEP, span, PAIRED, BLOCK_N)
    inside = place < bound
    if bias_ptr is not None:
        bias = tl.load(
            bias_ptr + expert.to(tl.int64) * (PARTS * F) + columns, mask=inside, other=0.0
        )
        acc = acc + bias.to(tl.float32)[None, :]
    z = acc.to(dtype)
    if GATED:
        first, second = split_parts(z, PAIRED, INTERLEAVE, BLOCK_R, BLOCK_F)
    if z_ptr is not None:
        z_rows = z_ptr + (rows.to(tl.int64) * (PARTS * F))[:, None]
        if PAIRED:
            # By addresses that are seen to be neighbours: ``columns`` would be stored one by one.
            store_gate_up(
                z_rows, first, second, block * BLOCK_F, live[:, None], F,
                GATED, INTERLEAVE, False, BLOCK_R, BLOCK_F,
            )  # fmt: skip
        else:
            tl.store(z_rows + columns[None, :], z, mask=live[:, None] & inside[None, :])
    alpha, limit, offset, gate_cap, up_cap = values
    if GATED:
        gate, up = (second, first) if UP_FIRST else (first, second)
        h = glu_tile(
            gate.to(tl.float32), up.to(tl.float32), alpha, limit, offset, gate_cap, up_cap,
            KIND, LIMIT, HAS_OFFSET, HAS_UP_CAP,
        )  # fmt: skip
    else:
        h = act_tile(z.to(tl.float32), alpha, gate_cap, KIND)
    if probs_ptr is not None:
        h = h * tl.load(probs_ptr + slots, mask=live, other=0.0).to(tl.float32)[:, None]
    f = block * BLOCK_F + tl.arange(0, BLOCK_F)
    h_ptrs = h_ptr + (rows.to(tl.int64) * F)[:, None] + f[None, :]
    tl.store(h_ptrs, h.to(dtype), mask=live[:, None] & (f < F)[None, :])


@recordable
@triton.jit
def _first_projection_kernel(
    x_ptr, stride_xt, w, stride_we, stride_wn, stride_wk, bias_ptr, probs_ptr,
    h_ptr, z_ptr,
    slots_ptr, tile_expert_ptr, tile_row_ptr, tile_end_ptr, tiles_ptr,
    H, F, topk, values,
    scales_ptr, stride_se, stride_sn, stride_sk, global_ptr,
    FORMAT: tl.constexpr,
    GATHER: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_UP_CAP: tl.constexpr,
    INTERLEAVE: tl.constexpr, UP_FIRST: tl.constexpr,
    TMA: tl.constexpr, TRANSPOSED: tl.constexpr, SWAP: tl.constexpr, K_TAIL: tl.constexpr,
    GROUP: tl.constexpr, SHORT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles = tl.load(tiles_ptr)
    column_blocks = tl.cdiv(F, BLOCK_F)
    for position in range(tl.program_id(0), tiles * column_blocks, tl.num_programs(0)):
        tile, block = tile_of_position(position, tiles, column_blocks, GROUP)
        expert = tl.load(tile_expert_ptr + tile)
        first_row = tl.load(tile_row_ptr + tile)
        end = tl.load(tile_end_ptr + tile)
        if SHORT and end - first_row <= SHORT:
            _first_tile(
                x_ptr, stride_xt, w, stride_we, stride_wn, stride_wk, bias_ptr, probs_ptr,
                h_ptr, z_ptr, slots_ptr, expert, first_row, end, block, H, F, topk, values,
                scales_ptr, stride_se, stride_sn, stride_sk, global_ptr, FORMAT, GATHER, KIND, GATED, LIMIT, HAS_OFFSET, HAS_UP_CAP, INTERLEAVE, UP_FIRST,
                TMA, TRANSPOSED, SWAP, K_TAIL, SHORT, BLOCK_F, BLOCK_K,
            )  # fmt: skip
        else:
            _first_tile(
                x_ptr, stride_xt, w, stride_we, stride_wn, stride_wk, bias_ptr, probs_ptr,
                h_ptr, z_ptr, slots_ptr, expert, first_row, end, block, H, F, topk, values,
                scales_ptr, stride_se, stride_sn, stride_sk, global_ptr, FORMAT, GATHER, KIND, GATED, LIMIT, HAS_OFFSET, HAS_UP_CAP, INTERLEAVE, UP_FIRST,
                TMA, TRANSPOSED, SWAP, K_TAIL, BLOCK_R, BLOCK_F, BLOCK_K,
            )  # fmt: skip


@triton.jit
def _second_tile(
    h_ptr, w, stride_we, stride_wn, stride_wk, bias_ptr, probs_ptr,
    y_ptr, slots_ptr,
    expert, first_row, end, block,
    F, H,
    scales_ptr, stride_se, stride_sn, stride_sk, global_ptr,
    FORMAT: tl.constexpr,
    H_TMA: tl.constexpr,
    TMA: tl.constexpr, TRANSPOSED: tl.constexpr, SWAP: tl.constexpr, K_TAIL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute ``BLOCK_N`` columns of up to ``BLOCK_R`` rows from ``first_row`` on."""
    rows = first_row + tl.arange(0, BLOCK_R)
    live = rows < end
    if FORMAT is not None:
        source = tl.where(live, rows, 0).to(tl.int64)
        acc = contract_quantized(
            h_ptr + (source * F)[:, None], live, w,
            scales_ptr, stride_se, stride_sn, stride_sk, global_ptr,
            expert, block * BLOCK_N, 0, H, F,
            FORMAT, 1, BLOCK_R, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    elif H_TMA:
        acc = contract_described(
            h_ptr, first_row, w, stride_we, stride_wn, stride_wk, expert, block * BLOCK_N, H, F,
            TMA, TRANSPOSED, BLOCK_R, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        source = tl.where(live, rows, 0).to(tl.int64)
        acc = contract(
            h_ptr + (source * F)[:, None], w, stride_we, stride_wn, stride_wk,
            expert, block * BLOCK_N, H, F, H,
            False, TMA, TRANSPOSED, SWAP, K_TAIL, BLOCK_R, BLOCK_N, BLOCK_K,
        )  # fmt: skip

    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < H
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * H + columns, mask=inside, other=0.0)
        bias = bias.to(tl.float32)[None, :]
        if probs_ptr is not None:
            slots = tl.load(slots_ptr + rows, mask=live, other=0)
            p = tl.load(probs_ptr + slots, mask=live, other=0.0).to(tl.float32)
            bias = bias * p[:, None]
        acc = acc + bias
    y_ptrs = y_ptr + (rows.to(tl.int64) * H)[:, None] + columns[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


@recordable
@triton.jit
def _second_projection_kernel(
    h_ptr, short_h_ptr, w, stride_we, stride_wn, stride_wk, bias_ptr, probs_ptr,
    y_ptr,
    slots_ptr, tile_expert_ptr, tile_row_ptr, tile_end_ptr, tiles_ptr,
    F, H,
    scales_ptr, stride_se, stride_sn, stride_sk, global_ptr,
    FORMAT: tl.constexpr,
    H_TMA: tl.constexpr,
    TMA: tl.constexpr, TRANSPOSED: tl.constexpr, SWAP: tl.constexpr, K_TAIL: tl.constexpr,
    GROUP: tl.constexpr, SHORT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles = tl.load(tiles_ptr)
    column_blocks = tl.cdiv(H, BLOCK_N)
    for position in range(tl.program_id(0), tiles * column_blocks, tl.num_programs(0)):
        tile, block = tile_of_position(position, tiles, column_blocks, GROUP)
        expert = tl.load(tile_expert_ptr + tile)
        first_row = tl.load(tile_row_ptr + tile)
        end = tl.load(tile_end_ptr + tile)
        if SHORT and end - first_row <= SHORT:
            _second_tile(
                short_h_ptr, w, stride_we, stride_wn, stride_wk, bias_ptr, probs_ptr,
                y_ptr, slots_ptr, expert, first_row, end, block, F, H,
                scales_ptr, stride_se, stride_sn, stride_sk, global_ptr, FORMAT, H_TMA, TMA, TRANSPOSED, SWAP, K_TAIL, SHORT, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            _second_tile(
                h_ptr, w, stride_we, stride_wn, stride_wk, bias_ptr, probs_ptr,
                y_ptr, slots_ptr, expert, first_row, end, block, F, H,
                scales_ptr, stride_se, stride_sn, stride_sk, global_ptr, FORMAT, H_TMA, TMA, TRANSPOSED, SWAP, K_TAIL, BLOCK_R, BLOCK_N, BLOCK_K,
            )  # fmt: skip


class First(NamedTuple):
    """What the first projection reads of an expert's parameters; ``ExpertWeights`` will do too."""

    # (E, 2F or F, H), any strides. Quantised ones need a tile of ``tuning.quantized_heuristic``.
    gate_up: Tensor | QuantizedMatrix
    # (E, 2F or F).
    gate_up_bias: Tensor | None
    layout: Layout


def launch_first_projection(
    x: Tensor,
    slots: Tensor,
    tiles: Tiles,
    weights: First | Parameters,
    activation: Activation,
    probs: Tensor | None,
    config: Config,
    *,
    topk: int,
    gather: bool,
    save: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return ``(h, z)`` by row; see the module docstring. Rows of no tile stay unwritten.

    Determinism: one accumulator per element, contraction ascending; the same bits for every config.
    """
    w, layout = weights.gate_up, weights.layout
    bias = None if weights.gate_up_bias is None else weights.gate_up_bias.contiguous()
    rows, hidden, columns = slots.shape[0], w.shape[2], w.shape[1] // activation.columns
    h = x.new_empty(rows, columns)
    z = x.new_empty(rows, w.shape[1]) if save else None
    if rows == 0:
        return h, z
    interleave = layout.interleave or 0
    block_f = config.block_n // activation.columns
    paired = activation.gated and (interleave == 0 or block_f % interleave != 0)
    halves = paired and interleave == 0
    # With swapped operands each half has a box of its own.
    each = halves and config.swap
    described = config.tma and (halves or not paired)
    box = (config.block_n // 2 if each else config.block_n, config.block_k) if described else None
    if isinstance(w, QuantizedMatrix):
        box = (block_f if paired else config.block_n, config.block_k)
        matrix = quantized_operand(w, box, config.num_warps if config.swap else 0)
    else:
        matrix = matrix_operand(w, box, halves=halves and not each)
    tile = TileOptions.of(activation, x.dtype)
    _first_projection_kernel[_grid(tiles, columns, block_f, config)](
        x, x.stride(0), matrix.source, *matrix.strides, bias, probs,
        h, z,
        slots, tiles.expert, tiles.row, tiles.end, tiles.count,
        hidden, columns, topk, tile.scalars,
        *matrix.scales, FORMAT=matrix.format,
        GATHER=gather, **tile.flags, INTERLEAVE=interleave, UP_FIRST=layout.up_first,
        TMA=matrix.described, TRANSPOSED=matrix.transposed, SWAP=config.swap,
        K_TAIL=hidden % config.block_k != 0,
        GROUP=config.group, SHORT=config.short,
        BLOCK_R=config.block_r, BLOCK_F=block_f, BLOCK_K=config.block_k,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return h, z


def launch_second_projection(
    h: Tensor,
    slots: Tensor,
    tiles: Tiles,
    w: Tensor | QuantizedMatrix,
    bias: Tensor | None,
    probs: Tensor | None,
    config: Config,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``y`` by row; rows of no tile stay unwritten. Other rows and matrices are welcome.

    Args:
        h: ``(R, K)`` rows, contiguous.
        slots: ``(R,)`` int32 slot of each row; read with ``probs`` only.
        tiles: Tiles of ``config.block_r`` rows.
        w: ``(E, N, K)``, any strides: ``down``, or ``gate_up`` seen transposed for gradients.
            Quantised ones need a ``config`` of ``tuning.quantized_heuristic``.
        bias: ``(E, N)``.
        probs: Factor of the bias, by slot.
        config: Tile.
        dtype: Of y; None is that of ``h``.

    Determinism: one accumulator per element, contraction ascending; the same bits for every config.
    """
    bias = None if bias is None else bias.contiguous()
    rows, contraction = h.shape
    columns = w.shape[1]
    y = h.new_empty(rows, columns, dtype=dtype or h.dtype)
    if rows == 0:
        return y
    if isinstance(w, QuantizedMatrix):
        box = (config.block_n, config.block_k)
        matrix = quantized_operand(w, box, config.num_warps if config.swap else 0)
    else:
        matrix = matrix_operand(w, (config.block_n, config.block_k) if config.tma else None)
    wide = matrix.described and not config.swap and matrix.format is None
    operand, h_tma = row_operand(h, (config.block_r, config.block_k) if wide else None)
    # Tiles of few rows have a box of their own.
    short = h
    if h_tma and config.short:
        short, _ = row_operand(h, (config.short, config.block_k))
    _second_projection_kernel[_grid(tiles, columns, config.block_n, config)](
        operand, short if config.short else None, matrix.source, *matrix.strides, bias, probs,
        y,
        slots, tiles.expert, tiles.row, tiles.end, tiles.count,
        contraction, columns,
        *matrix.scales, FORMAT=matrix.format,
        H_TMA=h_tma,
        TMA=matrix.described, TRANSPOSED=matrix.transposed, SWAP=config.swap,
        K_TAIL=contraction % config.block_k != 0,
        GROUP=config.group, SHORT=config.short,
        BLOCK_R=config.block_r, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return y


def _grid(tiles: Tiles, columns: int, block: int, config: Config) -> tuple[int]:
    work = tiles.expert.shape[0] * triton.cdiv(columns, block)
    return (min(work, config.programs),)
