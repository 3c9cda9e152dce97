"""The tiles of the scaled product; all that an architecture uses compute the same bits."""

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Tile of one program. Blocks of the contraction are those of the scales."""

    # Rows of a tile.
    block_r: int
    # Rows of the weight matrix; as first operand 64 at least, see ``TABLE``.
    block_n: int
    num_warps: int
    num_stages: int
    # Weights as the first operand: for tiles of few rows.
    swap: bool = True
    # Row tiles that share a weight tile in turn.
    group: int = 8
    # Read rows and weights through tensor descriptors where alignment allows.
    tma: bool = True
    # Programs of a persistent grid, at most.
    programs: int = 1 << 20
    # By the kernel of ``samebits.ops.scaled_gemm.specialized``, which has one size of tile.
    specialized: bool = False

    def of_plain_rows(self) -> Self:
        """Return the tile for operands that the specialized kernel does not take."""
        return replace(
            self,
            block_n=128,
            num_warps=8,
            num_stages=4,
            programs=1 << 20,
            specialized=False,
        )

    def for_pointers(self) -> Self:
        """Return the tile for operands that no descriptor reads: single bytes take registers."""
        warps = 8 if self.block_r > 32 else 4
        return replace(self, block_n=64, num_warps=warps, num_stages=3, swap=True, tma=False)


def _few(block_r: int, block_n: int, num_warps: int, num_stages: int) -> Config:
    return Config(block_r=block_r, block_n=block_n, num_warps=num_warps, num_stages=num_stages)


def _rows(block_r: int, block_n: int, num_warps: int, num_stages: int) -> Config:
    return replace(_few(block_r, block_n, num_warps, num_stages), swap=False)


def _specialized(num_stages: int, group: int) -> Config:
    return Config(
        block_r=128,
        block_n=256,
        num_warps=4,
        num_stages=num_stages,
        swap=False,
        group=group,
        programs=132,
        specialized=True,
    )


# On an H200, Triton 3.6.0, from benchmarks/tune_scaled_gemm.py, by the most slots an expert, on
# average; a tile table serves both projections. Every entry has the bits of the others
# (tests/ops/test_eight_bits_gpu.py). Instructions of fewer than 64 rows had other bits: products of
# 8-bit numbers are ``mma.sync`` then.
TABLE: tuple[tuple[float, Config], ...] = (
    (10.0, _few(16, 128, 4, 4)),
    (20.0, _few(32, 128, 4, 4)),
    (48.0, _rows(64, 128, 4, 4)),
    (float("inf"), _rows(64, 128, 4, 3)),
)
# Elsewhere nothing has shown that two tiles share their bits, so that there is one; it fits the
# registers and the 99 KB of shared memory of sm_89 and sm_120.
UNMEASURED = Config(block_r=32, block_n=64, num_warps=4, num_stages=3, tma=False)


def heuristic(rows: int, experts: int, device: str) -> Config:
    """Return the tile for ``rows`` slots over ``experts`` experts.

    Args:
        rows: T * K.
        experts: E.
        device: As in ``Problem``. The table is evidence for sm_90 only; others get ``UNMEASURED``.

    Determinism: pure function of its arguments; no choice changes bits.
    """
    if device != "sm_90":
        return UNMEASURED
    return next(config for most, config in TABLE if rows <= most * experts)


# For sm_90: what benchmarks/tune_scaled_gemm.py times beside the table.
CANDIDATES = (
    _few(16, 64, 4, 4),
    _few(16, 128, 4, 6),
    _few(32, 64, 4, 5),
    _few(64, 128, 4, 4),
    _rows(128, 128, 8, 4),
    # Faster for many rows, with the same bits, but not in use: a run in which it took part stopped,
    # and nothing has shown yet that another kernel was the cause (docs/quantized.md).
    _specialized(4, 4),
)
