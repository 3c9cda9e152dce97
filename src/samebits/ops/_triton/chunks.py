"""Sums over the rows of each expert: 64 rows at a time, then the chunks in ascending order."""

import triton
import triton.language as tl

# Rows per chunk, counted from the expert's first row: part of the bits, not a tuning choice.
CHUNK = 64


@triton.jit
def chunk_of_program(
    offsets_ptr, chunk, EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, CHUNK: tl.constexpr
):
    """Return ``(expert, first row, end row)`` of a chunk; an empty range past the last chunk."""
    experts = tl.arange(0, EXPERTS_POW2)
    known = experts < EXPERTS
    starts = tl.load(offsets_ptr + experts, mask=known, other=0).to(tl.int64)
    ends = tl.load(offsets_ptr + experts + 1, mask=known, other=0).to(tl.int64)
    chunks = (ends - starts + CHUNK - 1) // CHUNK
    last = tl.cumsum(chunks, 0)
    mine = known & (last > chunk) & (last - chunks <= chunk)
    expert = tl.sum(tl.where(mine, experts, 0), 0)
    first = tl.sum(tl.where(mine, starts + (chunk - (last - chunks)) * CHUNK, 0), 0)
    end = tl.sum(tl.where(mine, ends, 0), 0)
    return expert, first, tl.minimum(first + CHUNK, end)


@triton.jit
def chunks_of_expert(offsets_ptr, expert, EXPERTS_POW2: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first chunk of ``expert`` and the first that is not its own."""
    experts = tl.arange(0, EXPERTS_POW2)
    known = experts <= expert
    starts = tl.load(offsets_ptr + experts, mask=known, other=0).to(tl.int64)
    ends = tl.load(offsets_ptr + experts + 1, mask=known, other=0).to(tl.int64)
    chunks = (ends - starts + CHUNK - 1) // CHUNK
    end = tl.sum(chunks, 0)
    return end - tl.sum(tl.where(experts == expert, chunks, 0), 0), end
