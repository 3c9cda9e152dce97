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
    live, threads = live_rows(operands), torch.get_num_threads()
    step = max(1, BLOCK * threads // max(columns, 1))
    # Threads then get whole rows, and whole vectors where rows are whole vectors.
    step -= step % threads if step > threads else 0
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
        # All blocks but the last have one shape: their views are made once.
        self._views: dict[tuple[str, torch.Size], Tensor] = {}
        self._filled: dict[tuple[str, torch.Size], tuple[Tensor, ...]] = {}

    def like(self, name: str, value: Tensor) -> Tensor:
        """Return the buffer ``name`` in the shape of ``value``; any content."""
        key = name, value.shape
        if key not in self._views:
            self._views[key] = self._rows(name, 1, value.numel())[0].view(value.shape)
        return self._views[key]

    def _rows(self, name: str, count: int, length: int) -> Tensor:
        if name not in self._parts:
            self._parts[name] = torch.empty(count, self._size, dtype=self._dtype)
        return self._parts[name][:, :length]

    def wide(self, name: str, parts: Tensor) -> tuple[Tensor, ...]:
        """Return a flat copy of each of ``parts``, padded with zeros to whole vectors."""
        key = name, parts.shape
        if key not in self._filled:
            size = parts[0].numel()
            flat = self._rows(name, parts.shape[0], _padded(size))
            self._filled[key] = flat[:, :size].view(parts.shape), flat[:, size:], *flat.unbind()
        filled, padding, *flats = self._filled[key]
        if padding.numel():
            padding.zero_()
        filled.copy_(parts)
        return tuple(flats)

    def is_flat(self, part: Tensor) -> bool:
        """Return whether loops over ``part`` as it lies are whole vectors of the wide dtype."""
        whole = part.shape[-1] % _VECTOR == 0 and _padded(part.numel()) == part.numel()
        return whole and part.dtype == self._dtype
