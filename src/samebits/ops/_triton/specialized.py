"""Products of rows with one expert's matrix for sm_90, by warps of two kinds (Gluon).

A *producer* fills a ring of steps of the contraction in shared memory, up to the ring's length
ahead, into the next tile too. Two *consumers*, warpgroups that own 64 of a tile's 128 rows each,
multiply: while one stores its rows the other computes. One whose rows all lie past the expert's end
lets the tile pass. Rows past the end are computed beside others (no row of a product reads another)
and not stored. Bits are those of ``samebits.ops._triton.product``: steps of 16 ascending, one fp32
accumulator. The interpreter knows no Gluon: tests compile these kernels, and run them on a GPU.

A ring is ``(full, empty, rows, matrices)``: barriers of the steps that are there and of those that
both consumers are through with, and the two operands by step.
"""

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

from samebits.ops._triton.product import tile_of_position

# Rows of a consumer, and the same in Gluon.
CONSUMER_ROWS = 64
ROWS = gl.constexpr(CONSUMER_ROWS)
# Triton 3.7 gave it another name.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


def swizzled(descriptor):
    """Return a descriptor of ``triton.tools`` as Gluon's, in the layout that ``wgmma`` reads."""
    base, box = descriptor.base, descriptor.block_shape
    size = base.element_size()
    layout = gl.NVMMASharedLayout(min(128, box[-1] * size), 8 * size, len(box))
    return TensorDescriptor(base, descriptor.shape, descriptor.strides, box, layout)


@gluon.jit
def make_ready(full, empty, ARRIVALS: gl.constexpr, STAGES: gl.constexpr):
    """Initialise the barriers of a ring; ``ARRIVALS`` make a step full, two consumers empty."""
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    barrier()


@gluon.jit
def next_step(stage, phase, STAGES: gl.constexpr):
    """Return the next place in the ring, and the parity of its barrier."""
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def tile_at(
    position, tiles, column_blocks, expert_ptr, row_ptr, end_ptr, GROUP: gl.constexpr
):  # fmt: skip
    """Return (expert, first row, end, column block) of a position; of no use past the last."""
    tile, block = tile_of_position(position, tiles, column_blocks, GROUP)
    there = position < tiles * column_blocks
    expert = gl.load(expert_ptr + tile, mask=there, other=0)
    first = gl.load(row_ptr + tile, mask=there, other=0)
    return expert, first, gl.load(end_ptr + tile, mask=there, other=0), block


@gluon.jit
def contract(
    ring, stage, phase, K,
    HALF: gl.constexpr, TRANSPOSED: gl.constexpr,
    STAGES: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Return the sums of a consumer's rows, ``[64, BLOCK_N]`` fp32, and the place in the ring."""
    full, empty, rows, matrices = ring
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros((ROWS, BLOCK_N), gl.float32, LAYOUT)
    before = stage
    for k in range(0, K, BLOCK_K):
        mbarrier.wait(full.index(stage), phase)
        left = rows.index(stage).slice(HALF * ROWS, ROWS, dim=0)
        if TRANSPOSED:
            right = matrices.index(stage).reshape((BLOCK_K, BLOCK_N))
        else:
            right = matrices.index(stage).reshape((BLOCK_N, BLOCK_K)).permute((1, 0))
        acc = warpgroup_mma(left, right, acc, is_async=True)
        # The product before this one is done: its place is free.
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
        before = stage
        stage, phase = next_step(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(before), count=1)
    return acc, stage, phase


@gluon.jit
def let_pass(
    ring, stage, phase, K, STAGES: gl.constexpr, BLOCK_K: gl.constexpr
):  # fmt: skip
    """Leave a tile to the other consumer; return the place in the ring."""
    full, empty, _, _ = ring
    for _ in range(0, K, BLOCK_K):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = next_step(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def leave(value, buffer, out, out_ptr, first, end, column, N, COLUMNS: gl.constexpr):
    """Store ``[64, COLUMNS]`` to ``out``, (R, N) contiguous, from row ``first`` on.

    Whole blocks leave through the descriptor, and nothing waits for them but the next one; the
    last rows of an expert through pointers, for no box ends with them.
    """
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    tma.store_wait(0)
    barrier()
    buffer.store(value)
    if first + ROWS <= end:
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [first, column], buffer)
    else:
        barrier()
        rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
        columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, WIDE))
        places = gl.expand_dims(rows.to(gl.int64) * N, 1) + gl.expand_dims(columns, 0)
        inside = gl.expand_dims(rows < end, 1) & gl.expand_dims(columns < N, 0)
        gl.store(out_ptr + places, buffer.load(WIDE), mask=inside)
