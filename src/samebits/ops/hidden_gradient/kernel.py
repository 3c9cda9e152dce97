"""The product with ``down`` and all that follows from it; see ``samebits.ops.hidden_gradient``.

A program owns ``[BLOCK_R, BLOCK_N]`` of dh, in fp32. It is finished in slices of 32 columns, since
the derivative of a whole tile does not fit the registers; z of two of them is asked for before
(``EARLY``), where that fits. Sums of 64 columns keep one order whatever
the slice: neighbours in pairs, six times; the sums of a row are added in ascending order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.activation import Activation
from samebits.ops._triton.columns import load_gate_up, store_gate_up
from samebits.ops._triton.launch import recordable
from samebits.ops._triton.operand import row_operand, weight_operand
from samebits.ops._triton.product import contract, contract_described, tile_of_position
from samebits.ops._triton.rows import add_neighbours, sum_ascending, sum_of_64_columns
from samebits.ops.activation.tiles import TileOptions, glu_derivative_tile, slope_tile
from samebits.ops.indirect_gemm.tuning import Config
from samebits.ops.permute.tuning import Tiles
from samebits.weights import Layout


@triton.jit
def _slice(
    dh, gate, up, dz_rows, h_rows, column, live, p, F, values,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_UP_CAP: tl.constexpr,
    INTERLEAVE: tl.constexpr, UP_FIRST: tl.constexpr,
    WITH_DZ: tl.constexpr, WITH_H: tl.constexpr, WITH_DP: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Finish ``BLOCK_N`` columns of dh; return their products' sums in one."""
    alpha, limit, offset, gate_cap, up_cap = values
    if GATED:
        act, dgate, dup = glu_derivative_tile(
            dh * p, gate, up, alpha, limit, offset, gate_cap, up_cap,
            KIND, LIMIT, HAS_OFFSET, HAS_UP_CAP,
        )  # fmt: skip
    else:
        act, slope = slope_tile(gate, alpha, gate_cap, KIND)
        dgate = dh * p * slope
        dup = dgate
    columns = column + tl.arange(0, BLOCK_N)[None, :]
    mask = live & (columns < F)
    if WITH_DZ:
        dtype = dz_rows.dtype.element_ty
        store_gate_up(
            dz_rows, dgate.to(dtype), dup.to(dtype), column, live, F,
            GATED, INTERLEAVE, UP_FIRST, BLOCK_R, BLOCK_N,
        )  # fmt: skip
    if WITH_H:
        tl.store(h_rows + columns, (act * p).to(h_rows.dtype.element_ty), mask=mask)
    sums = tl.zeros((BLOCK_R, 1), tl.float32)
    if WITH_DP:
        sums = add_neighbours(tl.where(mask, dh * act, 0.0), BLOCK_R, BLOCK_N)
    return sums


