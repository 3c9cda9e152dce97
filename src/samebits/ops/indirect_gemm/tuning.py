"""Tile shapes of the projections; all that an architecture uses compute the same bits."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from samebits.formats.descriptor import WeightFormat
from samebits.problem import Problem


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
    # Tiles of at most so many rows are computed with that many, not with block_r; 0: none are.
    short: int = 0

    def for_fp32(self) -> Self:
        """Return a tile that fp32 operands fit: IEEE products have no matrix unit."""
        return replace(
            self,
            block_r=min(self.block_r, 64),
            block_n=64,
            block_k=32,
            num_stages=2,
            num_warps=4,
            short=0,
        )


def _rows(
    block_r: int,
    block_n: int,
    warps: int,
    stages: int,
    *,
    group: int = 8,
    short: int = 0,
    persistent: bool = True,
) -> Config:
    """Rows as the first operand: for arithmetic-bound sizes.

    On a persistent grid, or, where tiles are few and some are short, in the order of the hardware.
    """
    programs = 132 if block_r * block_n >= 128 * 256 else 264
    return Config(
        block_r=block_r,
        block_n=block_n,
        block_k=64,
        num_warps=warps,
        num_stages=stages,
        group=group,
        programs=programs if persistent else 1 << 20,
        short=short,
    )


def _streamed(
    block_r: int,
    block_n: int,
    block_k: int,
    warps: int,
    stages: int,
    *,
    swap: bool = True,
    short: int = 0,
) -> Config:
    """One program for each weight tile: for sizes bound by reading weights."""
    return Config(
        block_r=block_r,
        block_n=block_n,
        block_k=block_k,
        num_warps=warps,
        num_stages=stages,
        swap=swap,
        group=1,
        programs=1 << 20,
        short=short,
    )


class Entry(NamedTuple):
    """Tiles of both projections up to a number of rows per expert."""

    # Slots per expert at most, on average.
    most: float
    first: Config
    second: Config


# bf16 on an H200, Triton 3.6.0, from benchmarks/tune_indirect_gemm.py; both projections of an entry
# have one block_r, that of the tile table. Every entry is proven to have the bits of the others
# (tests/backends/test_fused.py).
TABLE: tuple[Entry, ...] = (
    Entry(10.0, _streamed(16, 128, 128, 4, 4), _streamed(16, 64, 128, 4, 5, swap=False)),
    Entry(24.0, _streamed(32, 256, 128, 8, 3), _streamed(32, 256, 128, 8, 3)),
    Entry(48.0, _streamed(64, 256, 64, 8, 4), _streamed(64, 256, 64, 8, 4)),
    Entry(100.0, _rows(128, 256, 8, 4, short=64), _rows(128, 256, 8, 4, short=64)),
    Entry(180.0, _streamed(128, 256, 64, 8, 4, short=32), _streamed(128, 256, 64, 8, 4, short=32)),
    Entry(
        400.0,
        _rows(128, 256, 8, 4, short=64, persistent=False),
        _rows(128, 256, 8, 4, short=64, persistent=False),
    ),
    Entry(float("inf"), _rows(128, 256, 8, 3, group=16), _rows(128, 256, 8, 3)),
)

# The same for the gradient of the input, a product with the transposed first matrix; from
# benchmarks/tune_backward.py. Up to a number of slots per expert, on average.
INPUT_GRADIENT_TABLE: tuple[tuple[float, Config], ...] = (
    (24.0, _streamed(32, 128, 64, 4, 4, swap=False)),
    (48.0, _streamed(64, 128, 64, 4, 3, swap=False)),
    (100.0, _rows(128, 256, 8, 3)),
    (200.0, _rows(128, 256, 8, 3, short=32)),
    (400.0, _rows(128, 256, 8, 3, group=16, short=32)),
    (float("inf"), _rows(128, 256, 8, 3, group=16)),
)

# Where nothing has shown that two tiles share their bits there is one, whatever the size: it fits
# the 99 KB of shared memory of sm_86, sm_89 and sm_120.
UNMEASURED = Config(block_r=64, block_n=128, block_k=64, num_warps=4, num_stages=3, tma=False)


def _upcasting(block_r: int, block_n: int, block_k: int, warps: int, stages: int) -> Config:
    """Quantised weights as the first operand, in registers: see ``supports_upcast``."""
    return _streamed(block_r, block_n, block_k, warps, stages)


_E4M3 = (
    Entry(5.0, _upcasting(8, 64, 256, 2, 3), _upcasting(8, 64, 256, 2, 3)),
    Entry(40.0, _upcasting(16, 128, 128, 2, 4), _upcasting(16, 128, 128, 2, 4)),
)
_E2M1 = (
    Entry(5.0, _upcasting(8, 128, 128, 2, 4), _upcasting(8, 64, 128, 2, 4)),
    Entry(40.0, _upcasting(16, 128, 128, 2, 4), _upcasting(16, 128, 128, 2, 4)),
)
# A larger first tile needs more registers than there are.
_NVFP4 = (Entry(5.0, _upcasting(8, 64, 128, 2, 4), _upcasting(8, 64, 128, 2, 4)), _E2M1[1])
# Rows as the first operand, weights decoded into shared memory.
_MANY = replace(_streamed(128, 128, 64, 4, 3, swap=False), group=8)
# Both warps, or all four, have rows of their own: see ``samebits.ops._triton.shuffled``.
_SHUFFLED = (
    Entry(5.0, _upcasting(8, 128, 128, 2, 4), _upcasting(8, 128, 256, 4, 4)),
    Entry(40.0, _upcasting(16, 128, 128, 2, 4), _upcasting(16, 128, 256, 4, 3)),
    Entry(128.0, _MANY, _MANY),
)
# The same for quantised weights that are upcast on the way, by the name of their format; from
# benchmarks/tune_quantized.py. Beyond, weights are made dense first.
QUANTIZED_TABLE = {
    "fp8": _E4M3,
    "mxfp8": _E4M3,
    "mxfp4": _E2M1,
    "mxfp4_shuffled": _SHUFFLED,
    "nvfp4": _NVFP4,
}
_FEW_E4M3 = Entry(5.0, _upcasting(8, 64, 128, 1, 4), _upcasting(8, 32, 256, 2, 3))
_FEW_E2M1 = Entry(5.0, _upcasting(8, 64, 128, 2, 4), _upcasting(8, 32, 128, 2, 4))
_FEW_SHUFFLED = Entry(5.0, _upcasting(8, 128, 128, 2, 6), _upcasting(8, 64, 512, 4, 3))
# Where the first entry's tiles are too few to fill the device.
QUANTIZED_FEW = {
    "fp8": _FEW_E4M3,
    "mxfp8": _FEW_E4M3,
    "mxfp4": _FEW_E2M1,
    "mxfp4_shuffled": _FEW_SHUFFLED,
    "nvfp4": _FEW_E2M1,
}
# Programs of either projection that fill an H200. Of two warps some six run on a multiprocessor;
# shuffled weights' first tiles were the faster ones with 720 programs, the few ones with 448.
_FILLING = 6 * 132, 6 * 132
_FILLING_SHUFFLED = 600, 132


def supports_upcast(config: Config, held: WeightFormat, parts: int = 1) -> bool:
    """Return whether a tile may upcast weights of a format; ``parts`` share its rows.

    Operands in registers are for ``mma.sync`` alone, which Triton takes for fewer than four warps:
    asynchronous products of such operands may be wrong (docs/projections.md). Scales are one to a
    power of two of columns, at least the four of a word. Of shuffled weights each warp has 16 rows
    or a multiple of them, of each part, and a step is one of words of scales; or rows are the first
    operand, and both lie in shared memory.

    Determinism: pure function of its arguments.
    """
    if held.shuffled:
        if not config.swap:
            return config.num_warps >= 4 and config.block_r >= 64 and config.block_k in (64, 128)
        each = config.block_n // (parts * config.num_warps)
        return each > 0 and each % 16 == 0 and config.block_k in (128, 256, 512)
    columns = held.columns
    power = columns >= 4 and columns & (columns - 1) == 0
    return config.swap and config.num_warps < 4 and config.block_k % 32 == 0 and power


def quantized_heuristic(rows: int, problem: Problem) -> tuple[Config, Config] | None:
    """Return tiles that upcast quantised weights for ``rows`` slots, or None: make them dense.

    Determinism: pure function of its arguments; no choice changes bits.
    """
    held = problem.format
    if held is None or problem.device != "sm_90" or problem.dtype not in ("bf16", "fp16"):
        return None
    table, few = QUANTIZED_TABLE[held.gate_up.name], QUANTIZED_FEW[held.gate_up.name]
    entry = next((e for e in table if rows / problem.E <= e.most), None)
    if entry is None:
        return None
    first, second = entry.first, entry.second
    if entry.most <= few.most:
        experts, columns = min(rows, problem.E), problem.activation.columns
        filling = _FILLING_SHUFFLED if held.gate_up.shuffled else _FILLING
        if experts * columns * problem.F < filling[0] * first.block_n:
            first = few.first
        if experts * problem.H < filling[1] * second.block_n:
            second = few.second
    parts = problem.activation.columns
    if not (supports_upcast(first, held.gate_up, parts) and supports_upcast(second, held.down)):
        return None
    # The rows of each part that a tile takes have to be neighbours.
    span, part = problem.layout.interleave or problem.F, first.block_n // parts
    near = part % span == 0 or span % part == 0 or span == problem.F
    return (first, second) if near else None


def heuristic(rows: int, experts: int, device: str) -> tuple[Config, Config]:
    """Return the tiles of both projections for ``rows`` slots over ``experts`` experts.

    Args:
        rows: T * K.
        experts: E.
        device: As in ``Problem``. The table is evidence for sm_90 only; others get ``UNMEASURED``.

    Determinism: pure function of its arguments; no choice changes bits.
    """
    if device != "sm_90":
        return UNMEASURED, UNMEASURED
    per_expert = rows / experts
    entry = next(entry for entry in TABLE if per_expert <= entry.most)
    return entry.first, entry.second


def input_gradient_heuristic(rows: int, experts: int, device: str) -> Config:
    """Return the tile of the gradient of the input; see ``heuristic``.

    Determinism: pure function of its arguments; no choice changes bits.
    """
    if device != "sm_90":
        return UNMEASURED
    return next(config for most, config in INPUT_GRADIENT_TABLE if rows / experts <= most)
