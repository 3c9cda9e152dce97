"""Sums over the rows of each expert: 64 rows at a time, then the chunks in ascending order."""

import triton
import triton.language as tl

# Rows per chunk, counted from the expert's first row: part of the bits, not a tuning choice.
CHUNK = 64


@triton.jit
def _spans(offsets_ptr, experts, known, live, CHUNK: tl.constexpr):
    """Return first row, end row and number of chunks of each expert; 0 chunks where not known."""
    starts = tl.load(offsets_ptr + experts, mask=known, other=0).to(tl.int64)
    ends = tl.load(offsets_ptr + experts + 1, mask=known, other=0).to(tl.int64)
    if live is not None:
        starts = tl.minimum(starts, live)
        ends = tl.minimum(ends, live)
    return starts, ends, (ends - starts + CHUNK - 1) // CHUNK


@triton.jit
def chunk_of_program(
    offsets_ptr, chunk, live, EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, CHUNK: tl.constexpr
):
    """Return ``(expert, first row, end row)`` of a chunk; an empty range past the last chunk.

    ``live`` bounds the rows; None leaves that to the offsets.
    """
    experts = tl.arange(0, EXPERTS_POW2)
    known = experts < EXPERTS
    starts, ends, chunks = _spans(offsets_ptr, experts, known, live, CHUNK)
    last = tl.cumsum(chunks, 0)
    mine = known & (last > chunk) & (last - chunks <= chunk)
    expert = tl.sum(tl.where(mine, experts, 0), 0)
    first = tl.sum(tl.where(mine, starts + (chunk - (last - chunks)) * CHUNK, 0), 0)
    end = tl.sum(tl.where(mine, ends, 0), 0)
    return expert, first, tl.minimum(first + CHUNK, end)


@triton.jit
def chunks_of_expert(offsets_ptr, expert, live, EXPERTS_POW2: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first chunk of ``expert`` and the first that is not its own; ``live`` as above."""
    experts = tl.arange(0, EXPERTS_POW2)
    _, _, chunks = _spans(offsets_ptr, experts, experts <= expert, live, CHUNK)
    end = tl.sum(chunks, 0)
    return end - tl.sum(tl.where(experts == expert, chunks, 0), 0), end
