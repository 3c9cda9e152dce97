"""Tile shapes of the hidden gradient; all that an architecture uses compute the same bits."""

from samebits.ops.indirect_gemm.tuning import Config

# Narrower than that of a product alone: the derivative needs registers.
UNMEASURED = Config(block_r=64, block_n=64, block_k=64, num_warps=4, num_stages=3, tma=False)

# bf16 on an H200, Triton 3.6.0, from benchmarks/tune_backward.py. Up to a number of slots per
# expert, on average.
TABLE: tuple[tuple[float, Config], ...] = (
    (
        24.0,
        Config(
            block_r=32, block_n=128, block_k=64, num_warps=4, num_stages=4, group=1,
            programs=1 << 20,
        ),
    ),
    (
        48.0,
        Config(
            block_r=64, block_n=128, block_k=64, num_warps=4, num_stages=3, group=1,
            programs=1 << 20,
        ),
    ),
    (
        200.0,
        Config(block_r=64, block_n=256, block_k=64, num_warps=4, num_stages=2, programs=264),
    ),
    (float("inf"), Config(block_r=128, block_n=256, block_k=64, num_warps=8, num_stages=3)),
)  # fmt: skip


def heuristic(rows: int, experts: int, device: str) -> Config:
    """Return the tile for ``rows`` slots over ``experts`` experts.

    Determinism: pure function of its arguments; no choice changes bits.
    """
    if device != "sm_90":
        return UNMEASURED
    return next(config for most, config in TABLE if rows / experts <= most)
