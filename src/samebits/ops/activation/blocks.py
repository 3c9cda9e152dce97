"""Blocks of rows that fit into a cache, and the memory that one after the other is computed in.

A block lives in flat buffers whose length is a multiple of the vector width, because torch's scalar
tail loop gives other bits than its vector loop: so the bits of a row do not depend on its position.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from samebits.ops.activation.operands import Operands, wide_dtype

# Elements of h per block and thread: large enough to hide the cost of a call, small enough for L2.
BLOCK = 65536
# torch gives a thread at least this many elements of a loop.
_GRAIN = 32768
# More elements than two vectors of any instruction set.
_VECTOR = 64


def live_rows(operands: Operands) -> int:
    """Return how many rows are computed."""
    live = operands.z.shape[0]
    if operands.num_rows is not None:
        live = min(live, int(operands.num_rows))
    if operands.offsets is not None:
        live = min(live, int(operands.offsets[-1]))
    return max(live, 0)


def blocks(operands: Operands, columns: int) -> Iterator[slice]:
    """Cut the live rows into blocks of rows."""
    live = live_rows(operands)
    step = max(1, BLOCK * torch.get_num_threads() // max(columns, 1))
    for first in range(0, live, step):
        yield slice(first, min(first + step, live))


def _padded(size: int) -> int:
    """Return a length that torch cuts into whole vectors, however many threads share it."""
    threads = torch.get_num_threads()
    unit = _GRAIN
    if size <= _GRAIN or size >= _GRAIN * threads:
        unit = _VECTOR if size <= _GRAIN else _VECTOR * threads
    return -(-size // unit) * unit


class Buffers:
    """Flat memory that one block after the other works in: it stays in the cache."""

    def __init__(self, operands: Operands, columns: int) -> None:
        longest = next(blocks(operands, columns), slice(0, 0)).stop
        self._size = _padded(longest * columns)
        self._dtype = wide_dtype(operands.z.dtype)
        self._parts: dict[str, Tensor] = {}

    def of(self, name: str, like: Tensor) -> Tensor:
        """Return the buffer ``name``, as long as ``like`` with its padding; any content."""
        if name not in self._parts:
            self._parts[name] = torch.empty(self._size, dtype=self._dtype)
        return self._parts[name][: _padded(like.numel())]

    def wide(self, name: str, part: Tensor) -> Tensor:
        """Return a flat copy of ``part``, padded with zeros to whole vectors."""
        size, flat = part.numel(), self.of(name, part)
        flat[size:] = 0
        flat[:size].view(part.shape).copy_(part)
        return flat
