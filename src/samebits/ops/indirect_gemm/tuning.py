"""Tile shapes of the projections; every one of them computes the same bits."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Tiles(NamedTuple):
    """Device-side work list: rows cut into tiles of at most BLOCK_R that stay within an expert."""

    # Expert of each tile, int32, (capacity,).
    expert: Tensor
    # First row, int32.
    row: Tensor
    # First row that is not the expert's, int32.
    end: Tensor
    # Tiles in use, int32, (1,).
    count: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Tile of one program and how it is fed."""

    # Rows per tile.
    block_r: int
    # Rows of the weight matrix per tile; gated first projections split them into gate and up.
    block_n: int
    # Contraction per step.
    block_k: int
    num_warps: int
    num_stages: int
    # Weights as the first operand: for tiles of few rows.
    swap: bool = False
    # Row tiles that share a weight tile in turn.
    group: int = 8
    # Read weights through a tensor descriptor where alignment allows.
    tma: bool = True
    # Programs of a persistent grid, at most.
    programs: int = 132
