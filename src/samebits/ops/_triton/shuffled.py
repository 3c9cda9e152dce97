"""Products of rows with one expert's ``mxfp4_shuffled`` matrix, upcast on the way.

The bits are those of ``samebits.ops._triton.product`` on the dequantised matrix, for the reasons
that ``samebits.ops._triton.quantized`` gives: an instruction has the same 16 neighbours of the
contraction, in another order among themselves. Here that order is made when weights are stored
(``samebits.formats.shuffled``): a thread finds the pairs that it multiplies in two words.

Each warp has weight rows of its own, as a matrix of a batch. Triton multiplies batches by
``mma.sync`` whatever the number of warps, so that four or eight share the rows of ``x``; without a
batch four would make asynchronous products of operands in registers, which may be wrong.
"""

import triton
import triton.language as tl
from triton import knobs

from samebits.ops._triton.shuffled_words import numbers_of, scaled_pairs

# The interpreter's product takes no bf16.
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)
# The highest bit of four E8M0 exponents: of scales from 2 on, and NaN.
_HIGH = tl.constexpr(0x80808080)


@triton.jit
def _whole(pairs, DEALT: tl.constexpr):
    """Return eight pairs (rows, groups, threads) as weights ``[rows, 64 · groups]``.

    ``DEALT``: in the order of the matrix unit's registers, not in that of columns.
    """
    first = tl.join(tl.join(pairs[0], pairs[2]), tl.join(pairs[1], pairs[3]))
    second = tl.join(tl.join(pairs[4], pairs[6]), tl.join(pairs[5], pairs[7]))
    # Rows, groups, threads, instruction of two, which pair, half of the 64 columns, half of a pair.
    parts = numbers_of(tl.join(first, second))
    rows: tl.constexpr = parts.shape[0]
    groups: tl.constexpr = parts.shape[1]
    if DEALT:
        parts = tl.permute(parts, (0, 1, 5, 4, 2, 3, 6))
    else:
        parts = tl.permute(parts, (0, 1, 5, 3, 2, 4, 6))
    return tl.reshape(parts, (rows, groups * 64))


@triton.jit
def _scale_word(ptrs, stride, word, known, K):
    """Load the exponents of 128 columns, four in a word; zeros where there are no such columns."""
    found = tl.load(ptrs + word * stride, mask=known & (word * 128 < K), other=0)
    # Bytes past the last column have no meaning.
    there = tl.where(word * 128 + 64 < K, 0xFFFFFFFF, 0xFFFF).to(tl.uint32)
    return found.to(tl.uint32, bitcast=True) & there


