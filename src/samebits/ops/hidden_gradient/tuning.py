"""Tile shapes of the hidden gradient; all that an architecture uses compute the same bits."""

from samebits.ops.indirect_gemm.tuning import UNMEASURED, Config


def heuristic(rows: int, experts: int, device: str) -> Config:
    """Return the tile for ``rows`` slots over ``experts`` experts.

    Determinism: pure function of its arguments; no choice changes bits.
    """
    if device != "sm_90":
        return UNMEASURED
    return Config(block_r=64, block_n=128, block_k=64, num_warps=4, num_stages=3, programs=264)
