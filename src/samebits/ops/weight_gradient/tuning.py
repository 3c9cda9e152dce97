"""Tile shapes of weight gradients; all that an architecture uses compute the same bits."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialized:
    """Tile of one program of ``specialized.kernel``, and the ring that feeds it."""

    # Tile of the gradient; two warpgroups have half of its rows each.
    block_m: int = 128
    block_n: int = 256
    # Rows per step.
    block_k: int = 32
    # Steps in shared memory.
    num_stages: int = 6
    # See ``Config``.
    group: int = 8
    programs: int = 132


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Tile of one program."""

    # Tile of the gradient.
    block_m: int
    block_n: int
    # Rows per step.
    block_k: int
    num_warps: int
    num_stages: int
    # Row blocks of a matrix that share a column block in turn.
    group: int = 8
    # Read through tensor descriptors where alignment allows.
    tma: bool = True
    # Write through a tensor descriptor where alignment allows.
    stored: bool = False
    # Programs of a persistent grid, at most.
    programs: int = 132
    # Instead of this tile where descriptors allow it, nothing is added to the result, and Triton's
    # Gluon is one that is known.
    specialized: Specialized | None = None

    def for_fp32(self) -> "Config":
        """Return a tile that fp32 operands fit: IEEE products have no matrix unit."""
        return replace(
            self, block_m=64, block_n=64, block_k=32, num_stages=2, num_warps=4, specialized=None
        )


# See ``samebits.ops.indirect_gemm.tuning.UNMEASURED``.
UNMEASURED = Config(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=3, tma=False)


# bf16 on an H200, Triton 3.6.0, from benchmarks/tune_backward.py. Up to a number of slots per
# expert, on average.
TABLE: tuple[tuple[float, Config], ...] = (
    (
        48.0,
        Config(
            block_m=128, block_n=128, block_k=32, num_warps=4, num_stages=2, stored=True,
            programs=1 << 20,
        ),
    ),
    (
        400.0,
        # Three programs a processor.
        Config(
            block_m=128, block_n=128, block_k=32, num_warps=4, num_stages=2, stored=True,
            programs=396, specialized=Specialized(),
        ),
    ),
    (
        640.0,
        Config(
            block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=3, stored=True,
            specialized=Specialized(),
        ),
    ),
    (
        1100.0,
        Config(
            block_m=128, block_n=128, block_k=64, num_warps=4, num_stages=3, programs=264,
            specialized=Specialized(),
        ),
    ),
    (
        float("inf"),
        Config(
            block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=3, stored=True,
            specialized=Specialized(),
        ),
    ),
)  # fmt: skip


def heuristic(rows: int, experts: int, device: str) -> Config:
    """Return the tile for ``rows`` slots over ``experts`` experts.

    Determinism: pure function of its arguments; no choice changes bits.
    """
    if device != "sm_90":
        return UNMEASURED
    return next(config for most, config in TABLE if rows / experts <= most)