@triton.jit
def _exponents(ptrs, stride, k, known, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return ``[BLOCK, BLOCK_K / 64]``: in the low 16 bits two exponents; and all of a row ORed."""
    word = k // 128
    a = _scale_word(ptrs, stride, word, known, K)
    if BLOCK_K == 64:
        return (a >> (k % 128 // 64 * 16)).expand_dims(1), a
    elif BLOCK_K == 128:
        return tl.join(a, a >> 16), a
    elif BLOCK_K == 256:
        b = _scale_word(ptrs, stride, word + 1, known, K)
        whole = tl.permute(tl.join(tl.join(a, a >> 16), tl.join(b, b >> 16)), (0, 2, 1))
        return tl.reshape(whole, (BLOCK, 4)), a | b
    else:
        tl.static_assert(BLOCK_K == 512)
        b = _scale_word(ptrs, stride, word + 1, known, K)
        c = _scale_word(ptrs, stride, word + 2, known, K)
        d = _scale_word(ptrs, stride, word + 3, known, K)
        first = tl.join(tl.join(a, a >> 16), tl.join(b, b >> 16))
        second = tl.join(tl.join(c, c >> 16), tl.join(d, d >> 16))
        whole = tl.permute(tl.join(first, second), (0, 3, 2, 1))
        return tl.reshape(whole, (BLOCK, 8)), a | b | c | d


@triton.jit
def _product(a, b, sums):
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums)
    else:
        return tl.dot(a, b, sums)


@triton.jit
def _dot(weights, a, sums, WARPS: tl.constexpr):
    """Add the product of a part; ``sums`` is ``[WARPS, BLOCK / WARPS, BLOCK_R]``."""
    each: tl.constexpr = weights.shape[0] // WARPS
    columns: tl.constexpr = weights.shape[1]
    rows: tl.constexpr = a.shape[1]
    weights = tl.reshape(weights, (WARPS, each, columns))
    a = tl.broadcast_to(a[None], (WARPS, columns, rows))
    return _product(weights, a, sums)


@triton.jit
def _weights(
    words, exponents, PRODUCTS: tl.constexpr, DEALT: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Return the weights of a tile of words."""
    rows: tl.constexpr = words.shape[0]
    groups: tl.constexpr = words.shape[1] // 8
    words = tl.reshape(words.to(tl.uint32, bitcast=True), (rows, groups, 4, 2))
    y, z = tl.split(words)
    exponents = tl.broadcast_to(exponents[:, :, None], (rows, groups, 4))
    return _whole(scaled_pairs(y, z, exponents, PRODUCTS), DEALT).to(DTYPE)


@triton.jit
def _sums(
    a_ptrs, live, words, one, one_known, other, other_known, stride, expert, column, distance, K,
    WARPS: tl.constexpr, PRODUCTS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the sums of one or two parts, ``[WARPS, BLOCK / WARPS, BLOCK_R]``; exponents ORed."""
    DTYPE: tl.constexpr = a_ptrs.dtype.element_ty
    first = tl.zeros((WARPS, BLOCK // WARPS, BLOCK_R), tl.float32)
    second = tl.zeros((WARPS, BLOCK // WARPS, BLOCK_R), tl.float32)
    ored = tl.zeros((BLOCK,), tl.uint32)
    # Of 16 columns all rows, then the next 16: eight rows of four threads read neighbours.
    ks = (tl.arange(0, BLOCK_K // 16) * 16)[:, None, None] + tl.arange(0, 16)[None, None, :]
    for k in range(0, K, BLOCK_K):
        inside = live[None, :, None] & (k + ks < K)
        a = tl.load(a_ptrs[None] + (k + ks), mask=inside, other=0.0)
        a = tl.reshape(a, (BLOCK_K // 32, 2, BLOCK_R, 4, 2, 2))
        # Rows, groups of 32, which pair, thread, instruction, half of the pair.
        a = tl.reshape(tl.permute(a, (2, 0, 4, 3, 1, 5)), (BLOCK_R, BLOCK_K)).T
        tile = words.load([expert, column, k // 8]).reshape(BLOCK, BLOCK_K // 8)
        exponents, every = _exponents(one, stride, k, one_known, K, BLOCK, BLOCK_K)
        first = _dot(_weights(tile, exponents, PRODUCTS, True, DTYPE), a, first, WARPS)
        if PRODUCTS == "one":
            ored |= every
        if PARTS == 2:
            tile = words.load([expert, column + distance, k // 8]).reshape(BLOCK, BLOCK_K // 8)
            exponents, every = _exponents(other, stride, k, other_known, K, BLOCK, BLOCK_K)
            second = _dot(_weights(tile, exponents, PRODUCTS, True, DTYPE), a, second, WARPS)
            if PRODUCTS == "one":
                ored |= every
    return first, second, ored


@triton.jit
def _sums_of_rows(
    a_ptrs, live, words, one, one_known, other, other_known, stride, expert, column, distance, K,
    PRODUCTS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the sums of one or two parts, ``[BLOCK_R, BLOCK]``; exponents ORed.

    Weights are decoded into shared memory: both operands of the asynchronous product lie there.
    """
    DTYPE: tl.constexpr = a_ptrs.dtype.element_ty
    first = tl.zeros((BLOCK_R, BLOCK), tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK), tl.float32)
    ored = tl.zeros((BLOCK,), tl.uint32)
    ks = tl.arange(0, BLOCK_K)
    for k in range(0, K, BLOCK_K):
        inside = live[:, None] & (k + ks < K)[None, :]
        a = tl.load(a_ptrs + (k + ks)[None, :], mask=inside, other=0.0)
        tile = words.load([expert, column, k // 8]).reshape(BLOCK, BLOCK_K // 8)
        exponents, every = _exponents(one, stride, k, one_known, K, BLOCK, BLOCK_K)
        weights = _weights(tile, exponents, PRODUCTS, False, DTYPE)
        first = _product(a, weights.T, first)
        if PRODUCTS == "one":
            ored |= every
        if PARTS == 2:
            tile = words.load([expert, column + distance, k // 8]).reshape(BLOCK, BLOCK_K // 8)
            exponents, every = _exponents(other, stride, k, other_known, K, BLOCK, BLOCK_K)
            weights = _weights(tile, exponents, PRODUCTS, False, DTYPE)
            second = _product(a, weights.T, second)
            if PRODUCTS == "one":
                ored |= every
    return first, second, ored


@triton.jit
def _contract_rows(
    a_ptrs, live, words, one, one_known, other, other_known, stride, expert, column, distance, K,
    PARTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``contract_shuffled`` of many rows, which are the first operand."""
    first, second, ored = _sums_of_rows(
        a_ptrs, live, words, one, one_known, other, other_known, stride,
        expert, column, distance, K, "one", PARTS, BLOCK_R, BLOCK, BLOCK_K,
    )  # fmt: skip
    if tl.max(((ored & _HIGH) != 0).to(tl.int32)) > 0:
        first, second, ored = _sums_of_rows(
            a_ptrs, live, words, one, one_known, other, other_known, stride,
            expert, column, distance, K, "two", PARTS, BLOCK_R, BLOCK, BLOCK_K,
        )  # fmt: skip
    if PARTS == 2:
        return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (BLOCK_R, 2 * BLOCK))
    else:
        return first


@triton.jit
def _contract_warps(
    a_ptrs, live, words, one, one_known, other, other_known, stride, expert, column, distance, K,
    WARPS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``contract_shuffled`` of few rows, which every warp multiplies with weights of its own."""
    first, second, ored = _sums(
        a_ptrs, live, words, one, one_known, other, other_known, stride,
        expert, column, distance, K, WARPS, "one", PARTS, BLOCK_R, BLOCK, BLOCK_K,
    )  # fmt: skip
    # Scales from 2 on, and NaN.
    if tl.max(((ored & _HIGH) != 0).to(tl.int32)) > 0:
        first, second, ored = _sums(
            a_ptrs, live, words, one, one_known, other, other_known, stride,
            expert, column, distance, K, WARPS, "two", PARTS, BLOCK_R, BLOCK, BLOCK_K,
        )  # fmt: skip
    first = tl.reshape(first, (BLOCK, BLOCK_R))
    if PARTS == 2:
        second = tl.reshape(second, (BLOCK, BLOCK_R))
        whole = tl.permute(tl.join(first, second), (1, 2, 0))
        return tl.reshape(whole, (BLOCK_R, 2 * BLOCK))
    else:
        return first.T


@triton.jit
def contract_shuffled(
    a_ptrs, live, words, scales_ptr, stride_se, stride_sn, stride_sk,
    expert, column, distance, N, K,
    WARPS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``samebits.ops._triton.quantized.contract_quantized`` of an ``mxfp4_shuffled`` matrix.

    Args:
        words: Descriptor of the values, (E, N, K / 8) words of eight columns.
        scales_ptr: Words of four scales, (E, ⌈K/128⌉, N), with strides for E, N and ⌈K/128⌉.
        WARPS: Those of the launch; each has ``BLOCK / WARPS`` rows, a multiple of 16. 0 where rows
            are the first operand, and four warps or more share a product.
    """
    scales_ptr += expert.to(tl.int64) * stride_se
    n = column + tl.arange(0, BLOCK)
    one = scales_ptr + n * stride_sn
    one_known = n < N
    n += distance
    other = scales_ptr + n * stride_sn
    other_known = n < N
    if WARPS == 0:
        return _contract_rows(
            a_ptrs, live, words, one, one_known, other, other_known, stride_sk,
            expert, column, distance, K, PARTS, BLOCK_R, BLOCK, BLOCK_K,
        )  # fmt: skip
    else:
        return _contract_warps(
            a_ptrs, live, words, one, one_known, other, other_known, stride_sk,
            expert, column, distance, K, WARPS, PARTS, BLOCK_R, BLOCK, BLOCK_K,
        )  # fmt: skip
