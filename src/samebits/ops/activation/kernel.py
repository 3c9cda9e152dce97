"""Activation kernels: ``[R, 2F] → [R, F]`` and back, one pass over memory each.

    forward   z'[r, :] = D(z[r, :] + bias[e(r), :])                    (z' = z without a bias)
              h[r, j]  = D(glu(gate(z'[r]), up(z'[r]))[j] · p[r])
    backward  a, dgate, dup = glu'(dh[r, j] · p[r]);  dz[r, :] = D(dgate, dup) by the layout
              h[r, j]  = D(a · p[r])      dp[r] = Σ_j dh[r, j] · a[r, j]      dbias[e] = Σ_r dz[r, :]

A program owns ``[BLOCK_R, BLOCK_F]`` of h and the gate and up columns behind it; column blocks of
one row block are neighbours in the grid. With dp a program may own whole rows, walking over their
column blocks (otherwise a second launch adds the sums of columns), with bias gradients up to 64 rows
of one expert, counted from the expert's first row. All is fp32 between a load and a store.

Order of sums, the same for every tile: dp adds the sums of 64 columns in ascending order (inside
the 64: neighbours in pairs, six times); a bias gradient adds the rounded dz rows of 64 rows in
ascending order, then these chunk sums. Rows from ``num_rows`` on are untouched, but their dp is 0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.activation import Activation
from samebits.ops._triton.chunks import CHUNK, chunk_of_program, chunks_of_expert
from samebits.ops._triton.columns import load_gate_up, store_gate_up
from samebits.ops._triton.launch import recordable
from samebits.ops._triton.rows import expert_of_row, sum_ascending, sum_of_64_columns
from samebits.ops.activation.operands import Backward, Operands, Wanted
from samebits.ops.activation.tiles import (
    TileOptions,
    act_tile,
    glu_derivative_tile,
    glu_tile,
    slope_tile,
)
from samebits.ops.activation.tuning import Config, backward_heuristic, forward_heuristic
from samebits.weights import Layout


@triton.jit
def _run_time_scalars(values, scalars_ptr, LIMIT: tl.constexpr):
    """Return the five tile scalars; limit and offset from memory where there is a pointer."""
    alpha, limit, offset, gate_cap, up_cap = values
    if scalars_ptr is not None:
        offset = tl.load(scalars_ptr + 1)
        # Adding −0 keeps every value and its sign, adding +0 would not.
        offset = tl.where(offset == 0.0, -0.0, offset)
        if LIMIT != "none":
            limit = tl.load(scalars_ptr)
            # The host cannot look at this limit: one that is not finite and > 0 makes NaN.
            alpha = tl.where((limit > 0.0) & (limit < float("inf")), alpha, float("nan"))
    return alpha, limit, offset, gate_cap, up_cap


@triton.jit
def _live_rows(R, num_rows_ptr, offsets_ptr, EXPERTS: tl.constexpr):
    """Return the number of rows to compute, int64: R, the device count and the last offset bound it."""
    live = tl.cast(R, tl.int64)
    if num_rows_ptr is not None:
        live = tl.minimum(live, tl.load(num_rows_ptr).to(tl.int64))
    if EXPERTS:
        live = tl.minimum(live, tl.load(offsets_ptr + EXPERTS).to(tl.int64))
    return live


@triton.jit
def _load_z(
    row_ptrs, bias_ptr, offsets_ptr, rows, column, mask, F,
    GATED: tl.constexpr, INTERLEAVE: tl.constexpr, UP_FIRST: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Load gate and up of ``z' = D(z + bias)``, fp32."""
    gate, up = load_gate_up(
        row_ptrs, column, mask, F, GATED, INTERLEAVE, UP_FIRST, BLOCK_R, BLOCK_F
    )  # fmt: skip
    if bias_ptr is not None:
        # After the loads of z, so that the search for the experts runs while they are in flight.
        BIAS_ROWS: tl.constexpr = BLOCK_R if EXPERTS else 1
        bias_ptrs = bias_ptr + tl.zeros([1, 1], tl.int64)
        if EXPERTS:
            width = 2 * F if GATED else F
            experts = expert_of_row(offsets_ptr, rows, EXPERTS).to(tl.int64)
            bias_ptrs = bias_ptr + (experts * width)[:, None]
        everywhere = tl.full([BIAS_ROWS, 1], True, tl.int1)
        gate_bias, up_bias = load_gate_up(
            bias_ptrs, column, everywhere, F, GATED, INTERLEAVE, UP_FIRST, BIAS_ROWS, BLOCK_F
        )
        dtype = row_ptrs.dtype.element_ty
        gate = (gate + gate_bias).to(dtype).to(tl.float32)
        up = (up + up_bias).to(dtype).to(tl.float32)
    return gate, up


