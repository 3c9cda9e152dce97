"""See ``samebits.ops.sorted_rows``; torch only, on any device."""

import torch
from torch import Tensor

from samebits.ops.permute.reference import tiles
from samebits.ops.permute.tuning import Metadata


def metadata(offsets: Tensor, total: int, block_r: int) -> Metadata:
    """Return the metadata of ``total`` rows, with the tiles for one BLOCK_R.

    Determinism: exact integers.
    """
    held = offsets.int()
    rows = torch.arange(total, dtype=torch.int32, device=offsets.device)
    rows = rows.masked_fill(rows >= held[-1], total)
    return Metadata(rows, held, rows, tiles(held, total, block_r))
