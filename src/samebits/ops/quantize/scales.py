"""E8M0 scales in the order in which Blackwell's matrix unit reads them.

The scales ``(R, C)`` of R rows are cut into tiles of 128 rows by 4 columns, tile after tile along a
row of tiles. In a tile, byte ``(r % 32) * 16 + (r // 32) * 4 + c`` is row r, column c (32 × 4 × 4).
Rows and columns that a tile has too many are padding: 0, and never read back.
"""

import torch
from torch import Tensor

from samebits.errors import must

ROWS, COLUMNS = 128, 4


def swizzle_scales(scales: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Return scales in 32 × 4 × 4 tiles.

    Args:
        scales: ``(R, C)``, one byte each.
        offsets: ``(E + 1,)`` first row of each expert. Then the tiles of an expert start with its
            first row, as grouped products want it, and there is room for ``R + 127 E`` rows, in
            whole tiles, so that the size depends on R and E alone. None: all rows are one's.

    Returns:
        ``(tiles of rows * 128, tiles of columns * 4)``, contiguous, same dtype.

    Raises:
        TypeError: ``scales`` are not one byte each.
        ValueError: ``scales`` have not two dimensions.

    Determinism: exact.
    """
    if scales.element_size() != 1:
        raise TypeError(must("scales", "be uint8 or float8_e8m0fnu", scales.dtype))
    if scales.dim() != 2:
        raise ValueError(must("scales", "have shape (R, C)", tuple(scales.shape)))
    place = _places(scales.shape[0], offsets, scales.device)
    experts = 1 if offsets is None else offsets.shape[0] - 1
    room = scales.shape[0] + (ROWS - 1) * experts
    rows = -(-room // ROWS) if offsets is not None else -(-scales.shape[0] // ROWS)
    columns = -(-scales.shape[1] // COLUMNS)
    padded = torch.zeros(rows * ROWS, columns * COLUMNS, dtype=torch.uint8, device=scales.device)
    live = slice(None) if offsets is None else slice(0, len(place))
    padded[place, : scales.shape[1]] = scales[live].view(torch.uint8)
    tiles = padded.view(rows, 4, 32, columns, COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(padded.shape).view(scales.dtype)


def unswizzle_scales(
    swizzled: Tensor, rows: int, columns: int, offsets: Tensor | None = None
) -> Tensor:
    """Return the ``(rows, columns)`` scales that ``swizzle_scales`` put in order.

    Args:
        swizzled: What it returned; padding may hold anything.
        rows: R. Rows of no expert come back as 0.
        columns: C.
        offsets: Those that it was given.

    Determinism: exact.
    """
    tiles = swizzled.view(torch.uint8).reshape(
        swizzled.shape[0] // ROWS, swizzled.shape[1] // COLUMNS, 32, 4, COLUMNS
    )
    padded = tiles.permute(0, 3, 2, 1, 4).reshape(swizzled.shape)
    place = _places(rows, offsets, swizzled.device)
    scales = torch.zeros(rows, columns, dtype=torch.uint8, device=swizzled.device)
    scales[: len(place)] = padded[place, :columns]
    return scales.view(swizzled.dtype)


def _places(rows: int, offsets: Tensor | None, device: torch.device) -> Tensor:
    """Return the row of the padded scales for each row that belongs to an expert."""
    if offsets is None:
        return torch.arange(rows, device=device)
    counts = offsets.diff().long()
    tiles = (counts + ROWS - 1) // ROWS * ROWS
    starts = tiles.cumsum(0) - tiles
    index = torch.arange(int(offsets[-1]), device=device)
    expert = torch.searchsorted(offsets[1:].contiguous(), index.to(offsets.dtype), right=True)
    return starts[expert] + index - offsets[expert]
