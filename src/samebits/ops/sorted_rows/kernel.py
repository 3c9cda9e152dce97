"""One launch for ``samebits.ops.sorted_rows``: no order is looked for, offsets say all of it.

A program writes the tiles of one expert and a block of rows. Offsets come from a caller and nothing
can look at them before the launch: they are held within the rows and made to ascend, so that wrong
ones cost wrong results and no memory of others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from samebits.ops._triton.launch import recordable
from samebits.ops.permute import tuning
from samebits.ops.permute.kernel import _bins, _write_tiles
from samebits.ops.permute.tuning import Metadata

# Rows of one program.
_BLOCK = 1024


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _bounds(offsets_ptr, index, R, E):
    """Return offsets held to ascend within ``[0, R]``; the first is 0, those past E repeat it."""
    given = tl.load(offsets_ptr + index, mask=(index > 0) & (index <= E), other=0)
    held = tl.minimum(tl.maximum(given, 0), R).to(tl.int32)
    return tl.associative_scan(held, 0, _larger)


@recordable
@triton.jit(do_not_specialize=["R", "E"])
def _sorted_rows_kernel(
    given_ptr,
    slots_ptr, offsets_ptr, inverse_ptr, tile_expert_ptr, tile_row_ptr, tile_end_ptr, tiles_ptr,
    R, E,
    BINS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    experts = tl.arange(0, BINS)
    starts = _bounds(given_ptr, experts, R, E)
    ends = _bounds(given_ptr, experts + 1, R, E)
    kept = tl.max(starts, 0)

    first_row = tl.sum(tl.where(experts == program, starts, 0), 0)
    if program <= E:
        tl.store(offsets_ptr + program, first_row)
    if program < E:
        counts = tl.where(experts < E, ends - starts, 0)
        count = tl.sum(tl.where(experts == program, counts, 0), 0)
        _write_tiles(
            counts, experts, program, first_row, count,
            tile_expert_ptr, tile_row_ptr, tile_end_ptr, tiles_ptr, BLOCK_R,
        )  # fmt: skip
    row = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.where(row < kept, row, R).to(tl.int32)
    tl.store(slots_ptr + row, place, mask=row < R)
    tl.store(inverse_ptr + row, place, mask=row < R)


def launch_sorted_rows(offsets: Tensor, total: int, block_r: int) -> Metadata:
    """Return the metadata of ``total`` rows, with the tiles for one BLOCK_R.

    Args:
        offsets: ``(E + 1,)`` int32 or int64, from 0, ascending, at most ``total``.
        total: R.
        block_r: Rows of a tile.

    Determinism: exact integers.
    """
    num_local = offsets.shape[0] - 1
    size = tuning.buffer_size(total, num_local, block_r)
    buffer = torch.empty(size, dtype=torch.int32, device=offsets.device)
    metadata = tuning.unpack(buffer, total, num_local, block_r)
    if total == 0:
        buffer.zero_()
        return metadata
    _sorted_rows_kernel[(max(num_local + 1, triton.cdiv(total, _BLOCK)),)](
        offsets.contiguous(), *metadata[:3], *metadata.tiles, total, num_local,
        BINS=_bins(num_local), BLOCK=_BLOCK, BLOCK_R=block_r,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return metadata
