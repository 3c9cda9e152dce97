"""Candidate tiles of the backward's products, for tune_backward.py."""

from dataclasses import replace

from tune_indirect_gemm import rows, streamed

from samebits.ops.weight_gradient.tuning import Config as Outer
from samebits.ops.weight_gradient.tuning import Specialized, heuristic


def outer(block_m, block_n, block_k, warps, stages, group=8, *, persistent=True, **how):
    programs = 132 if block_m * block_n >= 128 * 256 else 264
    return Outer(
        block_m=block_m, block_n=block_n, block_k=block_k, num_warps=warps, num_stages=stages,
        group=group, **{"programs": programs if persistent else 1 << 20} | how,
    )  # fmt: skip


HIDDEN = [
    rows(64, 128, 64, 4, 3),
    rows(64, 256, 64, 4, 2),
    rows(128, 128, 64, 4, 3),
    rows(128, 256, 64, 8, 3),
    rows(128, 256, 64, 8, 3, 16),
]
# The forward's first projection, which stores z here.
FIRST = [
    rows(64, 256, 64, 8, 4),
    rows(128, 128, 64, 8, 4),
    rows(128, 256, 64, 8, 3),
    rows(128, 256, 64, 8, 4),
    streamed(128, 256, 64, 8, 4, False),
]
INPUT = [
    rows(64, 128, 64, 4, 4),
    rows(64, 256, 64, 4, 3),
    rows(64, 256, 64, 8, 4, 16),
    rows(128, 128, 64, 4, 3),
    rows(128, 128, 64, 8, 4),
    rows(128, 256, 64, 8, 4),
    *(
        replace(rows(128, 256, 64, 8, 3, group), short=short)
        for group in (8, 16)
        for short in (0, 32, 64)
    ),
]
FEW = [
    streamed(16, 128, 64, 4, 4, False),
    streamed(16, 128, 128, 4, 3, True),
    streamed(32, 128, 64, 4, 4, True),
    streamed(32, 128, 128, 8, 3, True),
    streamed(32, 128, 64, 4, 4, False),
    streamed(64, 128, 64, 8, 4, True),
    streamed(64, 128, 64, 4, 3, False),
]
OUTER = [
    outer(128, 256, 64, 8, 3),
    outer(128, 256, 64, 8, 3, stored=True),
    outer(128, 256, 64, 8, 4, 16),
    outer(256, 128, 64, 8, 4),
    outer(128, 128, 64, 4, 3),
    outer(128, 128, 64, 4, 3, stored=True),
    outer(128, 128, 64, 4, 2, stored=True),
    outer(128, 128, 64, 8, 3),
    outer(128, 128, 64, 4, 3, persistent=False),
]
OUTER_MIDDLE = [
    outer(128, 128, 64, 4, 2, persistent=False),
    outer(128, 128, 64, 4, 2, stored=True, persistent=False),
    outer(128, 128, 32, 4, 3, stored=True, persistent=False),
    outer(128, 128, 32, 4, 2, stored=True, persistent=False),
    outer(128, 128, 32, 4, 2, stored=True, programs=396),
    outer(128, 128, 32, 4, 3, tma=False, persistent=False),
    outer(128, 128, 64, 4, 3, tma=False, persistent=False),
    outer(128, 128, 64, 4, 3, tma=False),
    outer(128, 128, 64, 4, 2, tma=False, stored=True),
    outer(64, 256, 32, 4, 3, stored=True, persistent=False),
    outer(64, 128, 64, 4, 2, stored=True, persistent=False),
]
OUTER_FEW = [
    outer(128, 128, 32, 4, 3, persistent=False),
    outer(128, 128, 32, 8, 2, persistent=False),
    outer(64, 128, 32, 4, 3, persistent=False),
    outer(64, 128, 32, 4, 3, stored=True, persistent=False),
    outer(64, 128, 32, 4, 2, stored=True, persistent=False),
    outer(64, 128, 32, 4, 2, stored=True, programs=660),
    outer(64, 128, 32, 4, 3, tma=False, persistent=False),
    outer(64, 64, 32, 4, 3, persistent=False),
    outer(64, 256, 32, 4, 2, stored=True, persistent=False),
]
# Steps and a tile fill shared memory.
SPECIALIZED = [
    Specialized(),
    Specialized(group=16),
    Specialized(block_k=16, num_stages=12),
    Specialized(block_k=64, num_stages=3),
    Specialized(block_m=256, block_n=128),
    Specialized(block_n=128, num_stages=10),
]


def specialized(slots, experts):
    """Return the tile of weight gradients in use without specialised warps, then tiles of those."""
    used = heuristic(slots, experts, "sm_90")
    return [replace(used, specialized=tile) for tile in (None, *SPECIALIZED)]


def candidates(stage, rows_per_expert):
    if stage in ("down", "gate_up"):
        if rows_per_expert <= 100:
            return [*OUTER_FEW, *OUTER_MIDDLE]
        return [*OUTER_MIDDLE, *OUTER] if rows_per_expert <= 600 else OUTER
    wide = {"hidden": HIDDEN, "input": INPUT, "first": FIRST}[stage]
    if stage == "first":
        return wide
    if rows_per_expert <= 40:
        return [*FEW, *wide[:4]]
    return [*FEW[4:], *wide] if rows_per_expert <= 150 else wide
