"""Load and store gate and up columns of rows, whatever the layout, with wide accesses.

The layout is resolved here, by addresses: halves and wide blocks of columns are two accesses,
blocks of 1, 2 or 4 columns are one contiguous access that is split or joined in registers.
"""

import triton
import triton.language as tl


@triton.jit
def _split_blocks(pairs, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, SIZE: tl.constexpr):
    """Split ``[BLOCK_R, 2 * BLOCK_F]`` into its even and odd blocks of ``SIZE`` columns."""
    blocks = tl.reshape(pairs, [BLOCK_R, BLOCK_F // SIZE, 2, SIZE])
    first, second = tl.split(tl.permute(blocks, (0, 1, 3, 2)))
    first = tl.reshape(first, [BLOCK_R, BLOCK_F])
    return first, tl.reshape(second, [BLOCK_R, BLOCK_F])


@triton.jit
def load_gate_up(
    row_ptrs, column, mask, F,
    GATED: tl.constexpr, INTERLEAVE: tl.constexpr, UP_FIRST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Load gate and up, fp32, of ``BLOCK_F`` columns from ``column`` on; 0 where masked.

    ``row_ptrs`` and ``mask`` are ``[BLOCK_R, 1]``; ``INTERLEAVE`` is 0 for halves. Blocks of 1, 2
    or 4 columns are loaded in one piece and split in registers.
    """
    columns = column + tl.arange(0, BLOCK_F)[None, :]
    if not GATED:
        gate = tl.load(row_ptrs + columns, mask=mask & (columns < F), other=0.0).to(tl.float32)
        return gate, gate
    if INTERLEAVE == 1 or INTERLEAVE == 2 or INTERLEAVE == 4:
        wide = 2 * column + tl.arange(0, 2 * BLOCK_F)[None, :]
        pairs = tl.load(row_ptrs + wide, mask=mask & (wide < 2 * F), other=0.0)
        first, second = _split_blocks(pairs, BLOCK_R, BLOCK_F, INTERLEAVE)
    else:
        inside = mask & (columns < F)
        distance = INTERLEAVE if INTERLEAVE else F
        places = columns + (columns // INTERLEAVE) * INTERLEAVE if INTERLEAVE else columns
        first = tl.load(row_ptrs + places, mask=inside, other=0.0)
        second = tl.load(row_ptrs + distance + places, mask=inside, other=0.0)
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    if UP_FIRST:
        return second, first
    return first, second


@triton.jit
def store_gate_up(
    row_ptrs, gate, up, column, mask, F,
    GATED: tl.constexpr, INTERLEAVE: tl.constexpr, UP_FIRST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Store gate and up columns; the inverse of ``load_gate_up``."""
    columns = column + tl.arange(0, BLOCK_F)[None, :]
    if not GATED:
        tl.store(row_ptrs + columns, gate, mask=mask & (columns < F))
    elif INTERLEAVE == 1 or INTERLEAVE == 2 or INTERLEAVE == 4:
        first, second = (up, gate) if UP_FIRST else (gate, up)
        blocks = tl.join(first, second)
        blocks = tl.reshape(blocks, [BLOCK_R, BLOCK_F // INTERLEAVE, INTERLEAVE, 2])
        pairs = tl.reshape(tl.permute(blocks, (0, 1, 3, 2)), [BLOCK_R, 2 * BLOCK_F])
        wide = 2 * column + tl.arange(0, 2 * BLOCK_F)[None, :]
        tl.store(row_ptrs + wide, pairs, mask=mask & (wide < 2 * F))
    else:
        inside = mask & (columns < F)
        first, second = (up, gate) if UP_FIRST else (gate, up)
        distance = INTERLEAVE if INTERLEAVE else F
        places = columns + (columns // INTERLEAVE) * INTERLEAVE if INTERLEAVE else columns
        tl.store(row_ptrs + places, first, mask=inside)
        tl.store(row_ptrs + distance + places, second, mask=inside)
