"""The tile of the scaled product: one for each architecture, for every size."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Tile of one program. Blocks of the contraction are those of the scales."""

    # Rows of a tile, the second operand.
    block_r: int
    # Rows of the weight matrix, the first operand: see ``_SM_90``.
    block_n: int
    num_warps: int
    num_stages: int
    # Row tiles that share a weight tile in turn.
    group: int = 8
    # Read weights through a tensor descriptor where alignment allows.
    tma: bool = True
    # Programs of a persistent grid, at most.
    programs: int = 1 << 20


# Tiles of an instruction with fewer than 64 rows had other bits on an H200, where products of 8-bit
# numbers are then ``mma.sync``; nothing has shown yet that larger ones share theirs. So each
# architecture has one, whatever the size.
_SM_90 = Config(block_r=64, block_n=128, num_warps=8, num_stages=3)
# Fits the registers and the 99 KB of shared memory of sm_89 and sm_120.
_OTHER = Config(block_r=32, block_n=64, num_warps=4, num_stages=3, tma=False)


def heuristic(device: str) -> Config:
    """Return the tile of an architecture, spelled as in ``Problem``.

    Determinism: pure function of its arguments; there is no choice.
    """
    return _SM_90 if device == "sm_90" else _OTHER


# For sm_90: to be compared in bits and in time before one of them may enter a table.
CANDIDATES = (
    Config(block_r=16, block_n=128, num_warps=4, num_stages=4),
    Config(block_r=32, block_n=128, num_warps=4, num_stages=4),
    Config(block_r=16, block_n=64, num_warps=4, num_stages=5),
    Config(block_r=128, block_n=64, num_warps=4, num_stages=4),
    Config(block_r=64, block_n=256, num_warps=8, num_stages=4),
)
