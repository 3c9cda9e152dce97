"""Find the expert of sorted rows from ``offsets``, and add column products in a fixed order."""

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
    """Return ``[BLOCK_R, 1]`` sums of up to 64 columns, in the order of ``sum_of_64_columns``."""
    if BLOCK_F == 1:
        return values
    else:
        return add_neighbours(_add_pairs(values, BLOCK_R, BLOCK_F // 2), BLOCK_R, BLOCK_F // 2)


@triton.jit
def _add_pairs(values, BLOCK_R: tl.constexpr, PAIRS: tl.constexpr):
    even, odd = tl.split(tl.reshape(values, [BLOCK_R, PAIRS, 2]))
    return even + odd


@triton.jit
def sum_ascending(partial_ptrs, mask, COUNT):
    """Return ``((0 + p[0]) + p[1]) + …`` over ``COUNT`` neighbours behind each pointer."""
    total = tl.where(mask, 0.0, 0.0)
    for start in range(0, COUNT, 16):
        for step in tl.static_range(16):
            inside = mask & (start + step < COUNT)
            total += tl.load(partial_ptrs + (start + step), mask=inside, other=0.0)
    return total
