"""The tile of one program of ``samebits.ops.dequantize``; no choice changes bits."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Tile of one program."""

    # Rows of a matrix.
    block_n: int = 16
    # Columns, even.
    block_k: int = 512
    num_warps: int = 4


def heuristic(columns: int) -> Config:
    """Return the tile for matrices of ``columns`` columns.

    Determinism: pure function of its arguments; no choice changes bits.
    """
    return Config() if columns > 256 else Config(block_n=32, block_k=256)
