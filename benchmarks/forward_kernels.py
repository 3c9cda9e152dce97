"""Kernels of the forward with other outer loops and epilogues; see forward_candidates.py.

Names and device functions are those of ``samebits.ops``. ``AHEAD``: a program asks for its next
tile before it computes the present one. ``SHORTER``: a second size of short tiles. ``AFTER``: the
launch may begin while the one before ends. ``y_box``: whole tiles leave through a descriptor.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from samebits.ops._triton.launch import recordable
from samebits.ops._triton.product import contract_described, tile_of_position
from samebits.ops.indirect_gemm.kernel import _first_tile, _second_tile
from samebits.ops.permute.kernel import _sum_kernel

_sum = _sum_kernel.fn


@triton.jit
def _entry(position, tiles, column_blocks, expert_ptr, row_ptr, end_ptr, GROUP: tl.constexpr):
    """Return (expert, first row, end, column block) of a position; of the last one past them."""
    held = tl.maximum(tl.minimum(position, tiles * column_blocks - 1), 0)
    tile, block = tile_of_position(held, tl.maximum(tiles, 1), column_blocks, GROUP)
    there = tiles > 0
    return (
        tl.load(expert_ptr + tile, mask=there, other=0),
        tl.load(row_ptr + tile, mask=there, other=0),
        tl.load(end_ptr + tile, mask=there, other=0),
        block,
    )


@recordable
@triton.jit
def first_kernel(
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
    AHEAD: tl.constexpr, SHORTER: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    if AFTER:
        gdc_launch_dependents()
        gdc_wait()
    tiles = tl.load(tiles_ptr)
    column_blocks = tl.cdiv(F, BLOCK_F)
    step = tl.num_programs(0)
    expert, first_row, end, block = _entry(
        tl.program_id(0), tiles, column_blocks, tile_expert_ptr, tile_row_ptr, tile_end_ptr, GROUP
    )
    for position in range(tl.program_id(0), tiles * column_blocks, step):
        if not AHEAD:
            expert, first_row, end, block = _entry(
                position, tiles, column_blocks, tile_expert_ptr, tile_row_ptr, tile_end_ptr, GROUP
            )
        following = _entry(
            position + step, tiles, column_blocks, tile_expert_ptr, tile_row_ptr, tile_end_ptr,
            GROUP,
        )  # fmt: skip
        if SHORTER and end - first_row <= SHORTER:
            _first_tile(
                x_ptr, stride_xt, w, stride_we, stride_wn, stride_wk, bias_ptr, probs_ptr,
                h_ptr, z_ptr, slots_ptr, expert, first_row, end, block, H, F, topk, values,
                scales_ptr, stride_se, stride_sn, stride_sk, global_ptr, FORMAT,
                GATHER, KIND, GATED, LIMIT, HAS_OFFSET, HAS_UP_CAP, INTERLEAVE, UP_FIRST,
                TMA, TRANSPOSED, SWAP, K_TAIL, SHORTER, BLOCK_F, BLOCK_K,
            )  # fmt: skip
        elif SHORT and end - first_row <= SHORT:
            _first_tile(
                x_ptr, stride_xt, w, stride_we, stride_wn, stride_wk, bias_ptr, probs_ptr,
                h_ptr, z_ptr, slots_ptr, expert, first_row, end, block, H, F, topk, values,
                scales_ptr, stride_se, stride_sn, stride_sk, global_ptr, FORMAT,
                GATHER, KIND, GATED, LIMIT, HAS_OFFSET, HAS_UP_CAP, INTERLEAVE, UP_FIRST,
                TMA, TRANSPOSED, SWAP, K_TAIL, SHORT, BLOCK_F, BLOCK_K,
            )  # fmt: skip
        else:
            _first_tile(
                x_ptr, stride_xt, w, stride_we, stride_wn, stride_wk, bias_ptr, probs_ptr,
                h_ptr, z_ptr, slots_ptr, expert, first_row, end, block, H, F, topk, values,
                scales_ptr, stride_se, stride_sn, stride_sk, global_ptr, FORMAT,
                GATHER, KIND, GATED, LIMIT, HAS_OFFSET, HAS_UP_CAP, INTERLEAVE, UP_FIRST,
                TMA, TRANSPOSED, SWAP, K_TAIL, BLOCK_R, BLOCK_F, BLOCK_K,
            )  # fmt: skip
        if AHEAD:
            expert, first_row, end, block = following


@recordable
@triton.jit
def second_kernel(
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
    shorter_h_ptr, y_box, AHEAD: tl.constexpr, SHORTER: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    if AFTER:
        gdc_launch_dependents()
        gdc_wait()
    tiles = tl.load(tiles_ptr)
    column_blocks = tl.cdiv(H, BLOCK_N)
    step = tl.num_programs(0)
    expert, first_row, end, block = _entry(
        tl.program_id(0), tiles, column_blocks, tile_expert_ptr, tile_row_ptr, tile_end_ptr, GROUP
    )
    for position in range(tl.program_id(0), tiles * column_blocks, step):
        if not AHEAD:
            expert, first_row, end, block = _entry(
                position, tiles, column_blocks, tile_expert_ptr, tile_row_ptr, tile_end_ptr, GROUP
            )
        following = _entry(
            position + step, tiles, column_blocks, tile_expert_ptr, tile_row_ptr, tile_end_ptr,
            GROUP,
        )  # fmt: skip
        if SHORTER and end - first_row <= SHORTER:
            _second_tile(
                shorter_h_ptr, w, stride_we, stride_wn, stride_wk, bias_ptr, probs_ptr,
                y_ptr, slots_ptr, expert, first_row, end, block, F, H,
                scales_ptr, stride_se, stride_sn, stride_sk, global_ptr, FORMAT,
                H_TMA, TMA, TRANSPOSED, SWAP, K_TAIL, SHORTER, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        elif SHORT and end - first_row <= SHORT:
            _second_tile(
                short_h_ptr, w, stride_we, stride_wn, stride_wk, bias_ptr, probs_ptr,
                y_ptr, slots_ptr, expert, first_row, end, block, F, H,
                scales_ptr, stride_se, stride_sn, stride_sk, global_ptr, FORMAT,
                H_TMA, TMA, TRANSPOSED, SWAP, K_TAIL, SHORT, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        elif y_box is None:
            _second_tile(
                h_ptr, w, stride_we, stride_wn, stride_wk, bias_ptr, probs_ptr,
                y_ptr, slots_ptr, expert, first_row, end, block, F, H,
                scales_ptr, stride_se, stride_sn, stride_sk, global_ptr, FORMAT,
                H_TMA, TMA, TRANSPOSED, SWAP, K_TAIL, BLOCK_R, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            acc = contract_described(
                h_ptr, first_row, w, stride_we, stride_wn, stride_wk, expert, block * BLOCK_N, H, F,
                TMA, TRANSPOSED, BLOCK_R, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            y = acc.to(y_ptr.dtype.element_ty)
            if end - first_row >= BLOCK_R:
                y_box.store([first_row, block * BLOCK_N], y)
            else:
                # A box cannot stop at the expert's last row.
                rows = first_row + tl.arange(0, BLOCK_R)
                columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
                places = y_ptr + (rows.to(tl.int64) * H)[:, None] + columns[None, :]
                tl.store(places, y, mask=(rows < end)[:, None] & (columns < H)[None, :])
        if AHEAD:
            expert, first_row, end, block = following


@recordable
@triton.jit(do_not_specialize=["R"])
def sum_after_kernel(
    rows_ptr, stride_r, x_ptr, stride_xt, probs_ptr,
    out_ptr, partial_ptr, dp_ptr,
    inverse_ptr,
    R, H,
    TOPK: tl.constexpr, TOPK_POW2: tl.constexpr, WIDE_KEYS: tl.constexpr,
    BLOCK_H: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    gdc_wait()
    _sum(
        rows_ptr, stride_r, x_ptr, stride_xt, probs_ptr, out_ptr, partial_ptr, dp_ptr, inverse_ptr,
        R, H, TOPK, TOPK_POW2, WIDE_KEYS, BLOCK_H, AHEAD,
    )  # fmt: skip
