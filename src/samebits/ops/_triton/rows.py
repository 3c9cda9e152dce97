"""Find the expert of sorted rows, sort the rows of a token, add products in a fixed order."""

import triton
import triton.language as tl


@triton.constexpr_function
def _halvings(count):
    return count.bit_length()


@triton.jit
def expert_of_row(offsets_ptr, rows, E: tl.constexpr):
    """Return the expert whose span ``[offsets[e], offsets[e + 1])`` holds each row, as int32.

    Binary search for the last expert that starts at or before the row; rows past the last span
    get the last expert.
    """
    low = rows.to(tl.int32) * 0
    high = low + (E - 1)
    for _ in tl.static_range(_halvings(E)):
        middle = (low + high + 1) // 2
        starts = tl.load(offsets_ptr + middle)
        inside = starts <= rows
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, tl.where(middle > low, middle - 1, low))
    return low


@triton.jit
def insert_ascending(ordered, key, COUNT: tl.constexpr):
    """Return the ``COUNT`` ascending scalars of a tuple and ``key``, ascending."""
    placed = ()
    for place in tl.static_range(COUNT):
        placed = placed + (tl.minimum(key, ordered[place]),)  # noqa: RUF005
        key = tl.maximum(key, ordered[place])
    return placed + (key,)  # noqa: RUF005


@triton.jit
def keys_ascending(
    inverse_ptr, first, R, TOPK: tl.constexpr, POW2: tl.constexpr, WIDE: tl.constexpr
):
    """Return a tuple of ``row * POW2 + choice`` for the slots from ``first`` on, ascending.

    Scalars, sorted by insertion in every thread: nothing waits for a shuffle, and all rows are
    known before the first is loaded. Dropped slots come last, with row R. ``WIDE``: 64-bit keys.
    """
    ordered = ()
    for k in tl.static_range(TOPK):
        row = tl.minimum(tl.load(inverse_ptr + first + k), R)
        key = row.to(tl.int64 if WIDE else tl.int32) * POW2 + k
        ordered = insert_ascending(ordered, key, k)
    return ordered


@triton.jit
def sum_of_64_columns(product, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr):
    """Return ``[BLOCK_R, BLOCK_F // 64]`` sums of 64 neighbours, in one order for every tile.

    Neighbours are added in pairs, then the pair sums in pairs, six times: no register layout and
    no tile size can change the order, as they can in ``tl.sum``.
    """
    tl.static_assert(BLOCK_F % 64 == 0)
    product = _add_pairs(product, BLOCK_R, BLOCK_F // 2)
    product = _add_pairs(product, BLOCK_R, BLOCK_F // 4)
    product = _add_pairs(product, BLOCK_R, BLOCK_F // 8)
    product = _add_pairs(product, BLOCK_R, BLOCK_F // 16)
    product = _add_pairs(product, BLOCK_R, BLOCK_F // 32)
    return _add_pairs(product, BLOCK_R, BLOCK_F // 64)


@triton.jit
def add_neighbours(values, BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr):
    """Return ``[BLOCK_R, 1]`` sums of all columns, in the order of ``sum_of_64_columns``."""
    if BLOCK_F == 1:
        return values
    else:
        return add_neighbours(_add_pairs(values, BLOCK_R, BLOCK_F // 2), BLOCK_R, BLOCK_F // 2)


@triton.jit
def _add_pairs(values, BLOCK_R: tl.constexpr, PAIRS: tl.constexpr):
    even, odd = tl.split(tl.reshape(values, [BLOCK_R, PAIRS, 2]))
    return even + odd


@triton.jit
def sum_ascending(partial_ptrs, mask, COUNT, STEP: tl.constexpr = 16):
    """Return ``((0 + p[0]) + p[1]) + …`` over ``COUNT`` neighbours behind each pointer.

    ``STEP`` of them are loaded at a time.
    """
    total = tl.where(mask, 0.0, 0.0)
    for start in range(0, COUNT, STEP):
        for step in tl.static_range(STEP):
            inside = mask & (start + step < COUNT)
            total += tl.load(partial_ptrs + (start + step), mask=inside, other=0.0)
    return total
