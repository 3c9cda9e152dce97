"""E8M0 scales in the order in which Blackwell's matrix unit reads them.

The scales ``(R, C)`` of R rows are cut into tiles of 128 rows by 4 columns, tile after tile along a
row of tiles. In a tile, byte ``(r % 32) * 16 + (r // 32) * 4 + c`` is row r, column c (32 × 4 × 4).
Rows and columns that a tile has too many are padding: 0, and never read back.
"""

import torch
from torch import Tensor

from samebits.arguments import require_type
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
        TypeError: ``scales`` are not one byte each, or ``offsets`` no integers.
        ValueError: ``scales`` have not two dimensions, or ``offsets`` do not ascend from 0 to at
            most R.

    Determinism: exact.
    """
    require_type("scales", scales, Tensor)
    if scales.element_size() != 1:
        raise TypeError(must("scales", "be uint8 or float8_e8m0fnu", scales.dtype))
    if scales.dim() != 2:
        raise ValueError(must("scales", "have shape (R, C)", tuple(scales.shape)))
    place = _places(scales.shape[0], offsets, scales.device)
    shape = padded_shape(scales.shape[0], scales.shape[1], offsets)
    padded = torch.zeros(shape, dtype=torch.uint8, device=scales.device)
    live = slice(None) if offsets is None else slice(0, len(place))
    padded[place, : scales.shape[1]] = scales[live].view(torch.uint8)
    tiles = padded.view(-1, 4, 32, shape[1] // COLUMNS, COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(shape).view(scales.dtype)


def unswizzle_scales(
    swizzled: Tensor, rows: int, columns: int, offsets: Tensor | None = None
) -> Tensor:
    """Return the ``(rows, columns)`` scales that ``swizzle_scales`` put in order.

    Args:
        swizzled: What it returned; padding may hold anything.
        rows: R. Rows of no expert come back as 0.
        columns: C.
        offsets: Those that it was given.

    Raises:
        TypeError: ``swizzled`` is not one byte each, or ``offsets`` are no integers.
        ValueError: ``swizzled`` has another shape than these scales have in tiles, or ``offsets``
            do not ascend from 0 to at most R.

    Determinism: exact.
    """
    require_type("swizzled", swizzled, Tensor)
    place = _places(rows, offsets, swizzled.device)
    shape = padded_shape(rows, columns, offsets)
    if tuple(swizzled.shape) != shape:
        rule = f"have shape {shape} for ({rows}, {columns}) scales"
        raise ValueError(must("swizzled", rule, tuple(swizzled.shape)))
    tiles = swizzled.view(torch.uint8).reshape(
        swizzled.shape[0] // ROWS, swizzled.shape[1] // COLUMNS, 32, 4, COLUMNS
    )
    padded = tiles.permute(0, 3, 2, 1, 4).reshape(swizzled.shape)
    scales = torch.zeros(rows, columns, dtype=torch.uint8, device=swizzled.device)
    scales[: len(place)] = padded[place, :columns]
    return scales.view(swizzled.dtype)


def padded_shape(rows: int, columns: int, offsets: Tensor | None) -> tuple[int, int]:
    """Return the shape of ``(rows, columns)`` scales in tiles.

    Determinism: pure function of shapes.
    """
    room = rows if offsets is None else rows + (ROWS - 1) * (offsets.shape[0] - 1)
    return -(-room // ROWS) * ROWS, -(-columns // COLUMNS) * COLUMNS


def padded_starts(offsets: Tensor) -> Tensor:
    """Return the first row of each expert among rows in whole tiles, ``(E,)``, without a sync.

    Determinism: exact integers.
    """
    tiles = (offsets.diff().long() + ROWS - 1) // ROWS * ROWS
    return tiles.cumsum(0) - tiles


def held_offsets(offsets: Tensor, rows: int) -> Tensor:
    """Return offsets made to ascend from 0 to at most ``rows``; right ones stay as they are.

    Nothing can look at those of a device before a kernel does: wrong ones cost wrong results, and
    no memory of others.

    Determinism: exact integers.
    """
    return (offsets.clamp(0, rows) - offsets[:1].clamp(0, rows)).cummax(0).values


def _places(rows: int, offsets: Tensor | None, device: torch.device) -> Tensor:
    """Return the row of the padded scales for each row that belongs to an expert."""
    if offsets is None:
        return torch.arange(rows, device=device)
    require_type("offsets", offsets, Tensor)
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(must("offsets", "be int32 or int64", offsets.dtype))
    bounds = offsets.tolist()
    if offsets.dim() != 1 or not bounds or bounds[0] != 0 or bounds != sorted(bounds):
        raise ValueError(must("offsets", "ascend from 0 on", bounds))
    if bounds[-1] > rows:
        raise ValueError(must("offsets", f"end at R = {rows} or before", bounds[-1]))
    starts = padded_starts(offsets)
    index = torch.arange(bounds[-1], device=device)
    expert = torch.searchsorted(offsets[1:].contiguous(), index.to(offsets.dtype), right=True)
    return starts[expert] + index - offsets[expert]
