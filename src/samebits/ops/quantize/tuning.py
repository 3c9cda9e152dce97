"""The tiles of the kernels that quantise rows; no choice changes bits."""

from dataclasses import dataclass

from samebits.ops.activation.tuning import block_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Tile of one program."""

    # Rows of z; a program of the permutation takes one token.
    block_r: int
    # Columns, a power of two and a multiple of a block's.
    block_c: int
    num_warps: int


# Elements of a tile: 16 bytes of bf16 for each thread of four warps.
_ELEMENTS = 1024
# Columns of the widest block that is quantised.
_WIDEST = 128


def _columns(columns: int) -> int:
    return max(block_columns(columns, _ELEMENTS), _WIDEST)


def permute_heuristic(hidden: int) -> Config:
    """Return the tile for tokens of ``hidden`` elements.

    Determinism: pure function of its arguments; no choice changes bits.
    """
    return Config(block_r=1, block_c=_columns(hidden), num_warps=4)


def activation_heuristic(columns: int) -> Config:
    """Return the tile for ``columns`` columns of h.

    Determinism: pure function of its arguments; no choice changes bits.
    """
    block_c = _columns(columns)
    return Config(block_r=_ELEMENTS // block_c, block_c=block_c, num_warps=4)


def candidates(columns: int) -> list[Config]:
    """Return the configurations of both kernels worth timing."""
    return [
        Config(block_r=rows, block_c=block, num_warps=warps)
        for block in (128, 256, 512, 1024, 2048)
        if block < 2 * max(columns, _WIDEST)
        for rows in (1, 2, 4)
        for warps in (1, 2, 4, 8)
        # 4 to 32 elements for each thread.
        if 128 <= rows * block // warps <= 1024
    ]
