"""Rows of activations in 8 bits, one pass over memory each; see ``samebits.ops.quantize``.

    permute     rows[inverse[s], :] = Q(D(x[s // K, :] [· p[s]]))
    activation  rows[r, :] = Q(D(glu(z[r, :]) [· p[r]]))

Q is the scale of each block of a row and the codes of its numbers, stored apart, or (``numbers``) the
numbers that these stand for, in D: exact in bf16 where scales are powers of two, so that products of
16-bit operands compute with them. Rows of no slot are zeros of scale 1. E8M0 scales may go to 32 × 4 × 4
tiles instead (``samebits.ops.quantize.scales``), where each expert starts with a tile of its own; what a
tile has too many is 0.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.activation import Activation
from samebits.formats.descriptor import WeightFormat
from samebits.formats.packing import ScaleRule, rule_of
from samebits.ops._triton.columns import load_gate_up
from samebits.ops._triton.launch import recordable
from samebits.ops._triton.rows import expert_of_row
from samebits.ops.activation.tiles import TileOptions, act_tile, glu_tile
from samebits.ops.quantize.scales import padded_shape, padded_starts
from samebits.ops.quantize.tiles import dequantize_tile, quantize_tile
from samebits.ops.quantize.tuning import Config, activation_heuristic, permute_heuristic
from samebits.weights import Layout


@triton.jit
def _scale_places(rows, groups, COLUMNS, starts_ptr, offsets_ptr, EXPERTS: tl.constexpr):
    """Return where the scales of ``rows`` (``[ROWS]``, int64) and ``groups`` go, ``[ROWS, GROUPS]``."""
    if EXPERTS:
        expert = expert_of_row(offsets_ptr, rows, EXPERTS)
        place = tl.load(starts_ptr + expert).to(tl.int64) + rows - tl.load(offsets_ptr + expert)
        # Tiles of 128 rows by 4 columns, 512 bytes each, tile after tile along a row of tiles.
        tiles = (place // 128 * tl.cdiv(COLUMNS, 4))[:, None] + (groups // 4)[None, :]
        inside = (place % 32 * 16 + place % 128 // 32 * 4)[:, None] + (groups % 4)[None, :]
        return tiles * 512 + inside
    else:
        return (rows * COLUMNS)[:, None] + groups[None, :]


@triton.jit
def _store_rows(
    codes, scales, rows, column, keep, C,
    out_ptr, scales_ptr, starts_ptr, offsets_ptr, has_expert,
    RULE: tl.constexpr, GROUP: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Store ``BLOCK_C`` columns of the rows that are kept; all is ``[ROWS]`` or ``[ROWS, columns]``.

    Scales in tiles are those of the rows that have an expert.
    """
    columns = column + tl.arange(0, BLOCK_C)
    inside = keep[:, None] & (columns < C)[None, :]
    out_ptrs = out_ptr + (rows * C)[:, None] + columns[None, :]
    if scales_ptr is None:
        numbers = dequantize_tile(codes, scales, RULE, GROUP, ROWS, BLOCK_C)
        tl.store(out_ptrs, numbers.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(out_ptrs, codes, mask=inside)
        groups = column // GROUP + tl.arange(0, BLOCK_C // GROUP)
        known = groups < tl.cdiv(C, GROUP)
        if EXPERTS:
            keep = keep & has_expert
        places = _scale_places(rows, groups, tl.cdiv(C, GROUP), starts_ptr, offsets_ptr, EXPERTS)
        tl.store(scales_ptr + places, scales, mask=keep[:, None] & known[None, :])


@recordable
@triton.jit(do_not_specialize=["R"])
def _permute_and_quantize_kernel(
    x_ptr, stride_xt, probs_ptr, inverse_ptr, kept_ptr,
    out_ptr, scales_ptr, starts_ptr, offsets_ptr,
    R, C,
    TOPK: tl.constexpr, RULE: tl.constexpr, GROUP: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, BLOCK_C)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK_C
    columns = column + tl.arange(0, BLOCK_C)[None, :]
    x = tl.load(x_ptr + token * stride_xt + columns, mask=columns < C, other=0.0)
    numbers = x.to(tl.float32)
    one = tl.arange(0, 1)
    kept = tl.load(kept_ptr).to(tl.int64)
    if probs_ptr is None:
        codes, scales = quantize_tile(numbers, RULE, GROUP, 1, BLOCK_C)
    for k in tl.static_range(TOPK):
        slot = token * TOPK + k
        row = tl.load(inverse_ptr + slot).to(tl.int64)
        if probs_ptr is not None:
            scaled = (numbers * tl.load(probs_ptr + slot).to(tl.float32)).to(x.dtype)
            codes, scales = quantize_tile(scaled.to(tl.float32), RULE, GROUP, 1, BLOCK_C)
        _store_rows(
            codes, scales, row + one, column, (row + one >= 0) & (row + one < R), C,
            out_ptr, scales_ptr, starts_ptr, offsets_ptr, row + one < kept,
            RULE, GROUP, EXPERTS, 1, BLOCK_C,
        )  # fmt: skip
        if slot >= kept:
            # Rows of no slot are the last ones; there are as many rows as slots. Their codes are
            # written down: ``encode_e4m3`` takes no constants.
            zeros = tl.zeros([1, BLOCK_C], tl.uint8)
            if RULE == "fp32":
                ones = tl.full([1, BLOCK_C // GROUP], 1.0, tl.float32)
            else:
                ones = tl.full([1, BLOCK_C // GROUP], 127, tl.uint8)
            _store_rows(
                zeros, ones, slot + one, column, slot + one < R, C,
                out_ptr, scales_ptr, starts_ptr, offsets_ptr, slot + one < kept,
                RULE, GROUP, EXPERTS, 1, BLOCK_C,
            )  # fmt: skip


@recordable
@triton.jit(do_not_specialize=["R"])
def _activation_and_quantize_kernel(
    z_ptr, stride_zr, probs_ptr, kept_ptr,
    out_ptr, scales_ptr, starts_ptr, offsets_ptr,
    R, C, values,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_UP_CAP: tl.constexpr,
    INTERLEAVE: tl.constexpr, UP_FIRST: tl.constexpr,
    RULE: tl.constexpr, GROUP: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, BLOCK_C)
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(0) % blocks * BLOCK_C
    live = rows < tl.load(kept_ptr)
    gate, up = load_gate_up(
        z_ptr + (rows * stride_zr)[:, None], column, live[:, None], C,
        GATED, INTERLEAVE, UP_FIRST, BLOCK_R, BLOCK_C,
    )  # fmt: skip
    alpha, limit, offset, gate_cap, up_cap = values
    if GATED:
        h = glu_tile(
            gate, up, alpha, limit, offset, gate_cap, up_cap, KIND, LIMIT, HAS_OFFSET, HAS_UP_CAP
        )
    else:
        h = act_tile(gate, alpha, gate_cap, KIND)
    if probs_ptr is not None:
        h = h * tl.load(probs_ptr + rows, mask=live, other=0.0).to(tl.float32)[:, None]
    # Columns that do not exist count for no block.
    inside = live[:, None] & (column + tl.arange(0, BLOCK_C) < C)[None, :]
    h = tl.where(inside, h.to(z_ptr.dtype.element_ty).to(tl.float32), 0.0)
    codes, scales = quantize_tile(h, RULE, GROUP, BLOCK_R, BLOCK_C)
    _store_rows(
        codes, scales, rows, column, rows < R, C,
        out_ptr, scales_ptr, starts_ptr, offsets_ptr, live,
        RULE, GROUP, EXPERTS, BLOCK_R, BLOCK_C,
    )  # fmt: skip


class QuantizedRows(NamedTuple):
    """Rows ``(R, C)`` in a format, or the numbers that they stand for."""

    # E4M3; in D where they are the numbers.
    values: Tensor
    # (R, ⌈C / columns of a block⌉), or in tiles; None beside numbers.
    scales: Tensor | None


def launch_permute_and_quantize(
    x: Tensor,
    inverse: Tensor,
    topk: int,
    probs: Tensor | None,
    kept: Tensor,
    row_format: WeightFormat,
    scale_rule: ScaleRule | None = None,
    *,
    numbers: bool = False,
    swizzle: Tensor | None = None,
    config: Config | None = None,
) -> QuantizedRows:
    """Return the rows of ``samebits.ops.permute.permute``, quantised.

    Args:
        x: ``(T, C)`` bf16, fp16 or fp32, columns side by side.
        inverse: ``(R,)`` row of each slot; R for a dropped one.
        topk: K.
        probs: ``(T, K)``, contiguous; None multiplies nothing.
        kept: ``(1,)`` how many rows have a slot.
        row_format: Blocks of one row.
        scale_rule: See ``samebits.formats.packing``.
        numbers: Whether to return numbers in the dtype of ``x``.
        swizzle: ``(E + 1,)`` first row of each expert: scales go to 32 × 4 × 4 tiles.
        config: Tile; None takes that of ``tuning.permute_heuristic``.

    Determinism: exact; the same bits for every config.
    """
    tokens, columns = x.shape
    target = _Target(x, tokens * topk, columns, row_format, scale_rule, numbers, swizzle)
    if target.rows.values.numel():
        config = permute_heuristic(columns) if config is None else config
        _permute_and_quantize_kernel[(tokens * triton.cdiv(columns, config.block_c),)](
            x, x.stride(0), probs, inverse, kept, *target.pointers, tokens * topk, columns,
            TOPK=topk, **target.flags, BLOCK_C=config.block_c,
            num_warps=config.num_warps, enable_fp_fusion=False,
        )  # fmt: skip
    return target.rows


def launch_activation_and_quantize(
    z: Tensor,
    activation: Activation,
    layout: Layout,
    row_probs: Tensor | None,
    kept: Tensor,
    row_format: WeightFormat,
    scale_rule: ScaleRule | None = None,
    *,
    numbers: bool = False,
    swizzle: Tensor | None = None,
    config: Config | None = None,
) -> QuantizedRows:
    """Return ``h``, quantised.

    Args:
        z: ``(R, 2C or C)`` bf16, fp16 or fp32, columns side by side.
        activation: The function.
        layout: Order of gate and up in the columns of ``z``.
        row_probs: ``(R,)``, contiguous; None multiplies nothing.
        kept: ``(1,)`` rows from there on are not read, and are zeros.
        row_format: See ``launch_permute_and_quantize``; the rest too.
        scale_rule: See there.
        numbers: See there.
        swizzle: See there.
        config: Tile; None takes that of ``tuning.activation_heuristic``.

    Determinism: exact but for the activation's functions; the same bits for every config.
    """
    total, columns = z.shape[0], z.shape[1] // activation.columns
    target = _Target(z, total, columns, row_format, scale_rule, numbers, swizzle)
    if target.rows.values.numel():
        config = activation_heuristic(columns) if config is None else config
        tile = TileOptions.of(activation, z.dtype)
        grid = (triton.cdiv(total, config.block_r) * triton.cdiv(columns, config.block_c),)
        _activation_and_quantize_kernel[grid](
            z, z.stride(0), row_probs, kept, *target.pointers, total, columns, tile.scalars,
            **tile.flags, INTERLEAVE=layout.interleave or 0, UP_FIRST=layout.up_first,
            **target.flags, BLOCK_R=config.block_r, BLOCK_C=config.block_c,
            num_warps=config.num_warps, enable_fp_fusion=False,
        )  # fmt: skip
    return target.rows


class _Target:
    """Where a kernel writes its rows, and how."""

    def __init__(self, like, rows, columns, held, scale_rule, numbers, swizzle):
        rule = rule_of(held, scale_rule) or held.scales
        offsets = starts = scales = None
        if not numbers and swizzle is None:
            scales = like.new_empty(rows, -(-columns // held.columns), dtype=held.scale_dtype)
        elif not numbers:
            shape = padded_shape(rows, -(-columns // held.columns), swizzle)
            scales = like.new_zeros(shape, dtype=torch.uint8)
            offsets, starts = swizzle, padded_starts(swizzle)
        values = like.new_empty(rows, columns, dtype=like.dtype if numbers else torch.uint8)
        self.pointers = (values, scales, starts, offsets)
        self.flags = {
            "RULE": rule,
            "GROUP": held.columns,
            "EXPERTS": 0 if offsets is None else offsets.shape[0] - 1,
        }
        self.rows = QuantizedRows(values if numbers else values.view(torch.float8_e4m3fn), scales)
