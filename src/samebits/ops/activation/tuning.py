"""Tile sizes of the activation kernels; every tile computes the same bits.

The kernels are elementwise, so a configuration changes speed only. ``dp`` and the bias gradients
keep their order of addition for every tile (``kernel.py``).
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Tile of one program."""

    # Rows per tile; a power of two.
    block_r: int
    # Columns of h per tile; a power of two, at least 64.
    block_f: int
    # Warps per program.
    num_warps: int
    # Tiles in flight per program, where it walks over several; 1 leaves it to the other programs.
    num_stages: int = 1
    # With dp: a program walks over all columns of its rows; else a second launch adds their sums.
    walk: bool = False


# Elements of h per tile, from benchmarks/tune_copies.py on an H200: wide rows want large tiles.
FORWARD_ELEMENTS = 2048
NARROW_FORWARD_ELEMENTS = 1024
BACKWARD_ELEMENTS = 2048
# A program that walks over tiles and keeps sums: smaller ones leave room.
WALKING_ELEMENTS = 1024
BIAS_ELEMENTS = 1024
# Below this many elements of h a device is not full: smaller tiles spread them over more programs.
FEW_ELEMENTS = 1 << 19
# Loads of a backward tile go through shared memory ahead of use, also where there is one tile.
BACKWARD_STAGES = 3


def block_columns(columns: int, most: int) -> int:
    """Return the power of two up to ``most`` that covers ``columns`` with least waste.

    Blocks below 256 columns (512 bytes) are for narrow rows only: wider ones keep a row's lines
    together. Among equals the widest wins.
    """
    least = min(256, most, max(64, 1 << (columns - 1).bit_length()))
    sizes = [least << i for i in range((most // least).bit_length())]
    return min(sizes, key=lambda size: (-(-columns // size) * size, -size))


def _elements(rows: int, columns: int, itemsize: int, most: int) -> int:
    # 16-byte vectors hold fewer wide elements.
    elements = most * 2 // max(itemsize, 2)
    return elements // 2 if rows * columns <= FEW_ELEMENTS else elements


def _config(columns: int, elements: int, itemsize: int) -> Config:
    block_f = block_columns(columns, elements)
    warps = 4 if elements * itemsize >= 2048 else 2
    return Config(block_r=elements // block_f, block_f=block_f, num_warps=warps)


def forward_heuristic(rows: int, columns: int, itemsize: int) -> Config:
    """Return the forward tile for ``rows`` × ``columns`` elements of h of ``itemsize`` bytes.

    Determinism: pure function of its arguments; no choice changes bits.
    """
    narrow = block_columns(columns, FORWARD_ELEMENTS) <= 256
    most = NARROW_FORWARD_ELEMENTS if narrow else FORWARD_ELEMENTS
    return _config(columns, _elements(rows, columns, itemsize, most), itemsize)


def backward_heuristic(
    rows: int, columns: int, itemsize: int, *, dbias: bool, dp: bool = False
) -> Config:
    """Return the backward tile; with bias gradients one row of a chunk at a time.

    With dp, programs walk where rows are narrow, or so few that a second launch would cost more.

    Determinism: pure function of its arguments; no choice changes bits.
    """
    narrow = block_columns(columns, BACKWARD_ELEMENTS) <= 256
    walk = dp and not dbias and (narrow or rows * columns <= FEW_ELEMENTS)
    most = BIAS_ELEMENTS if dbias else WALKING_ELEMENTS if walk else BACKWARD_ELEMENTS
    config = _config(columns, _elements(rows, columns, itemsize, most), itemsize)
    config = replace(config, num_stages=BACKWARD_STAGES, walk=walk)
    return replace(config, block_r=1) if dbias else config


def candidates(columns: int, itemsize: int, *, backward: bool, dp: bool = False) -> list[Config]:
    """Return the configurations worth timing."""
    most = BACKWARD_ELEMENTS if backward else FORWARD_ELEMENTS
    found = []
    for elements in ((most // 8,) if dp else ()) + (most // 4, most // 2, most, 2 * most):
        config = _config(columns, elements * 2 // itemsize, itemsize)
        found += [
            replace(config, num_warps=warps, num_stages=stages)
            for warps in (config.num_warps, 2 * config.num_warps)
            for stages in ((1, BACKWARD_STAGES) if backward else (1,))
        ]
    return found + [replace(config, walk=True) for config in found] if dp else found
