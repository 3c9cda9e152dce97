"""Tile sizes of the activation kernels; every tile computes the same bits.

The kernels are elementwise, so a configuration changes speed only. ``dp`` and the bias gradients
keep their order of addition for every tile (``kernel.py``).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Tile of one program."""

    # Rows per tile; a power of two.
    block_r: int
    # Columns of h per tile; a power of two, at least 64.
    block_f: int
    # Warps per program.
    num_warps: int


# Elements of h per tile: a thread moves 16-byte vectors, two of each operand forward, one backward.
FORWARD_ELEMENTS = 2048
BACKWARD_ELEMENTS = 1024
# Below this many elements of h a device is not full: smaller tiles spread them over more programs.
FEW_ELEMENTS = 1 << 19


def block_columns(columns: int, most: int) -> int:
    """Return the power of two up to ``most`` that covers ``columns`` with least waste.

    Blocks below 256 columns (512 bytes) are for narrow rows only: wider ones keep a row's lines
    together. Among equals the widest wins.
    """
    least = min(256, most, max(64, 1 << (columns - 1).bit_length()))
    sizes = [least << i for i in range((most // least).bit_length())]
    return min(sizes, key=lambda size: (-(-columns // size) * size, -size))


def heuristic(rows: int, columns: int, itemsize: int, *, backward: bool) -> Config:
    """Return the configuration for ``rows`` × ``columns`` elements of h.

    Determinism: pure function of its arguments; no choice changes bits.
    """
    elements = BACKWARD_ELEMENTS if backward else FORWARD_ELEMENTS
    # 16-byte vectors hold fewer wide elements.
    elements = elements * 2 // max(itemsize, 2)
    if rows * columns <= FEW_ELEMENTS:
        elements //= 2
    block_f = block_columns(columns, elements)
    warps = 4 if elements * itemsize >= 2048 else 2
    return Config(block_r=elements // block_f, block_f=block_f, num_warps=warps)
