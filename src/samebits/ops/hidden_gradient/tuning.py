"""Tile shapes of the hidden gradient; all that an architecture uses compute the same bits."""

from typing import NamedTuple

from samebits.ops.indirect_gemm.tuning import UNMEASURED, Config


class Entry(NamedTuple):
    """The tile up to a number of rows per expert."""

    # Slots per expert at most, on average.
    most: float
    config: Config


TABLE: tuple[Entry, ...] = (
    Entry(
        float("inf"),
        Config(block_r=64, block_n=128, block_k=64, num_warps=4, num_stages=3, programs=264),
    ),
)


def every() -> list[Config]:
    """Return every tile that an architecture with evidence uses."""
    return [entry.config for entry in TABLE]


def heuristic(rows: int, experts: int, device: str) -> Config:
    """Return the tile for ``rows`` slots over ``experts`` experts.

    Determinism: pure function of its arguments; no choice changes bits.
    """
    if device != "sm_90":
        return UNMEASURED
    per_expert = rows / experts
    return next(entry.config for entry in TABLE if per_expert <= entry.most)