@recordable
@triton.jit(do_not_specialize=["R"])
def _activation_forward_kernel(
    z_ptr, stride_zr, bias_ptr, probs_ptr,
    h_ptr,
    offsets_ptr, num_rows_ptr, scalars_ptr,
    R, F, values,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_UP_CAP: tl.constexpr,
    INTERLEAVE: tl.constexpr, UP_FIRST: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    column_blocks = tl.cdiv(F, BLOCK_F)
    first = (tl.program_id(0) // column_blocks).to(tl.int64) * BLOCK_R
    column = (tl.program_id(0) % column_blocks) * BLOCK_F
    live = _live_rows(R, num_rows_ptr, offsets_ptr, EXPERTS)
    if first >= live:
        return

    rows = first + tl.arange(0, BLOCK_R)
    inside = (rows < live)[:, None]

    gate, up = _load_z(
        z_ptr + (rows * stride_zr)[:, None], bias_ptr, offsets_ptr, rows, column, inside, F,
        GATED, INTERLEAVE, UP_FIRST, EXPERTS, BLOCK_R, BLOCK_F,
    )  # fmt: skip
    alpha, limit, offset, gate_cap, up_cap = _run_time_scalars(values, scalars_ptr, LIMIT)
    if GATED:
        h = glu_tile(
            gate, up, alpha, limit, offset, gate_cap, up_cap, KIND, LIMIT, HAS_OFFSET, HAS_UP_CAP
        )
    else:
        h = act_tile(gate, alpha, gate_cap, KIND)

    if probs_ptr is not None:
        h = h * tl.load(probs_ptr + rows, mask=rows < live, other=0.0).to(tl.float32)[:, None]
    columns = column + tl.arange(0, BLOCK_F)[None, :]
    h_ptrs = h_ptr + (rows * F)[:, None] + columns
    tl.store(h_ptrs, h.to(h_ptr.dtype.element_ty), mask=inside & (columns < F))


@triton.jit
def _backward_tile(
    dh, gate, up, p, values,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_UP_CAP: tl.constexpr,
):  # fmt: skip
    """Return ``(a, dgate, dup)``: the activation without p, the gradients with it; fp32."""
    alpha, limit, offset, gate_cap, up_cap = values
    scaled = dh * p
    if GATED:
        return glu_derivative_tile(
            scaled, gate, up, alpha, limit, offset, gate_cap, up_cap,
            KIND, LIMIT, HAS_OFFSET, HAS_UP_CAP,
        )  # fmt: skip
    act, slope = slope_tile(gate, alpha, gate_cap, KIND)
    dgate = scaled * slope
    return act, dgate, dgate


@triton.jit(do_not_specialize=["R"])
def _activation_backward_kernel(
    dh_ptr, stride_dr, z_ptr, stride_zr, bias_ptr, probs_ptr,
    dz_ptr, h_ptr, dp_ptr, partial_ptr,
    offsets_ptr, num_rows_ptr, scalars_ptr,
    R, F, values,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_UP_CAP: tl.constexpr,
    INTERLEAVE: tl.constexpr, UP_FIRST: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Walk over all column blocks of the rows, and finish their dp.
    WALK: tl.constexpr = dp_ptr is not None
    column_blocks = tl.cdiv(F, BLOCK_F)
    per_row = 1 if WALK else column_blocks
    first = (tl.program_id(0) // per_row).to(tl.int64) * BLOCK_R
    start = (tl.program_id(0) % per_row) * BLOCK_F
    stop = F if WALK else tl.minimum(start + BLOCK_F, F)
    live = _live_rows(R, num_rows_ptr, offsets_ptr, EXPERTS)
    if first >= live:
        return

    rows = first + tl.arange(0, BLOCK_R)
    inside = (rows < live)[:, None]
    width = 2 * F if GATED else F
    p = 1.0
    if probs_ptr is not None:
        p = tl.load(probs_ptr + rows, mask=rows < live, other=0.0).to(tl.float32)[:, None]
    scalars = _run_time_scalars(values, scalars_ptr, LIMIT)
    z_rows = z_ptr + (rows * stride_zr)[:, None]
    dh_rows = dh_ptr + (rows * stride_dr)[:, None]
    dz_rows = dz_ptr + (rows * width)[:, None]
    partials = tl.cdiv(F, 64)

    for column in tl.range(start, stop, BLOCK_F, num_stages=STAGES):
        columns = column + tl.arange(0, BLOCK_F)[None, :]
        mask = inside & (columns < F)
        dh = tl.load(dh_rows + columns, mask=mask, other=0.0).to(tl.float32)
        gate, up = _load_z(
            z_rows, bias_ptr, offsets_ptr, rows, column, inside, F,
            GATED, INTERLEAVE, UP_FIRST, EXPERTS, BLOCK_R, BLOCK_F,
        )  # fmt: skip
        act, dgate, dup = _backward_tile(
            dh, gate, up, p, scalars, KIND, GATED, LIMIT, HAS_OFFSET, HAS_UP_CAP
        )

        dtype = dz_ptr.dtype.element_ty
        store_gate_up(
            dz_rows, dgate.to(dtype), dup.to(dtype), column, inside, F,
            GATED, INTERLEAVE, UP_FIRST, BLOCK_R, BLOCK_F,
        )  # fmt: skip
        if h_ptr is not None:
            h = (act * p).to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + (rows * F)[:, None] + columns, h, mask=mask)
        if partial_ptr is not None:
            sums = sum_of_64_columns(tl.where(mask, dh * act, 0.0), BLOCK_R, BLOCK_F)
            places = column // 64 + tl.arange(0, BLOCK_F // 64)[None, :]
            partial_ptrs = partial_ptr + (rows * partials)[:, None] + places
            tl.store(partial_ptrs, sums, mask=inside & (places < partials))

    if WALK:
        # The partial sums were written by other threads of this program.
        tl.debug_barrier()
        row_starts = partial_ptr + rows * partials
        tl.store(dp_ptr + rows, sum_ascending(row_starts, rows < live, partials), mask=rows < live)


@triton.jit(do_not_specialize=["R"])
def _activation_bias_backward_kernel(
    dh_ptr, stride_dr, z_ptr, stride_zr, bias_ptr, probs_ptr,
    dz_ptr, h_ptr, partial_ptr, chunk_sums_ptr,
    offsets_ptr, num_rows_ptr, scalars_ptr,
    R, F, values,
    KIND: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_UP_CAP: tl.constexpr,
    INTERLEAVE: tl.constexpr, UP_FIRST: tl.constexpr,
    EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_F: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column_blocks = tl.cdiv(F, BLOCK_F)
    chunk = (tl.program_id(0) // column_blocks).to(tl.int64)
    column = (tl.program_id(0) % column_blocks) * BLOCK_F
    live = _live_rows(R, num_rows_ptr, offsets_ptr, EXPERTS)
    if EXPERTS == 0:
        expert, first = 0, chunk * CHUNK
        end = tl.minimum(first + CHUNK, live)
    else:
        expert, first, end = chunk_of_program(
            offsets_ptr, chunk, live, EXPERTS, EXPERTS_POW2, CHUNK
        )

    width = 2 * F if GATED else F
    columns = column + tl.arange(0, BLOCK_F)[None, :]
    mask = columns < F
    inside = tl.full([1, 1], True, tl.int1)
    bias_row = bias_ptr + (tl.zeros([1, 1], tl.int64) + expert) * width
    gate_bias, up_bias = load_gate_up(
        bias_row, column, inside, F, GATED, INTERLEAVE, UP_FIRST, 1, BLOCK_F
    )
    scalars = _run_time_scalars(values, scalars_ptr, LIMIT)
    partials = tl.cdiv(F, 64)
    places = column // 64 + tl.arange(0, BLOCK_F // 64)[None, :]
    dtype = dz_ptr.dtype.element_ty
    gate_sum = tl.zeros([1, BLOCK_F], tl.float32)
    up_sum = tl.zeros([1, BLOCK_F], tl.float32)

    for row in tl.range(first, end, num_stages=STAGES):
        corner = tl.zeros([1, 1], tl.int64) + row
        dh = tl.load(dh_ptr + corner * stride_dr + columns, mask=mask, other=0.0).to(tl.float32)
        gate, up = load_gate_up(
            z_ptr + corner * stride_zr, column, inside, F,
            GATED, INTERLEAVE, UP_FIRST, 1, BLOCK_F,
        )  # fmt: skip
        gate = (gate + gate_bias).to(dtype).to(tl.float32)
        up = (up + up_bias).to(dtype).to(tl.float32)
        p = tl.load(probs_ptr + row).to(tl.float32) if probs_ptr is not None else 1.0
        act, dgate, dup = _backward_tile(
            dh, gate, up, p, scalars, KIND, GATED, LIMIT, HAS_OFFSET, HAS_UP_CAP
        )

        dgate = dgate.to(dtype)
        dup = dup.to(dtype)
        store_gate_up(
            dz_ptr + corner * width, dgate, dup, column, inside, F,
            GATED, INTERLEAVE, UP_FIRST, 1, BLOCK_F,
        )  # fmt: skip
        gate_sum += dgate.to(tl.float32)
        up_sum += dup.to(tl.float32)
        if h_ptr is not None:
            h = (act * p).to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + corner * F + columns, h, mask=mask)
        if partial_ptr is not None:
            sums = sum_of_64_columns(tl.where(mask, dh * act, 0.0), 1, BLOCK_F)
            tl.store(partial_ptr + corner * partials + places, sums, mask=places < partials)

    store_gate_up(
        chunk_sums_ptr + (tl.zeros([1, 1], tl.int64) + chunk) * width,
        gate_sum, up_sum, column, inside & (first < end), F,
        GATED, INTERLEAVE, UP_FIRST, 1, BLOCK_F,
    )  # fmt: skip


@triton.jit(do_not_specialize=["R"])
def _sum_chunks_kernel(
    chunk_sums_ptr, dbias_ptr, offsets_ptr, num_rows_ptr,
    R, width,
    EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the chunk sums of one expert in ascending order."""
    expert = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = _live_rows(R, num_rows_ptr, offsets_ptr, EXPERTS)
    if EXPERTS == 0:
        start = tl.zeros([], tl.int64)
        end = tl.cdiv(live, CHUNK)
    else:
        start, end = chunks_of_expert(offsets_ptr, expert, live, EXPERTS_POW2, CHUNK)

    total = tl.zeros([BLOCK], tl.float32)
    for chunk in range(start, end):
        total += tl.load(chunk_sums_ptr + chunk * width + columns, mask=columns < width, other=0.0)
    place = dbias_ptr + expert.to(tl.int64) * width + columns
    tl.store(place, total.to(dbias_ptr.dtype.element_ty), mask=columns < width)


@triton.jit(do_not_specialize=["R"])
def _sum_partials_kernel(
    partial_ptr, dp_ptr, offsets_ptr, num_rows_ptr, R, partials,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the 64-column sums of each row in ascending order."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = _live_rows(R, num_rows_ptr, offsets_ptr, EXPERTS)
    inside = rows < live
    dp = sum_ascending(partial_ptr + rows * partials, inside, partials, STEP=32)
    tl.store(dp_ptr + rows, dp, mask=inside)


def _layout_flags(layout: Layout) -> dict[str, int | bool]:
    return {"INTERLEAVE": layout.interleave or 0, "UP_FIRST": layout.up_first}


def _experts(operands: Operands) -> int:
    """Return the number of bias rows, 0 for one bias (or none)."""
    bias = operands.bias
    return bias.shape[0] if bias is not None and bias.dim() == 2 else 0


def launch_activation_forward(
    operands: Operands, activation: Activation, layout: Layout, config: Config | None = None
) -> Tensor:
    """Return ``h``; see ``samebits.ops.activation.activate``.

    Determinism: elementwise; the same bits for every ``config``.
    """
    z, bias, offsets, row_probs, num_rows, scalars = operands
    rows, columns = z.shape[0], z.shape[1] // activation.columns
    h = z.new_empty(rows, columns)
    if h.numel() == 0:
        return h
    tile = TileOptions.of(activation, z.dtype)
    config = config or forward_heuristic(rows, columns, z.element_size())
    grid = (triton.cdiv(rows, config.block_r) * triton.cdiv(columns, config.block_f),)
    _activation_forward_kernel[grid](
        z, z.stride(0), bias, row_probs, h, offsets, num_rows, scalars, rows, columns,
        tile.scalars, **tile.flags, **_layout_flags(layout), EXPERTS=_experts(operands),
        BLOCK_R=config.block_r, BLOCK_F=config.block_f,
        num_warps=config.num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return h


def launch_activation_backward(
    dh: Tensor,
    operands: Operands,
    activation: Activation,
    layout: Layout,
    wanted: Wanted,
    config: Config | None = None,
) -> Backward:
    """Return the gradients; see ``samebits.ops.activation.activate_backward``.

    Determinism: repeatable; the same bits for every ``config``.
    """
    z, bias = operands.z, operands.bias
    rows, columns = z.shape[0], z.shape[1] // activation.columns
    counted = operands.num_rows is not None or operands.offsets is not None
    dp = None
    if wanted.dp:
        dp = (torch.zeros if counted else torch.empty)(rows, dtype=torch.float32, device=z.device)
    result = Backward(
        dz=z.new_empty(z.shape),
        dp=dp,
        h=z.new_empty(rows, columns) if wanted.h else None,
        dbias=bias.new_zeros(bias.shape) if wanted.dbias and bias is not None else None,
    )
    if rows * columns == 0:
        return result._replace(dp=None if dp is None else dp.zero_())
    dbias = result.dbias is not None
    config = config or backward_heuristic(
        rows, columns, z.element_size(), dbias=dbias, dp=wanted.dp
    )
    launch = _launch_chunks if dbias else _launch_rows
    launch(dh, operands, activation, layout, result, config)
    return result


def _partials(result: Backward, columns: int) -> Tensor | None:
    if result.dp is None:
        return None
    return result.dp.new_empty(result.dp.shape[0], triton.cdiv(columns, 64))


def _launch_rows(
    dh: Tensor,
    operands: Operands,
    activation: Activation,
    layout: Layout,
    result: Backward,
    config: Config,
) -> None:
    z, bias, offsets, row_probs, num_rows, scalars = operands
    rows, columns = dh.shape
    tile = TileOptions.of(activation, z.dtype)
    partial = _partials(result, columns)
    walk = partial is not None and config.walk
    per_row = 1 if walk else triton.cdiv(columns, config.block_f)
    _activation_backward_kernel[(triton.cdiv(rows, config.block_r) * per_row,)](
        dh, dh.stride(0), z, z.stride(0), bias, row_probs,
        result.dz, result.h, result.dp if walk else None, partial,
        offsets, num_rows, scalars, rows, columns,
        tile.scalars, **tile.flags, **_layout_flags(layout), EXPERTS=_experts(operands),
        BLOCK_R=config.block_r, BLOCK_F=config.block_f, STAGES=config.num_stages,
        num_warps=config.num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    if partial is not None and not walk:
        _sum_partials(partial, operands, result)


def _sum_partials(partial: Tensor, operands: Operands, result: Backward) -> None:
    _sum_partials_kernel[(triton.cdiv(partial.shape[0], 32),)](
        partial, result.dp, operands.offsets, operands.num_rows, *partial.shape,
        EXPERTS=_experts(operands), BLOCK=32, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def _launch_chunks(
    dh: Tensor,
    operands: Operands,
    activation: Activation,
    layout: Layout,
    result: Backward,
    config: Config,
) -> None:
    z, bias, offsets, row_probs, num_rows, scalars = operands
    rows, columns = dh.shape
    experts = _experts(operands)
    # Every expert can end in a chunk that is not full.
    chunks = triton.cdiv(rows, CHUNK) + experts
    chunk_sums = z.new_empty(chunks, z.shape[1], dtype=torch.float32)
    partial = _partials(result, columns)
    tile = TileOptions.of(activation, z.dtype)
    sizes = {"EXPERTS": experts, "EXPERTS_POW2": triton.next_power_of_2(max(experts, 1))}
    _activation_bias_backward_kernel[(chunks * triton.cdiv(columns, config.block_f),)](
        dh, dh.stride(0), z, z.stride(0), bias, row_probs,
        result.dz, result.h, partial, chunk_sums,
        offsets, num_rows, scalars, rows, columns,
        tile.scalars, **tile.flags, **_layout_flags(layout), **sizes,
        CHUNK=CHUNK, BLOCK_F=config.block_f, STAGES=config.num_stages,
        num_warps=config.num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    _sum_chunks_kernel[(triton.cdiv(z.shape[1], 128), max(experts, 1))](
        chunk_sums, result.dbias, offsets, num_rows, rows, z.shape[1],
        **sizes, CHUNK=CHUNK, BLOCK=128, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if partial is not None:
        _sum_partials(partial, operands, result)
