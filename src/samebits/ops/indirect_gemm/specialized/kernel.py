"""The second projection of many rows, on sm_90: see ``samebits.ops._triton.specialized``.

The sums, bias and rounding of ``samebits.ops.indirect_gemm.kernel``'s, for whole 16-bit operands that
descriptors can read; every other call stays with that one.
"""

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from samebits.ops._triton.launch import recordable
from samebits.ops._triton.operand import matrix_operand, row_operand
from samebits.ops._triton.specialized import (
    CONSUMER_ROWS,
    ROWS,
    contract,
    leave,
    let_pass,
    make_ready,
    next_step,
    swizzled,
    tile_at,
)
from samebits.ops.indirect_gemm.tuning import Specialized
from samebits.ops.permute.tuning import Tiles

# Tile of a program.
BLOCK_R, BLOCK_N = 128, 256
_KNOWN = triton.__version__.split(".")[:2] in (["3", "6"], ["3", "7"])


@gluon.jit
def _loads(
    rows, w, ring, tiles, column_blocks, table, K,
    TRANSPOSED: gl.constexpr, GROUP: gl.constexpr, NUM_STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """The producer: every step of every tile of this program."""
    full, empty, row_ring, matrix_ring = ring
    expert_ptr, row_ptr, end_ptr = table
    BYTES: gl.constexpr = rows.block_type.nbytes + w.block_type.nbytes
    stage, phase = 0, 1
    position = gl.program_id(0)
    tile = tile_at(position, tiles, column_blocks, expert_ptr, row_ptr, end_ptr, GROUP)
    while position < tiles * column_blocks:
        expert, first, _, block = tile
        position += gl.num_programs(0)
        tile = tile_at(position, tiles, column_blocks, expert_ptr, row_ptr, end_ptr, GROUP)
        for k in range(0, K, BLOCK_K):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, BYTES)
            tma.async_copy_global_to_shared(rows, [first, k], bar, row_ring.index(stage))
            place = [expert, k, block * BLOCK_N] if TRANSPOSED else [expert, block * BLOCK_N, k]
            tma.async_copy_global_to_shared(w, place, bar, matrix_ring.index(stage))
            stage, phase = next_step(stage, phase, NUM_STAGES)


@gluon.jit
def _sums(
    out, ring, buffer, tiles, column_blocks, table, K, N,
    HALF: gl.constexpr, TRANSPOSED: gl.constexpr, GROUP: gl.constexpr, NUM_STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """A consumer: the products of its rows of every tile, and what becomes of them."""
    y, y_ptr, bias_ptr, probs_ptr, slots_ptr = out
    expert_ptr, row_ptr, end_ptr = table
    dtype: gl.constexpr = y.dtype
    stage, phase = 0, 0
    position = gl.program_id(0)
    tile = tile_at(position, tiles, column_blocks, expert_ptr, row_ptr, end_ptr, GROUP)
    while position < tiles * column_blocks:
        expert, first, end, block = tile
        first += HALF * ROWS
        position += gl.num_programs(0)
        tile = tile_at(position, tiles, column_blocks, expert_ptr, row_ptr, end_ptr, GROUP)
        if first < end:
            acc, stage, phase = contract(
                ring, stage, phase, K, HALF, TRANSPOSED, NUM_STAGES, BLOCK_N, BLOCK_K
            )
            column = block * BLOCK_N
            if bias_ptr is not None:
                columns = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, acc.type.layout))
                place = bias_ptr + expert.to(gl.int64) * N + columns
                bias = gl.load(place, mask=columns < N, other=0.0)
                bias = gl.expand_dims(bias.to(gl.float32), 0)
                if probs_ptr is not None:
                    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
                    slots = gl.load(slots_ptr + rows, mask=rows < end, other=0)
                    p = gl.load(probs_ptr + slots, mask=rows < end, other=0.0)
                    bias = bias * gl.expand_dims(p.to(gl.float32), 1)
                acc = acc + bias
            leave(acc.to(dtype), buffer, y, y_ptr, first, end, column, N, BLOCK_N)
        else:
            stage, phase = let_pass(ring, stage, phase, K, NUM_STAGES, BLOCK_K)
    tma.store_wait(0)


