"""Tiles of the projections of single slots, and for how few slots they are used."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Tile of one program and how it is fed."""

    # Rows of the weight matrix per tile; gated first projections split them into gate and up.
    block_n: int
    # Contraction per step.
    block_k: int
    num_warps: int
    num_stages: int
    # Read weights through a tensor descriptor where alignment allows.
    tma: bool = True


class Tiles(NamedTuple):
    """Tiles of both launches."""

    hidden: Config
    output: Config
    # The second launch starts before the first has ended, and waits for it where it must.
    early: bool


# bf16 on an H200, Triton 3.6.0, from benchmarks/tune_slot_gemm.py.
_HIDDEN = Config(block_n=128, block_k=128, num_warps=4, num_stages=4)
# The second launch holds the tiles of all slots of a token; by K, at most.
_OUTPUT = (
    (1, Config(block_n=64, block_k=256, num_warps=4, num_stages=4)),
    (2, Config(block_n=32, block_k=256, num_warps=4, num_stages=4)),
    (4, Config(block_n=32, block_k=128, num_warps=4, num_stages=6)),
    (8, Config(block_n=32, block_k=128, num_warps=4, num_stages=4)),
    (16, Config(block_n=16, block_k=64, num_warps=4, num_stages=5)),
)
# The sorted path reads the weights of an expert once, however many slots share it.
_MOST_SLOTS_PER_EXPERT = 0.125


def heuristic(tokens: int, topk: int, experts: int, device: str, dtype: str) -> Tiles | None:
    """Return the tiles for ``tokens`` tokens of ``topk`` slots; None where slots are to be sorted.

    Args:
        tokens: T.
        topk: K.
        experts: E.
        device: As in ``Problem``. The tiles are evidence for sm_90 only.
        dtype: As in ``Problem``.

    Determinism: pure function of its arguments; no choice changes bits.
    """
    if device != "sm_90" or dtype == "fp32" or topk > _OUTPUT[-1][0]:
        return None
    if tokens > 1 and tokens * topk > _MOST_SLOTS_PER_EXPERT * experts:
        return None
    output = next(config for most, config in _OUTPUT if topk <= most)
    return Tiles(_HIDDEN, output, early=True)