@triton.jit
def _halves(dh, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(dh, (BLOCK_R, 2, BLOCK_N // 2)), (0, 2, 1)))


@triton.jit
def _finish(
    dh, z_rows, dz_rows, h_rows, partial_rows, column, live, p, F, values,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_UP_CAP: tl.constexpr,
    INTERLEAVE: tl.constexpr, UP_FIRST: tl.constexpr,
    WITH_DZ: tl.constexpr, WITH_H: tl.constexpr, WITH_DP: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Finish ``BLOCK_N`` columns of dh, 64 at a time and those in two slices."""
    if BLOCK_N > 64:
        left, right = _halves(dh, BLOCK_R, BLOCK_N)
        _finish(
            left, z_rows, dz_rows, h_rows, partial_rows, column, live, p, F, values,
            KIND, GATED, LIMIT, HAS_OFFSET, HAS_UP_CAP, INTERLEAVE, UP_FIRST,
            WITH_DZ, WITH_H, WITH_DP, EARLY, BLOCK_R, BLOCK_N // 2,
        )  # fmt: skip
        _finish(
            right, z_rows, dz_rows, h_rows, partial_rows, column + BLOCK_N // 2, live, p, F, values,
            KIND, GATED, LIMIT, HAS_OFFSET, HAS_UP_CAP, INTERLEAVE, UP_FIRST,
            WITH_DZ, WITH_H, WITH_DP, EARLY, BLOCK_R, BLOCK_N // 2,
        )  # fmt: skip
    else:
        SLICE: tl.constexpr = BLOCK_N // 2
        if EARLY:
            # Before dh moves through shared memory and the first slice is stored.
            gate, up = load_gate_up(
                z_rows, column, live, F, GATED, INTERLEAVE, UP_FIRST, BLOCK_R, SLICE
            )
            next_gate, next_up = load_gate_up(
                z_rows, column + SLICE, live, F, GATED, INTERLEAVE, UP_FIRST, BLOCK_R, SLICE
            )
        left, right = _halves(dh, BLOCK_R, BLOCK_N)
        if not EARLY:
            gate, up = load_gate_up(
                z_rows, column, live, F, GATED, INTERLEAVE, UP_FIRST, BLOCK_R, SLICE
            )
        first = _slice(
            left, gate, up, dz_rows, h_rows, column, live, p, F, values,
            KIND, GATED, LIMIT, HAS_OFFSET, HAS_UP_CAP, INTERLEAVE, UP_FIRST,
            WITH_DZ, WITH_H, WITH_DP, BLOCK_R, SLICE,
        )  # fmt: skip
        if not EARLY:
            next_gate, next_up = load_gate_up(
                z_rows, column + SLICE, live, F, GATED, INTERLEAVE, UP_FIRST, BLOCK_R, SLICE
            )
        second = _slice(
            right, next_gate, next_up, dz_rows, h_rows, column + SLICE, live, p, F, values,
            KIND, GATED, LIMIT, HAS_OFFSET, HAS_UP_CAP, INTERLEAVE, UP_FIRST,
            WITH_DZ, WITH_H, WITH_DP, BLOCK_R, SLICE,
        )  # fmt: skip
        if WITH_DP:
            tl.store(partial_rows + column // 64, first + second, mask=live & (column < F))


@triton.jit
def _tile(
    dy, stride_dy, w, stride_we, stride_wn, stride_wk, z_ptr, probs_ptr,
    dz_ptr, h_ptr, partial_ptr, slots_ptr,
    expert, first_row, end, column,
    H, F, topk, values,
    GATHER: tl.constexpr, DESCRIBED: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_UP_CAP: tl.constexpr,
    INTERLEAVE: tl.constexpr, UP_FIRST: tl.constexpr,
    TMA: tl.constexpr, TRANSPOSED: tl.constexpr, SWAP: tl.constexpr, K_TAIL: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute ``BLOCK_N`` columns of up to ``BLOCK_R`` rows from ``first_row`` on."""
    width = 2 * F if GATED else F
    rows = first_row + tl.arange(0, BLOCK_R)
    live = rows < end
    slots = tl.load(slots_ptr + rows, mask=live, other=0)

    if DESCRIBED:
        dh = contract_described(
            dy, first_row, w, stride_we, stride_wn, stride_wk, expert, column, F, H,
            TMA, TRANSPOSED, BLOCK_R, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        source = slots // topk if GATHER else tl.where(live, rows, 0)
        dh = contract(
            dy + (source.to(tl.int64) * stride_dy)[:, None],
            w, stride_we, stride_wn, stride_wk, expert, column, F, H, F,
            False, TMA, TRANSPOSED, SWAP, K_TAIL, BLOCK_R, BLOCK_N, BLOCK_K,
        )  # fmt: skip

    p = 1.0
    if probs_ptr is not None:
        p = tl.load(probs_ptr + slots, mask=live, other=0.0).to(tl.float32)[:, None]
    place = rows.to(tl.int64)[:, None]
    _finish(
        dh, z_ptr + place * width,
        z_ptr if dz_ptr is None else dz_ptr + place * width,
        z_ptr if h_ptr is None else h_ptr + place * F,
        z_ptr if partial_ptr is None else partial_ptr + place * tl.cdiv(F, 64),
        column, live[:, None], p, F, values,
        KIND, GATED, LIMIT, HAS_OFFSET, HAS_UP_CAP, INTERLEAVE, UP_FIRST,
        dz_ptr is not None, h_ptr is not None, partial_ptr is not None,
        EARLY, BLOCK_R, BLOCK_N,
    )  # fmt: skip


@recordable
@triton.jit
def _hidden_gradient_kernel(
    dy, stride_dy, w, stride_we, stride_wn, stride_wk, z_ptr, probs_ptr,
    dz_ptr, h_ptr, partial_ptr,
    slots_ptr, tile_expert_ptr, tile_row_ptr, tile_end_ptr, tiles_ptr,
    H, F, topk, values,
    GATHER: tl.constexpr, DESCRIBED: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_UP_CAP: tl.constexpr,
    INTERLEAVE: tl.constexpr, UP_FIRST: tl.constexpr,
    TMA: tl.constexpr, TRANSPOSED: tl.constexpr, SWAP: tl.constexpr, K_TAIL: tl.constexpr,
    GROUP: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles = tl.load(tiles_ptr)
    column_blocks = tl.cdiv(F, BLOCK_N)
    for position in range(tl.program_id(0), tiles * column_blocks, tl.num_programs(0)):
        tile, block = tile_of_position(position, tiles, column_blocks, GROUP)
        _tile(
            dy, stride_dy, w, stride_we, stride_wn, stride_wk, z_ptr, probs_ptr,
            dz_ptr, h_ptr, partial_ptr, slots_ptr,
            tl.load(tile_expert_ptr + tile), tl.load(tile_row_ptr + tile),
            tl.load(tile_end_ptr + tile), block * BLOCK_N, H, F, topk, values,
            GATHER, DESCRIBED,
            KIND, GATED, LIMIT, HAS_OFFSET, HAS_UP_CAP, INTERLEAVE, UP_FIRST,
            TMA, TRANSPOSED, SWAP, K_TAIL, EARLY, BLOCK_R, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@recordable
@triton.jit(do_not_specialize=["R", "topk", "expert_start"])
def _probs_gradient_kernel(
    partial_ptr, dout_ptr, stride_dt, bias_ptr, ids_ptr, inverse_ptr,
    dp_ptr,
    R, topk, expert_start, H, partials,
    BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    slots = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    inside = slots < R
    rows = tl.load(inverse_ptr + slots, mask=inside, other=R).to(tl.int64)
    live = inside & (rows < R)
    dp = sum_ascending(partial_ptr + tl.where(live, rows, 0) * partials, live, partials)
    if bias_ptr is not None:
        experts = tl.load(ids_ptr + slots, mask=live, other=0).to(tl.int64) - expert_start
        dout_rows = dout_ptr + (slots // topk * stride_dt)[:, None]
        bias_rows = bias_ptr + (experts * H)[:, None]
        from_bias = tl.zeros((BLOCK_S,), tl.float32)
        for column in range(0, H, BLOCK_H):
            columns = column + tl.arange(0, BLOCK_H)[None, :]
            mask = live[:, None] & (columns < H)
            dout = tl.load(dout_rows + columns, mask=mask, other=0.0).to(tl.float32)
            bias = tl.load(bias_rows + columns, mask=mask, other=0.0).to(tl.float32)
            sums = sum_of_64_columns(dout * bias, BLOCK_S, BLOCK_H)
            from_bias += tl.reshape(sums, (BLOCK_S,))
        dp += from_bias
    dp = tl.where(live, dp, 0.0).to(dp_ptr.dtype.element_ty)
    tl.store(dp_ptr + slots, dp, mask=inside)


def _fits_early(config: Config, activation: Activation, layout: Layout) -> bool:
    """Return whether z can be asked for early without a stack (tests/ops/cubins_gradients.py)."""
    plain = activation.kind == "silu" and activation.limit is None and layout.interleave is None
    return config.block_r >= 128 and plain


class Rows(NamedTuple):
    """What the product leaves, by row; None where not wanted. Rows of no tile stay unwritten."""

    # Gradient of z, (R, 2F or F), in D.
    dz: Tensor | None
    # Operand of the gradient of ``down``, (R, F), in D.
    h: Tensor | None
    # Sums of 64 columns of the gradient of the probabilities, (R, ⌈F / 64⌉), fp32.
    partial: Tensor | None


def launch_hidden_gradient(
    dy: Tensor,
    down: Tensor,
    z: Tensor,
    slots: Tensor,
    tiles: Tiles,
    probs: Tensor | None,
    activation: Activation,
    layout: Layout,
    config: Config,
    *,
    topk: int,
    gather: bool,
    want_dz: bool,
    want_h: bool,
    want_partial: bool,
) -> Rows:
    """Return the results by row; see ``samebits.ops.hidden_gradient``.

    Args:
        dy: ``(T, H)`` gradient of the output where ``gather``, else ``(R, H)`` by row.
        down: ``(E, H, F)``, any strides.
        z: ``(R, 2F or F)`` as saved by the forward, contiguous.
        slots: ``(R,)`` int32.
        tiles: Tiles of ``config.block_r`` rows.
        probs: Factor of the activation by slot; None where the probability comes before it.
        activation: The function between the projections.
        layout: Of z.
        config: Tile, of one size: ``short`` is 0.
        topk: K.
        gather: Whether rows are found through their tokens.
        want_dz: Whether to compute dz.
        want_h: Whether to compute h.
        want_partial: Whether to compute the sums.

    Determinism: one accumulator per element, contraction ascending; the same bits for every config.
    """
    assert not config.short
    rows, hidden, columns = slots.shape[0], down.shape[1], down.shape[2]
    result = Rows(
        z.new_empty(z.shape) if want_dz else None,
        z.new_empty(rows, columns) if want_h else None,
        z.new_empty(rows, triton.cdiv(columns, 64), dtype=torch.float32) if want_partial else None,
    )
    if rows == 0:
        return result
    w = down.transpose(1, 2)
    box = (config.block_n, config.block_k) if config.tma else None
    source, strides, tma = weight_operand(w, box)
    box = (config.block_r, config.block_k) if tma and not (gather or config.swap) else None
    operand, described = row_operand(dy, box)
    tile = TileOptions.of(activation, z.dtype)
    work = tiles.expert.shape[0] * triton.cdiv(columns, config.block_n)
    _hidden_gradient_kernel[(min(work, config.programs),)](
        operand, dy.stride(0), source, *strides, z, probs,
        *result,
        slots, tiles.expert, tiles.row, tiles.end, tiles.count,
        hidden, columns, topk, tile.scalars,
        GATHER=gather, DESCRIBED=described, **tile.flags,
        INTERLEAVE=layout.interleave or 0, UP_FIRST=layout.up_first,
        TMA=tma, TRANSPOSED=w.stride(2) != 1, SWAP=config.swap, K_TAIL=hidden % config.block_k != 0,
        GROUP=config.group, EARLY=_fits_early(config, activation, layout),
        BLOCK_R=config.block_r, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    return result


def launch_probs_gradient(
    partial: Tensor,
    dout: Tensor,
    down_bias: Tensor | None,
    topk_ids: Tensor,
    inverse: Tensor,
    expert_start: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``dp``, ``(T, K)``; 0 where a slot is dropped.

    Args:
        partial: ``(R, ⌈F / 64⌉)`` sums by row.
        dout: ``(T, H)`` gradient of the output.
        down_bias: ``(E, H)``, contiguous.
        topk_ids: ``(T, K)``, contiguous.
        inverse: ``(R,)`` int32 row of each slot.
        expert_start: First expert held here.
        dtype: Of the result, to which the fp32 sum is rounded.

    Determinism: sums of 64 columns in ascending order.
    """
    tokens, topk = topk_ids.shape
    dp = partial.new_empty(tokens, topk, dtype=dtype)
    slots = 128 if down_bias is None else 16
    if dp.numel():
        _probs_gradient_kernel[(triton.cdiv(dp.numel(), slots),)](
            partial, dout, dout.stride(0), down_bias, topk_ids, inverse, dp,
            dp.numel(), topk, expert_start, dout.shape[1], partial.shape[1],
            BLOCK_S=slots, BLOCK_H=64, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return dp