@recordable
@gluon.jit
def _specialized_projection_kernel(
    h, w, y, y_ptr, bias_ptr, probs_ptr,
    slots_ptr, tile_expert_ptr, tile_row_ptr, tile_end_ptr, tiles_ptr,
    K, N,
    TRANSPOSED: gl.constexpr, GROUP: gl.constexpr, NUM_STAGES: gl.constexpr,
    BLOCK_R: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = h.dtype
    rows = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_R, BLOCK_K], h.layout)
    matrices = gl.allocate_shared_memory(dtype, [NUM_STAGES] + w.block_type.shape, w.layout)  # noqa: RUF005
    buffers = gl.allocate_shared_memory(dtype, [2] + y.block_type.shape, y.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    make_ready(full, empty, 1, NUM_STAGES)
    ring = (full, empty, rows, matrices)
    table = (tile_expert_ptr, tile_row_ptr, tile_end_ptr)
    tiles = gl.load(tiles_ptr)
    blocks = gl.cdiv(N, BLOCK_N)
    out = (y, y_ptr, bias_ptr, probs_ptr, slots_ptr)
    # Tuples with constants have to be written where they are used.
    gl.warp_specialize(
        [
            (
                _sums,
                (
                    out, ring, buffers.index(0), tiles, blocks, table,
                    K, N, gl.constexpr(0), TRANSPOSED, GROUP, NUM_STAGES, BLOCK_N, BLOCK_K,
                ),
            ),
            (
                _sums,
                (
                    out, ring, buffers.index(1), tiles, blocks, table,
                    K, N, gl.constexpr(1), TRANSPOSED, GROUP, NUM_STAGES, BLOCK_N, BLOCK_K,
                ),
            ),
            (
                _loads,
                (
                    h, w, ring, tiles, blocks, table, K,
                    TRANSPOSED, GROUP, NUM_STAGES, BLOCK_N, BLOCK_K,
                ),
            ),
        ],
        # Warps and registers of the second consumer and of the producer.
        [4, 1],
        [240, 24],
    )  # fmt: skip


def boxes_of(h: Tensor, w: Tensor, y: Tensor, config: Specialized) -> tuple[Any, ...] | None:
    """Return descriptors of rows, matrices and output, and whether the matrices are transposed.

    None where the hardware's rules forbid one, and where the kernel has not been compiled with this
    version of Triton: Gluon is not settled.

    Determinism: pure function of addresses, strides and dtypes.
    """
    rows, described = row_operand(h, (BLOCK_R, config.block_k))
    matrix = matrix_operand(w, (BLOCK_N, config.block_k))
    halves = h.element_size() == 2 and h.dtype == w.dtype == y.dtype
    if not (halves and described and matrix.described) or y.shape[1] % 8 or not _KNOWN:
        return None
    box, _ = row_operand(y, (CONSUMER_ROWS, BLOCK_N))
    return swizzled(rows), swizzled(matrix.source), swizzled(box), matrix.transposed


def launch_specialized(
    boxes: tuple[Any, ...],
    y: Tensor,
    bias: Tensor | None,
    probs: Tensor | None,
    slots: Tensor,
    tiles: Tiles,
    config: Specialized,
) -> None:
    """Write what ``launch_second_projection`` returns to ``y``.

    Args:
        boxes: Those of ``boxes_of``.
        y: ``(R, N)`` contiguous.
        bias: ``(E, N)`` contiguous.
        probs: Factor of the bias, by slot.
        slots: Slot of each row.
        tiles: Tiles of ``BLOCK_R`` rows.
        config: How the kernel is fed.

    Determinism: the bits of ``launch_second_projection``.
    """
    h, w, box, transposed = boxes
    columns = y.shape[1]
    work = tiles.expert.shape[0] * triton.cdiv(columns, BLOCK_N)
    _specialized_projection_kernel[(min(work, config.programs),)](
        h, w, box, y, bias, probs,
        slots, tiles.expert, tiles.row, tiles.end, tiles.count,
        h.shape[1], columns,
        TRANSPOSED=transposed, GROUP=config.group, NUM_STAGES=config.num_stages,
        BLOCK_R=BLOCK_R, BLOCK_N=BLOCK_N, BLOCK_K=config.block_k,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
