"""Blocks of rows that fit into a cache, and the memory that one after the other is computed in.

torch's scalar tail loop gives other bits than its vector loop. So a block is computed as it lies
where every thread gets whole vectors of it, else in flat copies that are padded to whole vectors:
the bits of a row do not depend on its position.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from samebits.activation import Activation
from samebits.ops.activation.operands import Operands, wide_dtype
from samebits.weights import Layout

# Kinds whose loops do not depend on strides; torch has two of gelu.
_STRIDED = ("silu", "relu", "relu2")
# Elements of h in a block, for each thread: enough to hide the cost of a call, few enough for L2.
BLOCK = 131072
# Loops of so many elements have one thread; gelu's have as many as there are from the second on.
_SERIAL, _SERIAL_GELU = 32768, 16384
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


def _spans(live: int, columns: int, elements: int, *, whole: bool) -> Iterator[slice]:
    """Cut the live rows into blocks of rows, the longest first; ``whole`` ones where that helps."""
    threads = torch.get_num_threads()
    step = max(1, elements * threads // columns)
    # Threads then get whole rows, and whole vectors where rows are whole vectors.
    step -= step % threads if step > threads else 0
    first = 0
    while first < live:
        end = min(first + step, live)
        if whole and not _is_whole((end - first) * columns):
            # The few rows that no thread gets whole vectors of are a block of their own.
            end -= (end - first) % threads if end - first > threads else 0
        yield slice(first, end)
        first = end


def _unit(size: int) -> int:
    """Return what ``size`` must be a multiple of for every thread to get whole vectors."""
    threads = torch.get_num_threads()
    if threads == 1 or size <= _SERIAL_GELU:
        return _VECTOR
    return _VECTOR * math.lcm(threads, min(threads, -(-size // _SERIAL)))


def _is_whole(size: int) -> bool:
    """Return whether torch cuts a loop of so many elements into whole vectors."""
    return size % _unit(size) == 0


def _padded(size: int) -> int:
    """Return the next length that is whole."""
    while not _is_whole(size):
        unit = _unit(size)
        size = -(-size // unit) * unit
    return size


class Buffers:
    """Memory by name that one block after the other works in: it stays in the cache."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._memory: dict[str, Tensor] = {}
        # All blocks but the last few have one shape: their views are made once.
        self._views: dict[tuple[str, torch.Size], Tensor] = {}
        self._copies: dict[tuple[str, torch.Size], tuple[Tensor, Tensor, Tensor | None]] = {}

    def _flat(self, name: str, size: int) -> Tensor:
        # The first block is the longest.
        memory = self._memory.get(name)
        if memory is None or memory.numel() < size:
            memory = self._memory[name] = torch.empty(size, dtype=self._dtype)
        return memory if memory.numel() == size else memory[:size]

    def like(self, name: str, value: Tensor) -> Tensor:
        """Return the buffer ``name`` in the shape of ``value``; any content."""
        key = name, value.shape
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._flat(name, value.numel()).view(value.shape)
        return view

    def copy(self, name: str, part: Tensor) -> Tensor:
        """Return a flat copy of ``part``, padded with zeros to whole vectors."""
        key = name, part.shape
        made = self._copies.get(key)
        if made is None:
            size = part.numel()
            flat = self._flat(name, _padded(size))
            padding = None if flat.numel() == size else flat[size:]
            made = self._copies[key] = flat, flat[:size].view(part.shape), padding
        flat, filled, padding = made
        filled.copy_(part)
        if padding is not None:
            padding.zero_()
        return flat


class Block(NamedTuple):
    """Rows that are computed together, in the wide dtype."""

    span: slice
    # (rows, n, block).
    shape: torch.Size
    # In that shape where torch gets whole vectors of them, else flat and padded; up is None
    # without one.
    gate: Tensor
    up: Tensor | None
    # Whether they are operands as they lie, not to be written to.
    lent: bool


def walk(
    operands: Operands, activation: Activation, layout: Layout, buffers: Buffers, elements: int
) -> Iterator[Block]:
    """Yield the blocks of rows of ``z' = D(z + bias)``, of ``elements`` of h for each thread.

    Determinism: elementwise.
    """
    z, live = operands.z, live_rows(operands)
    columns = z.shape[1] // activation.columns
    experts = _row_experts(operands)
    strided = activation.kind in _STRIDED and layout.block(columns) % _VECTOR == 0
    lent = z.dtype == wide_dtype(z.dtype)
    gates, ups = parts_of(z, activation, layout)
    # By the number of rows; one for all blocks but the last few.
    wide: dict[int, tuple[Tensor, tuple[Tensor, Tensor | None]]] = {}
    for span in _spans(live, columns, elements, whole=strided):
        count = span.stop - span.start
        whole = strided and _is_whole(count * columns)
        if operands.bias is not None:
            rows = _biased(operands, span, experts)
            gate, up = parts_of(rows, activation, layout)
        else:
            rows = z[span]
            gate, up = gates[span], None if ups is None else ups[span]
        shape = gate.shape
        if whole and not lent:
            # One copy of whole rows takes less time than two of their parts.
            if count not in wide:
                buffer = buffers.like("rows", rows)
                wide[count] = buffer, parts_of(buffer, activation, layout)
            buffer, (gate, up) = wide[count]
            buffer.copy_(rows)
        elif not whole:
            gate, up = buffers.copy("gate", gate), None if up is None else buffers.copy("up", up)
        yield Block(span, shape, gate, up, whole and lent)


def parts_of(z: Tensor, activation: Activation, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """Return gate and up as views ``(rows, n, block)``.

    Determinism: no arithmetic.
    """
    if not activation.gated:
        return z.view(z.shape[0], 1, z.shape[1]), None
    columns = z.shape[1] // 2
    block = layout.block(columns)
    pairs = z.view(z.shape[0], columns // block, 2, block)
    first, second = pairs.unbind(2)
    return (second, first) if layout.up_first else (first, second)


def _biased(operands: Operands, span: slice, experts: Tensor | None) -> Tensor:
    """Return ``D(z + bias)``."""
    z, bias = operands.z[span], _row_bias(operands, span, experts)
    assert bias is not None
    # One rounding: sums of one dtype are computed in fp32 already.
    return (z + bias if bias.dtype == z.dtype else z.to(bias.dtype) + bias).to(z.dtype)


def _row_bias(operands: Operands, span: slice, experts: Tensor | None) -> Tensor | None:
    if operands.bias is None or experts is None:
        return operands.bias
    return operands.bias[experts[span]]


def _row_experts(operands: Operands) -> Tensor | None:
    """Return the expert of each live row where every expert has its own bias."""
    if operands.offsets is None:
        return None
    counts = operands.offsets.long().diff()
    return torch.repeat_interleave(torch.arange(counts.shape[0]), counts)
