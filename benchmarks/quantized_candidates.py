"""Candidates for the few-token kernels over MXFP4, beside the ones that are used.

``tune_e2m1.py`` compares their bits and times them. A candidate is a second
instance of ``samebits.ops.indirect_gemm.kernel`` whose contraction is the one of this file; its
tile, epilogue and launchers are those of the original. The ways to decode, by name:

``muls``, ``paired``
    See ``e2m1_ways``.
``rows``
    Many rows: rows are the first operand, weights are decoded as ``muls`` does, in their own order,
    and both operands of the asynchronous product lie in shared memory. Scales up to 2.
``nothing``, ``unscaled``
    No weights: what is left of the time without the decoding, and without the scales too.
"""

import importlib.util
import sys
from dataclasses import replace
from types import ModuleType

import torch
import triton
import triton.language as tl
from e2m1_ways import e2m1_muls, e2m1_paired, rounded, shuffled

from samebits.formats.matrix import QuantizedMatrix
from samebits.formats.weights import QuantizedWeights
from samebits.ops._triton.decoding import scale_factors
from samebits.ops._triton.operand import MatrixOperand, _descriptor, _near, stored_scales
from samebits.ops._triton.quantized import _dealt, _scales
from samebits.ops.indirect_gemm import kernel as used

_LARGEST_POWER = tl.constexpr(128)


