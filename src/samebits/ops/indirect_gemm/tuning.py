"""Tile shapes of the projections; every one of them computes the same bits."""

from dataclasses import dataclass, replace


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

    def for_fp32(self) -> "Config":
        """Return a tile that fp32 operands fit: IEEE products have no matrix unit."""
        return replace(
            self, block_r=min(self.block_r, 64), block_n=64, block_k=32, num_stages=2, num_warps=4
        )

    def with_rows(self, block_r: int) -> "Config":
        """Return the tile with another number of rows, that of the tile table in use."""
        return replace(self, block_r=block_r)


def _rows(block_r: int, block_n: int, warps: int, stages: int, programs: int) -> Config:
    return Config(
        block_r=block_r,
        block_n=block_n,
        block_k=64,
        num_warps=warps,
        num_stages=stages,
        programs=programs,
    )


def _streamed(block_r: int, block_n: int, block_k: int, warps: int, stages: int, *, swap: bool) -> Config:
    return Config(
        block_r=block_r,
        block_n=block_n,
        block_k=block_k,
        num_warps=warps,
        num_stages=stages,
        swap=swap,
        group=1,
        programs=1 << 20,
    )


# First and second projection; bf16 on an H200, Triton 3.6.0.
TABLE: tuple[tuple[Config, Config], ...] = (
    (
        _streamed(16, 128, 128, 8, 4, swap=True),
        _streamed(16, 64, 128, 4, 5, swap=False),
    ),
    (
        _streamed(64, 128, 128, 8, 4, swap=True),
        _streamed(64, 128, 128, 8, 4, swap=True),
    ),
    (
        _rows(64, 256, 8, 4, 264),
        _rows(64, 128, 4, 4, 264),
    ),
    (
        _rows(128, 256, 8, 3, 132),
        _rows(128, 256, 8, 3, 132),
    ),
)


# Rows per expert up to which each entry is fastest.
_MOST_ROWS = (24, 48, 200, float("inf"))


def heuristic(rows: int, experts: int) -> tuple[Config, Config]:
    """Return the tiles of both projections for ``rows`` slots over ``experts`` experts.

    Determinism: pure function of its arguments; no choice changes bits.
    """
    per_expert = rows / experts
    return next(e for most, e in zip(_MOST_ROWS, TABLE, strict=True) if per_expert <= most)
