"""One pass over quantised matrices at the speed of a copy; see ``samebits.ops.dequantize``."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from samebits.formats.matrix import QuantizedMatrix
from samebits.ops._triton.decoding import (
    e2m1_numbers,
    e2m1_times,
    e2m1_times_power,
    scale_factors,
)
from samebits.ops._triton.launch import recordable
from samebits.ops._triton.operand import stored_scales
from samebits.ops._triton.shuffled_words import numbers_of, scaled_pairs
from samebits.ops.dequantize.tuning import Config, heuristic

# The largest E8M0 exponent that ``e2m1_times_power`` takes.
LARGEST_POWER = tl.constexpr(128)


@recordable
@triton.jit(do_not_specialize=["stride_se", "stride_sn"])
def _dequantize_kernel(
    values_ptr, stride_ve, stride_vn, stride_vk,
    scales_ptr, stride_se, stride_sn, stride_sk, global_ptr, offsets_ptr,
    w_ptr, N, K,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    VALUES: tl.constexpr = FORMAT[0]
    SCALES: tl.constexpr = FORMAT[1]
    SCALE_ROWS: tl.constexpr = FORMAT[2]
    SCALE_COLUMNS: tl.constexpr = FORMAT[3]
    expert = tl.program_id(1)
    if offsets_ptr is not None:
        if tl.load(offsets_ptr + expert) == tl.load(offsets_ptr + expert + 1):
            return
    column_blocks = tl.cdiv(K, BLOCK_K)
    n = (tl.program_id(0) // column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    first = tl.program_id(0) % column_blocks * BLOCK_K
    known = (n < N)[:, None]
    e = expert.to(tl.int64)
    row_ptrs = values_ptr + e * stride_ve + n[:, None] * stride_vn
    k = first + tl.arange(0, BLOCK_K)
    if VALUES == "e4m3":
        numbers = tl.load(
            row_ptrs + k[None, :].to(tl.int64) * stride_vk, mask=known & (k < K)[None, :]
        )
        numbers = numbers.to(tl.float32)
    else:
        byte = first // 2 + tl.arange(0, BLOCK_K // 2)
        inside = known & (byte < tl.cdiv(K, 2))[None, :]
        packed = tl.load(row_ptrs + byte[None, :].to(tl.int64) * stride_vk, mask=inside, other=0)
        packed = packed.to(tl.uint32)
        numbers = tl.join(e2m1_numbers(packed & 15), e2m1_numbers(packed >> 4))
        numbers = tl.reshape(numbers, (BLOCK_N, BLOCK_K))
    if GROUP == SCALE_COLUMNS:
        column = first // SCALE_COLUMNS + tl.arange(0, BLOCK_K // GROUP)
    else:
        column = (first + tl.arange(0, BLOCK_K // GROUP) * GROUP) // SCALE_COLUMNS
    scale_ptrs = scales_ptr + e * stride_se + (n // SCALE_ROWS)[:, None] * stride_sn
    inside = known & (column < tl.cdiv(K, SCALE_COLUMNS))[None, :]
    scales = tl.load(scale_ptrs + column[None, :].to(tl.int64) * stride_sk, mask=inside, other=0)
    factor = None
    if global_ptr is not None:
        factor = tl.load(global_ptr + expert)
    scales = scale_factors(scales, factor, SCALES)
    spread = tl.broadcast_to(scales[:, :, None], (BLOCK_N, BLOCK_K // GROUP, GROUP))
    w = (numbers * tl.reshape(spread, (BLOCK_N, BLOCK_K))).to(w_ptr.dtype.element_ty)
    w_ptrs = w_ptr + (e * N + n)[:, None] * K + k[None, :]
    tl.store(w_ptrs, w, mask=known & (k < K)[None, :])


@triton.jit
def _spread(factors, BLOCK_N: tl.constexpr, WORDS: tl.constexpr):
    """Return what belongs to each block for each half of its words."""
    GROUPS: tl.constexpr = factors.shape[1]
    spread = tl.broadcast_to(factors[:, :, None, None], (BLOCK_N, GROUPS, WORDS, 2))
    return tl.reshape(spread, (BLOCK_N, GROUPS * WORDS, 2))


@recordable
@triton.jit(do_not_specialize=["stride_se", "stride_sn"])
def _dequantize_words_kernel(
    words_ptr, stride_we, stride_wn,
    scales_ptr, stride_se, stride_sn, stride_sk, global_ptr, offsets_ptr,
    w_ptr, N, K,
    SCALES: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """E2M1 by words of eight columns: a thread loads four bytes and stores what they make."""
    expert = tl.program_id(1)
    if offsets_ptr is not None:
        if tl.load(offsets_ptr + expert) == tl.load(offsets_ptr + expert + 1):
            return
    dtype = w_ptr.dtype.element_ty
    FP16: tl.constexpr = dtype == tl.float16
    column_blocks = tl.cdiv(K, BLOCK_K)
    n = (tl.program_id(0) // column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    first = tl.program_id(0) % column_blocks * BLOCK_K
    known = (n < N)[:, None]
    e = expert.to(tl.int64)
    word = first // 8 + tl.arange(0, BLOCK_K // 8)
    inside = known & (word < K // 8)[None, :]
    places = words_ptr + e * stride_we + (n * stride_wn)[:, None] + word[None, :]
    # A thread stores what it loads: said to be less aligned, or wider loads would change hands.
    words = tl.load(tl.multiple_of(places, [4, 4]), mask=inside, other=0)
    words = words.to(tl.uint32, bitcast=True)
    GROUPS: tl.constexpr = BLOCK_K // SCALE_COLUMNS
    WORDS: tl.constexpr = SCALE_COLUMNS // 8
    column = first // SCALE_COLUMNS + tl.arange(0, GROUPS)
    there = known & (column < tl.cdiv(K, SCALE_COLUMNS))[None, :]
    column = column.to(tl.int64) * stride_sk
    scale_ptrs = scales_ptr + e * stride_se + (n * stride_sn)[:, None] + column[None, :]
    factor = None
    if global_ptr is not None:
        factor = tl.load(global_ptr + expert)
    scales = tl.load(scale_ptrs, mask=there, other=0)
    halves = tl.join(words.to(tl.uint16), (words >> 16).to(tl.uint16))
    # Products of two bf16 at once came with sm_90.
    if SCALES == "e8m0" and dtype == tl.bfloat16 and cuda_capability_geq(9, 0):
        pairs, others = e2m1_times_power(halves, _spread(scales.to(tl.uint32), BLOCK_N, WORDS))
        if tl.max(scales.to(tl.int32)) > LARGEST_POWER:
            factors = scale_factors(scales, factor, SCALES)
            pairs, others = e2m1_times(
                halves.to(tl.uint32), _spread(factors, BLOCK_N, WORDS), False
            )  # fmt: skip
    else:
        factors = scale_factors(scales, factor, SCALES)
        pairs, others = e2m1_times(halves.to(tl.uint32), _spread(factors, BLOCK_N, WORDS), FP16)
    # Columns k and k + 2 of four, and k + 1 and k + 3.
    pairs = tl.join(pairs, others)
    parts = tl.join(pairs.to(tl.uint16), (pairs >> 16).to(tl.uint16)).to(dtype, bitcast=True)
    w = tl.reshape(tl.permute(parts, (0, 1, 2, 4, 3)), (BLOCK_N, BLOCK_K))
    k = first + tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + (e * N + n)[:, None] * K + k[None, :]
    tl.store(w_ptrs, w, mask=known & (k < K)[None, :])


@recordable
@triton.jit(do_not_specialize=["stride_se", "stride_sk"])
def _dequantize_shuffled_kernel(
    words_ptr, stride_we, stride_wn, scales_ptr, stride_se, stride_sn, stride_sk, offsets_ptr,
    w_ptr, N, K,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``mxfp4_shuffled``: a thread makes 16 of 64 columns, and stores four neighbours at once."""
    expert = tl.program_id(1)
    if offsets_ptr is not None:
        if tl.load(offsets_ptr + expert) == tl.load(offsets_ptr + expert + 1):
            return
    column_blocks = tl.cdiv(K, BLOCK_K)
    # Neighbours in the first dimension are neighbours in memory, and threads of a warp.
    n = (tl.program_id(0) // column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[None, :]
    place = (
        tl.program_id(0) % column_blocks * (BLOCK_K // 16) + tl.arange(0, BLOCK_K // 16)[:, None]
    )
    known = (n < N) & (place < K // 16)
    e = expert.to(tl.int64)
    places = words_ptr + e * stride_we + n * stride_wn + place * 2
    y = tl.load(places, mask=known, other=0).to(tl.uint32, bitcast=True)
    z = tl.load(places + 1, mask=known, other=0).to(tl.uint32, bitcast=True)
    group = place // 4
    scale_ptrs = scales_ptr + e * stride_se + n * stride_sn
    scale_ptrs += (group // 2).to(tl.int64) * stride_sk + group % 2
    exponents = tl.load(scale_ptrs, mask=known, other=0).to(tl.uint32)
    PRODUCTS: tl.constexpr = "two" if cuda_capability_geq(9, 0) else "fp32"
    pairs = scaled_pairs(y, z, exponents, PRODUCTS)
    w_ptrs = w_ptr + (e * N + n) * K + group * 64 + place % 4 * 4
    w_ptrs = w_ptrs[:, :, None] + tl.arange(0, 4)[None, None, :]
    for part in tl.static_range(4):
        both = numbers_of(tl.join(pairs[2 * part], pairs[2 * part + 1]))
        four = tl.reshape(both, (BLOCK_K // 16, BLOCK_N, 4)).to(w_ptr.dtype.element_ty)
        tl.store(w_ptrs + 16 * part, four, mask=known[:, :, None])


def launch_dequantize(
    matrix: QuantizedMatrix,
    dtype: torch.dtype,
    offsets: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Return ``(E, N, K)`` in ``dtype``, contiguous.

    Args:
        matrix: Quantised matrices, any strides.
        dtype: bf16, fp16 or fp32.
        offsets: ``(E + 1,)``: experts without rows stay unwritten. None writes all.
        config: Tile; None takes that of ``tuning.heuristic``.

    Determinism: elementwise; the same bits for every config.
    """
    experts, rows, columns = matrix.shape
    values, held = matrix.values, matrix.format
    w = torch.empty(matrix.shape, dtype=dtype, device=values.device)
    if w.numel() == 0:
        return w
    config = heuristic(columns) if config is None else config
    # The largest power of two of neighbours that share a scale, whatever the tile's first column.
    group = min(held.columns & -held.columns, config.block_k)
    blocks = triton.cdiv(rows, config.block_n) * triton.cdiv(columns, config.block_k)
    if held.shuffled:
        words, scales = values.contiguous().view(torch.int32), matrix.scales.contiguous()
        halves = scales.view(torch.int16)
        _dequantize_shuffled_kernel[(blocks, experts)](
            words, *words.stride()[:2],
            halves, halves.stride(0), halves.stride(2), halves.stride(1), offsets,
            w, rows, columns, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            num_warps=config.num_warps, enable_fp_fusion=False,
        )  # fmt: skip
        return w
    words = _words_of_eight(matrix)
    if words is not None and dtype in (torch.bfloat16, torch.float16):
        _dequantize_words_kernel[(blocks, experts)](
            words, *words.stride()[:2],
            stored_scales(matrix), *matrix.scales.stride(), matrix.global_scale, offsets,
            w, rows, columns,
            SCALES=held.scales, SCALE_COLUMNS=held.columns,
            BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            num_warps=config.num_warps, enable_fp_fusion=False,
        )  # fmt: skip
        return w
    _dequantize_kernel[(blocks, experts)](
        values, *values.stride(),
        stored_scales(matrix), *matrix.scales.stride(), matrix.global_scale, offsets,
        w, rows, columns,
        FORMAT=(held.values, held.scales, held.rows, held.columns),
        GROUP=group, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        num_warps=config.num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return w


def _words_of_eight(matrix: QuantizedMatrix) -> Tensor | None:
    """Return E2M1 values as (E, N, K / 8) int32 words, or None where they are none."""
    values = matrix.values
    if matrix.format.values != "e2m1" or matrix.columns % 8 or values.stride(2) != 1:
        return None
    if values.data_ptr() % 4 or any(stride % 4 for stride in values.stride()[:2]):
        return None
    return values.view(torch.int32)
