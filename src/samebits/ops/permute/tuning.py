"""What the metadata launches return, and every size they use; no size changes a result."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

# Up to here the program of each expert reads every id: one launch. Above: two.
FEW_SLOTS = 8192
# Slots that a placing program sorts at a time.
CHUNK = 1024
# Programs of a large launch; more would only read the histograms more often.
PROGRAMS = 256
# Column sums of gradients of probabilities are taken over this many columns: part of their bits.
COLUMNS_PER_SUM = 64
# Rows of a token are sorted by row * (a power of two) + choice: in 32 bits while that is enough.
MOST_NARROW_KEY = (1 << 31) - (1 << 16)


class Tiles(NamedTuple):
    """Device-side work list: rows cut into tiles of at most BLOCK_R that stay within an expert.

    The longest expert's tiles come first (ties: lower id), each expert's in row order. Entries from
    ``count`` on hold anything.
    """

    # Expert of each tile, int32, (capacity,); capacity = R // BLOCK_R + E.
    expert: Tensor
    # First row, int32.
    row: Tensor
    # First row that is not the expert's, int32.
    end: Tensor
    # Tiles in use, int32, (1,).
    count: Tensor  # type: ignore[assignment]


class Metadata(NamedTuple):
    """A ``samebits.routing.Permutation`` in int32, and the tiles for one BLOCK_R."""

    # (R,), row -> slot; R in the tail of rows that do not exist.
    slots: Tensor
    # (E + 1,), first row of each expert; offsets[E] counts the rows.
    offsets: Tensor
    # (R,), slot -> row; R for a dropped slot.
    inverse: Tensor
    tiles: Tiles


def capacity(total: int, num_local: int, block_r: int) -> int:
    """Return how many tiles ``total`` rows of ``num_local`` experts can make at most."""
    return total // block_r + num_local


def _parts(total: int, num_local: int, block_r: int) -> tuple[int, ...]:
    most = capacity(total, num_local, block_r)
    return total, num_local + 1, total, most, most, most, 1


def _padded(size: int) -> int:
    # Every part starts on 16 bytes: a binary per alignment would be a binary per T.
    return (size + 3) // 4 * 4


def buffer_size(total: int, num_local: int, block_r: int) -> int:
    """Return the int32 elements behind a ``Metadata``."""
    return sum(_padded(size) for size in _parts(total, num_local, block_r))


def unpack(buffer: Tensor, total: int, num_local: int, block_r: int) -> Metadata:
    """Return the parts of ``buffer``, as views.

    One allocation and one operator result for all of them: few tokens are a matter of microseconds.

    Determinism: views.
    """
    views, start = [], 0
    for size in _parts(total, num_local, block_r):
        views.append(buffer.narrow(0, start, size))
        start += _padded(size)
    slots, offsets, inverse, *tiles = views
    return Metadata(slots, offsets, inverse, Tiles(*tiles))


def slots_of_few(total: int) -> int:
    """Return the slots that a program of the one-launch path holds: few sizes, so few binaries."""
    return next(size for size in (64, 256, 1024, 4096, FEW_SLOTS) if size >= total)


def chunks_per_program(total: int) -> int:
    """Return how many chunks of slots each placing program sorts."""
    return -(-total // (CHUNK * PROGRAMS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Columns of one token that a program moves."""

    # A power of two, at least COLUMNS_PER_SUM; where dp is wanted, whose sums take registers,
    # at most 256 are moved at a time.
    block_h: int
    # Warps per program.
    num_warps: int
    # Rows of a token that are on their way before the first is added.
    ahead: int = 4


# How many programs fill a device with few tokens.
_FULL = 528


def heuristic(tokens: int, hidden: int, topk: int, itemsize: int) -> Config:
    """Return the tile for ``tokens`` rows of ``hidden`` elements of ``itemsize`` bytes.

    Programs of one warp, which never waits for another, and of many bytes: the first few loads of a
    program find out where its rows are. Less where few tokens would leave processors idle.

    Determinism: pure function of its arguments; no choice changes bits.
    """
    vectors = 2 if 2 < topk < 8 else 4
    if tokens * -(-hidden // 2048) < _FULL:
        vectors = 1
    # 16 bytes for each thread.
    return Config(block_h=vectors * 32 * 16 // max(itemsize, 2), num_warps=1)


def candidates(hidden: int, *, topk: int = 1) -> list[Config]:
    """Return the configurations worth timing; with ``topk`` of them for sums."""
    sizes = [size for size in (256, 512, 1024, 2048, 4096) if size < 2 * hidden] or [256]
    return [
        Config(block_h=size, num_warps=warps, ahead=ahead)
        for size in sizes
        for warps in (1, 2, 4, 8)
        for ahead in ((4, 8) if topk > 4 else (4,))
        # 8 to 32 elements for each thread.
        if 256 <= size // warps <= 1024 or size == sizes[0]
    ]