@triton.jit
def _dealt_pairs(tile, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """``_dealt`` where the pairs of a thread are neighbours."""
    parts = tl.reshape(tile, (BLOCK, BLOCK_K // 32, 2, 4, 2, 2))
    return tl.reshape(tl.permute(parts, (0, 1, 4, 3, 2, 5)), (BLOCK, BLOCK_K))


@triton.jit
def _halves(pairs):
    """Return pairs of 32 bits as two bf16 numbers, on a new last axis."""
    return tl.join(pairs.to(tl.uint16), (pairs >> 16).to(tl.uint16)).to(tl.bfloat16, bitcast=True)


@triton.jit
def _spread(factors, BLOCK: tl.constexpr, GROUPS: tl.constexpr, TIMES: tl.constexpr):
    spread = tl.broadcast_to(factors[:, :, None], (BLOCK, GROUPS, TIMES))
    return tl.reshape(spread, (BLOCK, GROUPS * TIMES))


@triton.jit
def _both(words):
    """Return the exponents of the first and of the second 32 of each 64 columns."""
    return words.to(tl.uint32) & 0xFF, words.to(tl.uint32) >> 8


@triton.jit
def _weights(
    tile, scales, DECODING: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return ``[BLOCK, BLOCK_K]`` weights, dealt; ``WIDE``: whatever the scales are."""
    GROUPS: tl.constexpr = BLOCK_K // 32
    if DECODING == "paired":
        y, z = tl.split(tl.reshape(tile.to(tl.uint32, bitcast=True), (BLOCK, GROUPS // 2, 4, 2)))
        a, b = _both(scales)
        # Number by number where scales are wide: from those of scale 1.
        plain = tl.full(a.shape, 127, tl.uint32)
        shape: tl.constexpr = (BLOCK, GROUPS // 2, 4)
        p = e2m1_paired(
            y, z, tl.broadcast_to((plain if WIDE else a)[:, :, None], shape),
            tl.broadcast_to((plain if WIDE else b)[:, :, None], shape),
        )  # fmt: skip
        if WIDE:
            a = tl.broadcast_to(scale_factors(a, None, "e8m0")[:, :, None], shape)
            b = tl.broadcast_to(scale_factors(b, None, "e8m0")[:, :, None], shape)
            p = (
                rounded(p[0], a), rounded(p[1], a), rounded(p[2], a), rounded(p[3], a),
                rounded(p[4], b), rounded(p[5], b), rounded(p[6], b), rounded(p[7], b),
            )  # fmt: skip
        # Axes: row, group of 64, thread, half of the group, instruction, which pair, half of it.
        low = tl.join(tl.join(p[0], p[2]), tl.join(p[1], p[3]))
        high = tl.join(tl.join(p[4], p[6]), tl.join(p[5], p[7]))
        # ``join`` adds a last axis: (…, instruction, which, half of the group).
        both = _halves(tl.join(low, high))
        parts = tl.permute(both, (0, 1, 5, 4, 2, 3, 6))
        return tl.reshape(parts, (BLOCK, BLOCK_K))
    else:
        words = tile.to(tl.uint16, bitcast=True).to(tl.uint32)
        exponents = tl.full(scales.shape, 127, tl.uint32) if WIDE else scales.to(tl.uint32)
        if DECODING == "muls":
            first, second = e2m1_muls(words, _spread(exponents, BLOCK, GROUPS, 8))
        elif DECODING == "nothing":
            first = words * 0x10001 + _spread(exponents, BLOCK, GROUPS, 8)
            second = first
        else:
            first = words * 0x10001
            second = first
        if WIDE:
            factors = _spread(scale_factors(scales, None, "e8m0"), BLOCK, GROUPS, 8)
            first, second = rounded(first, factors), rounded(second, factors)
        parts = tl.reshape(_halves(tl.join(first, second)), (BLOCK, GROUPS, 2, 4, 2, 2))
        return tl.reshape(tl.permute(parts, (0, 1, 4, 3, 2, 5)), (BLOCK, BLOCK_K))


@triton.jit
def _largest(largest, scales, DECODING: tl.constexpr):
    return largest | scales if DECODING == "paired" else tl.maximum(largest, scales)


@triton.jit
def _sums(
    a_ptrs, live, words, scale_ptrs, stride, expert, column, distance, K,
    DECODING: tl.constexpr, NEAR: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``samebits.ops._triton.quantized._sums`` with another decoding."""
    WORD: tl.constexpr = 8 if DECODING == "paired" else 4
    # Columns of a word of scales.
    EACH: tl.constexpr = 64 if DECODING == "paired" else 32
    SCALED: tl.constexpr = DECODING != "unscaled"
    first = tl.zeros((BLOCK, BLOCK_R), tl.float32)
    second = tl.zeros((BLOCK, BLOCK_R), tl.float32)
    one, other = scale_ptrs
    now = _scales(one, stride, 0, K, EACH, NEAR, EACH, BLOCK_K)
    if PARTS == 2:
        now_other = _scales(other, stride, 0, K, EACH, NEAR, EACH, BLOCK_K)
    largest = now
    ks = tl.arange(0, BLOCK_K)
    for k in range(0, K, BLOCK_K):
        inside = live[:, None] & (k + ks < K)[None, :]
        a = tl.load(a_ptrs + (k + ks)[None, :], mask=inside, other=0.0)
        if DECODING == "paired":
            a = _dealt_pairs(a, BLOCK_R, BLOCK_K).T
        else:
            a = _dealt(a, BLOCK_R, BLOCK_K).T
        tile = words.load([expert, column, k // WORD]).reshape(BLOCK, BLOCK_K // WORD)
        weights = _weights(tile, now, DECODING, WIDE, BLOCK, BLOCK_K)
        first = tl.dot(weights, a, first)
        if SCALED:
            largest = _largest(largest, now, DECODING)
            now = _scales(one, stride, k + BLOCK_K, K, EACH, NEAR, EACH, BLOCK_K)
        if PARTS == 2:
            tile = words.load([expert, column + distance, k // WORD])
            tile = tile.reshape(BLOCK, BLOCK_K // WORD)
            weights = _weights(tile, now_other, DECODING, WIDE, BLOCK, BLOCK_K)
            second = tl.dot(weights, a, second)
            if SCALED:
                largest = _largest(largest, now_other, DECODING)
                now_other = _scales(other, stride, k + BLOCK_K, K, EACH, NEAR, EACH, BLOCK_K)
    return first, second, largest


@triton.jit
def _in_order(tile, scales, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return ``[BLOCK, BLOCK_K]`` weights in the order of columns."""
    words = tile.to(tl.uint16, bitcast=True).to(tl.uint32)
    spread = _spread(scales.to(tl.uint32), BLOCK, BLOCK_K // 32, 8)
    both = _halves(tl.join(*e2m1_muls(words, spread)))
    return tl.reshape(tl.permute(both, (0, 1, 3, 2)), (BLOCK, BLOCK_K))


@triton.jit
def _sums_of_rows(
    a_ptrs, live, words, scale_ptrs, stride, expert, column, distance, K,
    NEAR: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the sums of one or two parts, ``[BLOCK_R, BLOCK]``."""
    first = tl.zeros((BLOCK_R, BLOCK), tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK), tl.float32)
    one, other = scale_ptrs
    now = _scales(one, stride, 0, K, 32, NEAR, 32, BLOCK_K)
    if PARTS == 2:
        now_other = _scales(other, stride, 0, K, 32, NEAR, 32, BLOCK_K)
    ks = tl.arange(0, BLOCK_K)
    for k in range(0, K, BLOCK_K):
        inside = live[:, None] & (k + ks < K)[None, :]
        a = tl.load(a_ptrs + (k + ks)[None, :], mask=inside, other=0.0)
        tile = words.load([expert, column, k // 4]).reshape(BLOCK, BLOCK_K // 4)
        first = tl.dot(a, _in_order(tile, now, BLOCK, BLOCK_K).T, first)
        now = _scales(one, stride, k + BLOCK_K, K, 32, NEAR, 32, BLOCK_K)
        if PARTS == 2:
            tile = words.load([expert, column + distance, k // 4]).reshape(BLOCK, BLOCK_K // 4)
            second = tl.dot(a, _in_order(tile, now_other, BLOCK, BLOCK_K).T, second)
            now_other = _scales(other, stride, k + BLOCK_K, K, 32, NEAR, 32, BLOCK_K)
    return first, second


@triton.jit
def _contract(
    a_ptrs, live, words, scales_ptr, stride_se, stride_sn, stride_sk, global_ptr,  # noqa: ARG001
    expert, column, distance, N, K,
    FORMAT: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``samebits.ops._triton.quantized.contract_quantized`` for MXFP4 in bf16."""
    DECODING: tl.constexpr = FORMAT[0]
    NEAR: tl.constexpr = FORMAT[4]
    n = column + tl.arange(0, BLOCK)
    if DECODING == "paired":
        scales_ptr = scales_ptr.to(tl.pointer_type(tl.uint16))
        stride_se, stride_sn = stride_se // 2, stride_sn // 2
    scales_ptr += expert.to(tl.int64) * stride_se
    one = scales_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * stride_sn
    other = scales_ptr + tl.minimum(n + distance, N - 1).to(tl.int64)[:, None] * stride_sn
    scale_ptrs = (one, other)
    if DECODING == "rows":
        first, second = _sums_of_rows(
            a_ptrs, live, words, scale_ptrs, stride_sk, expert, column, distance, K,
            NEAR, PARTS, BLOCK_R, BLOCK, BLOCK_K,
        )  # fmt: skip
        if PARTS == 2:
            whole = tl.permute(tl.join(first, second), (0, 2, 1))
            return tl.reshape(whole, (BLOCK_R, 2 * BLOCK))
        else:
            return first
    first, second, largest = _sums(
        a_ptrs, live, words, scale_ptrs, stride_sk, expert, column, distance, K,
        DECODING, NEAR, False, PARTS, BLOCK_R, BLOCK, BLOCK_K,
    )  # fmt: skip
    if DECODING == "muls" or DECODING == "paired":
        if DECODING == "paired":
            # The highest bit of either exponent.
            wide = tl.max(largest.to(tl.int32) & 0x8080) > 0
        else:
            wide = tl.max(largest.to(tl.int32)) > _LARGEST_POWER
        if wide:
            first, second, largest = _sums(
                a_ptrs, live, words, scale_ptrs, stride_sk, expert, column, distance, K,
                DECODING, NEAR, True, PARTS, BLOCK_R, BLOCK, BLOCK_K,
            )  # fmt: skip
    if PARTS == 2:
        whole = tl.permute(tl.join(first, second), (1, 2, 0))
        return tl.reshape(whole, (BLOCK_R, 2 * BLOCK))
    else:
        return first.T


def stored_for(decoding: str, weights: QuantizedWeights) -> QuantizedWeights:
    """Return weights as a way to decode wants them stored."""
    if decoding != "paired":
        return weights

    def stored(matrix: QuantizedMatrix) -> QuantizedMatrix:
        return replace(matrix, values=shuffled(matrix).view(torch.uint8))

    return replace(weights, gate_up=stored(weights.gate_up), down=stored(weights.down))


def kernels(decoding: str) -> ModuleType:
    """Return ``samebits.ops.indirect_gemm.kernel`` with the contraction of this file."""
    name = f"candidate_{decoding}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, used.__file__)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)

    def operand(matrix: QuantizedMatrix, box: tuple[int, int]) -> MatrixOperand:
        words, each = matrix.values.view(torch.int16), 4
        if decoding == "paired":
            words, each = matrix.values.view(torch.int32), 8
        descriptor = _descriptor(words, box[0], box[1] // each, halves=False)
        scales = (stored_scales(matrix), *matrix.scales.stride(), None)
        near = _near(scales[0])
        kinds = (decoding, "e8m0", 1, 32, max(near // 2, 1) if decoding == "paired" else near)
        return MatrixOperand(descriptor, (0, 0, 0), True, False, scales, kinds)

    module.contract_quantized = _contract  # type: ignore[attr-defined]
    module.quantized_operand = operand  # type: ignore[attr-defined]
    return module
