"""Weight gradients by warps of several kinds, for sm_90 (Gluon).

A program walks over tiles of ``[BLOCK_M, BLOCK_N]``. One warp loads steps of some rows through
tensor descriptors into a ring in shared memory, as far ahead as the ring is long; one puts zeros in
the place of the rows behind an expert's last, which its last box reads too; two warpgroups
multiply, each for half of a tile's rows, and store. They meet at barriers in shared memory only:
the next tile's rows arrive while this one leaves, and one warpgroup multiplies while the other
stores. The sums are those of the other kernel: one fp32 accumulator, rows ascending, 16 at a time.

Triton's interpreter knows no Gluon: cubins, and comparisons on a GPU, test this file. A warpgroup
has one product and no branch around it: ptxas mixed up the operands of several (docs/training.md).
"""

from typing import Any

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

from samebits.ops._triton.launch import recordable
from samebits.ops._triton.operand import row_operand, weight_operand
from samebits.ops._triton.product import tile_of_position
from samebits.ops.weight_gradient.tuning import Specialized


@gluon.jit
def _span_at(walk, position):
    """Return the expert of a tile, its first row and its end."""
    order_ptr, offsets_ptr, row_blocks, column_blocks = walk
    expert = gl.load(order_ptr + position // (row_blocks * column_blocks))
    return expert, gl.load(offsets_ptr + expert), gl.load(offsets_ptr + expert + 1)


@gluon.jit
def _corner_at(walk, position, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return the first row and column of a tile."""
    _, _, row_blocks, column_blocks = walk
    inside = position % (row_blocks * column_blocks)
    m_block, n_block = tile_of_position(inside, row_blocks, column_blocks, GROUP)
    return m_block * BLOCK_M, n_block * BLOCK_N


@gluon.jit
def _load(
    a, b, walk, tiles, ring, loaded, freed,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Fill the ring."""
    a_ring, b_ring = ring
    STAGES: gl.constexpr = b_ring.shape[0]
    ROWS: gl.constexpr = b_ring.shape[1]
    HALF: gl.constexpr = BLOCK_M // 2
    step = 0
    for position in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, start, end = _span_at(walk, position)
        m, n = _corner_at(walk, position, GROUP, BLOCK_M, BLOCK_N)
        for row in range(start, end, ROWS):
            stage = step % STAGES
            mbarrier.wait(freed.index(stage), (step // STAGES & 1) ^ 1)
            # Who clears a last step says that it is there.
            last = (end - row < ROWS).to(gl.int32)
            bar = loaded.index(stage + STAGES * last)
            mbarrier.expect(bar, ROWS * (BLOCK_M + BLOCK_N) * 2)
            tma.async_copy_global_to_shared(a, [row, m], bar, a_ring.index(2 * stage))
            tma.async_copy_global_to_shared(a, [row, m + HALF], bar, a_ring.index(2 * stage + 1))
            tma.async_copy_global_to_shared(b, [row, n], bar, b_ring.index(stage))
            step += 1


@gluon.jit
def _clear_behind(slices, first, count, ACROSS: gl.constexpr, DOWN: gl.constexpr):
    """Put zeros in the place of all rows but the first ``count`` of a stage.

    It consists of ``ACROSS`` x ``DOWN`` slices of 16 rows and 64 columns.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    row = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
    for i in gl.static_range(DOWN):
        if count < 16 * (i + 1):
            for across in gl.static_range(ACROSS):
                place = slices.index(first + across * DOWN + i)
                value = place.load(LAYOUT)
                place.store(gl.where((row + 16 * i < count)[:, None], value, 0.0))


@gluon.jit
def _clear(walk, tiles, ring, loaded, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Clear what the last step of each tile holds of other experts, or of none."""
    a_ring, b_ring = ring
    STAGES: gl.constexpr = b_ring.shape[0]
    ROWS: gl.constexpr = b_ring.shape[1]
    DOWN: gl.constexpr = ROWS // 16
    A: gl.constexpr = BLOCK_M // 64
    B: gl.constexpr = BLOCK_N // 64
    SLICE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    a_slices = a_ring._reinterpret(a_ring.dtype, [STAGES * A * DOWN, 16, 64], SLICE)
    b_slices = b_ring._reinterpret(b_ring.dtype, [STAGES * B * DOWN, 16, 64], SLICE)
    step = 0
    # A bit for each stage: the parity of its barrier.
    turns = 0
    for position in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, start, end = _span_at(walk, position)
        step += (end - start + ROWS - 1) // ROWS
        count = (end - start) % ROWS
        if count > 0:
            stage = (step - 1) % STAGES
            mbarrier.wait(loaded.index(STAGES + stage), turns >> stage & 1)
            turns ^= 1 << stage
            _clear_behind(a_slices, stage * A * DOWN, count, A, DOWN)
            _clear_behind(b_slices, stage * B * DOWN, count, B, DOWN)
            fence_async_shared()
            mbarrier.arrive(loaded.index(stage), count=1)


@gluon.jit
def _multiply(
    dw, walk, tiles, ring, out, loaded, freed,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Compute and store half ``WHICH`` of each tile."""
    a_ring, b_ring = ring
    STAGES: gl.constexpr = b_ring.shape[0]
    ROWS: gl.constexpr = b_ring.shape[1]
    HALF: gl.constexpr = BLOCK_M // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    box = out.index(WHICH)
    step = 0
    for position in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, start, end = _span_at(walk, position)
        acc = gl.zeros((HALF, BLOCK_N), gl.float32, ACC)
        for row in range(start, end, ROWS):
            stage = step % STAGES
            mbarrier.wait(loaded.index(stage), step // STAGES & 1)
            left, right = a_ring.index(2 * stage + WHICH), b_ring.index(stage)
            acc = warpgroup_mma(left.permute((1, 0)), right, acc, is_async=True)
            # The product before this one is done with its stage.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            before = freed.index((step + STAGES - 1) % STAGES)
            mbarrier.arrive(before, count=1, pred=row > start)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(freed.index((step + STAGES - 1) % STAGES), count=1, pred=end > start)
        # The tile before this one has left.
        tma.store_wait(0)
        box.store(acc.to(dw.dtype).reshape((1, HALF, BLOCK_N)))
        fence_async_shared()
        m, n = _corner_at(walk, position, GROUP, BLOCK_M, BLOCK_N)
        tma.async_copy_shared_to_global(dw, [expert, m + WHICH * HALF, n], box)
    tma.store_wait(0)


# Sizes choose no other code.
@recordable
@gluon.jit(do_not_specialize=["E", "M", "N"])
def _specialized_weight_gradient_kernel(
    a, b, dw, order_ptr, offsets_ptr, E, M, N,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    row_blocks, column_blocks = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    walk = order_ptr, offsets_ptr, row_blocks, column_blocks
    tiles = E * row_blocks * column_blocks
    a_ring = gl.allocate_shared_memory(a.dtype, [2 * STAGES, BLOCK_K, BLOCK_M // 2], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_K, BLOCK_N], b.layout)
    out = gl.allocate_shared_memory(dw.dtype, [2, 1, BLOCK_M // 2, BLOCK_N], dw.layout)
    # The second half: of last steps, which are there once they are cleared.
    loaded = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(loaded.index(stage), count=1)
        mbarrier.init(loaded.index(STAGES + stage), count=1)
        mbarrier.init(freed.index(stage), count=2)
    ring = a_ring, b_ring
    gl.warp_specialize(
        [
            (_multiply, (dw, walk, tiles, ring, out, loaded, freed, GROUP, BLOCK_M, BLOCK_N, 0)),
            (_multiply, (dw, walk, tiles, ring, out, loaded, freed, GROUP, BLOCK_M, BLOCK_N, 1)),
            (_load, (a, b, walk, tiles, ring, loaded, freed, GROUP, BLOCK_M, BLOCK_N)),
            (_clear, (walk, tiles, ring, loaded, BLOCK_M, BLOCK_N)),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )


def _swizzled(descriptor: Any) -> TensorDescriptor:
    """Return a descriptor of Triton's as Gluon's, of rows of 128 bytes as ``wgmma`` reads them."""
    layout = gl.NVMMASharedLayout(128, 16, len(descriptor.block_shape))
    return TensorDescriptor(
        descriptor.base, descriptor.shape, descriptor.strides, descriptor.block_shape, layout
    )


def launch_specialized_weight_gradient(
    a: Tensor, b: Tensor, offsets: Tensor, order: Tensor, dw: Tensor, tile: Specialized
) -> bool:
    """Write ``Σ_r a[r, :] ⊗ b[r, :]`` of each expert's rows to ``dw``, where descriptors allow it.

    Args:
        a: ``(R, M)`` bf16 or fp16, last dimension contiguous.
        b: ``(R, N)``, of the dtype of ``a``, last dimension contiguous.
        offsets: ``(E + 1,)`` int32.
        order: Experts in the order in which programs take them.
        dw: ``(E, M, N)``.
        tile: Tile.

    Returns:
        False where nothing was launched: other dtypes, or strides and addresses that descriptors
        cannot express.

    Determinism: one accumulator per element, rows ascending: the bits of
        ``kernel.launch_weight_gradient``.
    """
    if dw.element_size() != 2 or a.dtype != dw.dtype or dw.stride(2) != 1:
        return False
    experts, m, n = dw.shape
    half = tile.block_m // 2
    left, left_described = row_operand(a, (tile.block_k, half))
    right, right_described = row_operand(b, (tile.block_k, tile.block_n))
    target, _, stored = weight_operand(dw, (half, tile.block_n))
    if not (left_described and right_described and stored):
        return False
    work = experts * triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n)
    _specialized_weight_gradient_kernel[(min(work, tile.programs),)](
        _swizzled(left), _swizzled(right), _swizzled(target), order, offsets, experts, m, n,
        GROUP=tile.group, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        STAGES=tile.num_stages, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return True
