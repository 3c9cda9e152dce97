"""``y`` of ``samebits.ops.scaled_gemm`` for many rows, by warps that have work of their own.

One warp loads blocks of rows and weights into a ring; two warpgroups of 64 rows each multiply, scale and
add. A block's 256 columns are four products, and while one of them is scaled in registers the matrix unit
has the next, or one of the other warpgroup. Steps, their order and their roundings are those of
``samebits.ops.scaled_gemm.kernel``. Programs are persistent.

In Gluon, which has no interpreter: cubins, and comparisons on a GPU, test this file. All products of a
warpgroup stand in one line of code: of products in several branches ptxas mixed up the operands.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor as HostDescriptor

from samebits.formats.matrix import QuantizedMatrix
from samebits.ops._triton.launch import recordable
from samebits.ops._triton.operand import row_operand, weight_operand
from samebits.ops._triton.product import tile_of_position
from samebits.ops.permute.tuning import Tiles
from samebits.ops.scaled_gemm.tuning import Config

# Triton 3.6 and 3.7 call it by these names.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

# Of every tile: rows, rows of a warpgroup, columns, columns of a product, columns of a block.
ROWS, HALF, COLUMNS, PRODUCT, BLOCK = 128, 64, 256, 64, 128


@gluon.jit
def _following(stage, phase, STAGES: gl.constexpr):
    """Return the next stage of the ring, and its phase."""
    wrapped = stage + 1 == STAGES
    return gl.where(wrapped, 0, stage + 1), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _load(
    rows, w, full, empty, row_ring, w_ring, expert_ptr, row_ptr, tiles, column_blocks, K,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    stage = 0
    phase = 1
    for position in range(gl.program_id(0), tiles * column_blocks, gl.num_programs(0)):
        tile, column_block = tile_of_position(position, tiles, column_blocks, GROUP)
        expert = gl.load(expert_ptr + tile)
        first = gl.load(row_ptr + tile)
        for k in range(0, K, 128):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, (128 + 256) * 128)
            tma.async_copy_global_to_shared(rows, [first, k], bar, row_ring.index(stage))
            tma.async_copy_global_to_shared(
                w, [expert, column_block * 256, k], bar, w_ring.index(stage)
            )
            stage, phase = _following(stage, phase, STAGES)


@gluon.jit
def _store(
    sums, buffer, y, y_ptr, bias_ptr, probs_ptr, slots_ptr, expert, first, end, column, N,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add the bias, round and store ``[64, 64]`` sums; rows from ``end`` on are others'."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if bias_ptr is not None:
        biased = column + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
        bias = gl.load(bias_ptr + expert.to(gl.int64) * N + biased, mask=biased < N, other=0.0)
        bias = gl.expand_dims(bias.to(gl.float32), 0)
        if probs_ptr is not None:
            own = first + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
            slots = gl.load(slots_ptr + own, mask=own < end, other=0)
            p = gl.load(probs_ptr + slots, mask=own < end, other=0.0).to(gl.float32)
            bias = bias * gl.expand_dims(p, 1)
        sums = sums + bias
    # What was stored before has left the buffer.
    tma.store_wait(0)
    _barrier()
    buffer.store(sums.to(buffer.dtype))
    if first + 64 <= end:
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [first, column], buffer)
    else:
        _barrier()
        values = buffer.load(WIDE)
        places = first + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
        columns = column + gl.arange(0, 64, gl.SliceLayout(0, WIDE))
        inside = gl.expand_dims(places < end, 1) & gl.expand_dims(columns < N, 0)
        offsets = gl.expand_dims(places.to(gl.int64) * N, 1) + gl.expand_dims(columns, 0)
        gl.store(y_ptr + offsets, values, mask=inside)


@gluon.jit
def _scale_pointer(
    scales_ptr, stride_se, stride_sn, expert, column, N, SCALE_ROWS: gl.constexpr
):  # fmt: skip
    """Return where the scales of 128 columns start; of columns past the last, those of the last."""
    place = gl.minimum(column, N - 1) // SCALE_ROWS
    return scales_ptr + expert.to(gl.int64) * stride_se + place.to(gl.int64) * stride_sn


@gluon.jit
def _start(a, b, zeros, PART: gl.constexpr):
    """Start the product of 64 of 256 columns."""
    columns = b.slice(PART * 64, 64, dim=0).permute((1, 0))
    return warpgroup_mma(a, columns, zeros, use_acc=False, is_async=True)


@gluon.jit
def _multiply(
    full, empty, row_ring, w_ring, buffer, row_scales_ptr,
    scales_ptr, stride_se, stride_sn, stride_sk,
    y, y_ptr, bias_ptr, probs_ptr, slots_ptr, expert_ptr, row_ptr, end_ptr,
    tiles, column_blocks, N, K,
    GROUP: gl.constexpr, STAGES: gl.constexpr, SCALE_ROWS: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Compute 64 rows of each tile, from its row ``FIRST`` on."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    blocks = gl.cdiv(K, 128)
    stage = 0
    phase = 0
    for position in range(gl.program_id(0), tiles * column_blocks, gl.num_programs(0)):
        tile, column_block = tile_of_position(position, tiles, column_blocks, GROUP)
        expert = gl.load(expert_ptr + tile)
        first = gl.load(row_ptr + tile) + FIRST
        end = gl.load(end_ptr + tile)
        column = column_block * 256
        if first < end:
            places = first + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
            # Rows past the last have the scale of the first; nothing of them is kept.
            source = gl.where(places < end, places, first).to(gl.int64)
            row_scale_ptrs = row_scales_ptr + source * blocks
            left_ptr = _scale_pointer(
                scales_ptr, stride_se, stride_sn, expert, column, N, SCALE_ROWS
            )
            right_ptr = _scale_pointer(
                scales_ptr, stride_se, stride_sn, expert, column + 128, N, SCALE_ROWS
            )
            # Scales are loaded a block ahead.
            row_scale = gl.load(row_scale_ptrs)
            left = gl.load(left_ptr)
            right = gl.load(right_ptr)
            zeros = gl.zeros((64, 64), gl.float32, LAYOUT)
            sums_0 = zeros
            sums_1 = zeros
            sums_2 = zeros
            sums_3 = zeros
            for block in range(blocks):
                following = gl.minimum(block + 1, blocks - 1).to(gl.int64)
                mbarrier.wait(full.index(stage), phase)
                a = row_ring.index(stage).slice(FIRST, 64, dim=0)
                b = w_ring.index(stage).reshape((256, 128))
                term_0 = _start(a, b, zeros, 0)
                term_1 = _start(a, b, zeros, 1)
                next_row_scale = gl.load(row_scale_ptrs + following)
                next_left = gl.load(left_ptr + following * stride_sk)
                next_right = gl.load(right_ptr + following * stride_sk)
                scale = gl.expand_dims(row_scale, 1)
                term_0 = warpgroup_mma_wait(1, deps=[term_0])
                sums_0 += (term_0 * scale) * left
                term_2 = _start(a, b, zeros, 2)
                term_1 = warpgroup_mma_wait(1, deps=[term_1])
                sums_1 += (term_1 * scale) * left
                term_3 = _start(a, b, zeros, 3)
                term_2 = warpgroup_mma_wait(1, deps=[term_2])
                sums_2 += (term_2 * scale) * right
                term_3 = warpgroup_mma_wait(0, deps=[term_3])
                mbarrier.arrive(empty.index(stage), count=1)
                sums_3 += (term_3 * scale) * right
                row_scale = next_row_scale
                left = next_left
                right = next_right
                stage, phase = _following(stage, phase, STAGES)
            for part in gl.static_range(4):
                _store(
                    (sums_0, sums_1, sums_2, sums_3)[part], buffer, y, y_ptr,
                    bias_ptr, probs_ptr, slots_ptr, expert, first, end,
                    column + part * 64, N, LAYOUT,
                )  # fmt: skip
        else:
            for _ in range(blocks):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = _following(stage, phase, STAGES)
    tma.store_wait(0)


@recordable
@gluon.jit(do_not_specialize=["stride_se", "stride_sn"])
def _specialized_product_kernel(
    rows, w, y, row_scales_ptr, scales_ptr, stride_se, stride_sn, stride_sk,
    y_ptr, bias_ptr, probs_ptr, slots_ptr, expert_ptr, row_ptr, end_ptr, tiles_ptr, N, K,
    GROUP: gl.constexpr, STAGES: gl.constexpr, SCALE_ROWS: gl.constexpr,
):  # fmt: skip
    row_ring = gl.allocate_shared_memory(rows.dtype, [STAGES, 128, 128], rows.layout)
    w_ring = gl.allocate_shared_memory(rows.dtype, [STAGES, 1, 256, 128], w.layout)
    buffers = gl.allocate_shared_memory(y.dtype, [2, 64, 64], y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    _barrier()
    tiles = gl.load(tiles_ptr)
    column_blocks = gl.cdiv(N, 256)
    gl.warp_specialize(
        [
            (_multiply, (
                full, empty, row_ring, w_ring, buffers.index(0), row_scales_ptr,
                scales_ptr, stride_se, stride_sn, stride_sk,
                y, y_ptr, bias_ptr, probs_ptr, slots_ptr, expert_ptr, row_ptr, end_ptr,
                tiles, column_blocks, N, K, GROUP, STAGES, SCALE_ROWS, gl.constexpr(0),
            )),
            (_multiply, (
                full, empty, row_ring, w_ring, buffers.index(1), row_scales_ptr,
                scales_ptr, stride_se, stride_sn, stride_sk,
                y, y_ptr, bias_ptr, probs_ptr, slots_ptr, expert_ptr, row_ptr, end_ptr,
                tiles, column_blocks, N, K, GROUP, STAGES, SCALE_ROWS, gl.constexpr(64),
            )),
            (_load, (
                rows, w, full, empty, row_ring, w_ring, expert_ptr, row_ptr,
                tiles, column_blocks, K, GROUP, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def launch_specialized(
    rows: Tensor,
    row_scales: Tensor,
    slots: Tensor,
    tiles: Tiles,
    weight: QuantizedMatrix,
    bias: Tensor | None,
    probs: Tensor | None,
    y: Tensor,
    config: Config,
) -> bool:
    """Write ``y``, or return False where no descriptor reads and writes these operands.

    Args:
        rows: See ``launch_scaled_gemm``; the rest too.
        row_scales: See there.
        slots: See there.
        tiles: Tiles of 128 rows.
        weight: Scales of 128 columns.
        bias: Contiguous.
        probs: See there.
        y: ``(R, N)``, written.
        config: Tile.

    Determinism: see there; the same bits.
    """
    held = weight.format
    if held.columns != BLOCK or held.rows % (COLUMNS // 2) or y.element_size() != 2:
        return False
    source, _, described = weight_operand(weight.values, (COLUMNS, BLOCK))
    rows_operand, rows_described = row_operand(rows, (ROWS, BLOCK))
    y_operand, y_described = row_operand(y, (HALF, PRODUCT))
    if not (described and rows_described and y_described) or weight.values.stride(2) != 1:
        return False
    columns, contraction = y.shape[1], rows.shape[1]
    work = tiles.expert.shape[0] * triton.cdiv(columns, COLUMNS)
    _specialized_product_kernel[(min(work, config.programs),)](
        _swizzled(rows_operand), _swizzled(source), _swizzled(y_operand),
        row_scales, weight.scales, *weight.scales.stride(),
        y, bias, probs, slots, tiles.expert, tiles.row, tiles.end, tiles.count,
        columns, contraction,
        GROUP=config.group, STAGES=config.num_stages, SCALE_ROWS=held.rows,
        num_warps=config.num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return True


def _swizzled(described: HostDescriptor) -> TensorDescriptor:
    """Return a descriptor with the layout of its boxes in shared memory."""
    bits = 8 * described.base.element_size()
    box = described.block_shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=len(box))
    return TensorDescriptor(described.base, described.shape, described.strides, box, layout)
