"""Rows of a tile in 8 bits: the scale of each block, and the codes of its numbers.

The bits are those of ``samebits.formats.packing``. E4M3 codes come from integer arithmetic before
sm_90, where Triton has no conversion or one that rounds to fp16 first, and in the interpreter;
otherwise from the hardware. Both have one answer for every number: nearest, ties to even,
saturating, and 0x7F for NaN.
"""

import triton
import triton.language as tl
from triton import knobs
from triton.language.target_info import cuda_capability_geq

from samebits.ops._triton.decoding import scale_factors

# The interpreter's conversions to E4M3 round otherwise.
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def encode_e4m3(numbers):
    """Return the uint8 codes of fp32 numbers, which must not be constants.

    The assembler of CUDA 12.8 (Triton 3.6.0) merges a register that nothing wrote into the codes of
    two zeros that it knows when it compiles.
    """
    if not _INTERPRETED and cuda_capability_geq(9, 0):
        codes = numbers.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = numbers.to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Three bits of the mantissa stay, and the exponent's bias is 7 instead of 127.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        # Below 2**-6, multiples of 2**-9, to which the sum with 2**14 is rounded.
        small = (tl.abs(numbers) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        codes = tl.minimum(tl.where(size < 0x3C800000, small, normal), 0x7E)
        codes = (codes | ((bits >> 24) & 0x80)).to(tl.uint8)
    return tl.where(numbers != numbers, tl.full(numbers.shape, 0x7F, tl.uint8), codes)


@triton.jit
def decode_e4m3(codes):
    """Return the fp32 numbers of uint8 codes."""
    bits = codes.to(tl.uint32)
    # As exponent and mantissa of fp32: a number 2**-120 times as large.
    size = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
    numbers = size.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), numbers)


@triton.jit
def scales_of(largest, RULE: tl.constexpr):
    """Return the stored scales of blocks whose largest finite magnitudes are ``largest``, fp32.

    ``RULE`` is "fp32", or for E8M0 "floor" or "round_up".
    """
    if RULE == "fp32":
        scales = tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32))
        # At least the smallest normal number.
        scales = tl.maximum(scales, 1.1754943508222875e-38)
        return tl.where(largest == 0.0, 1.0, scales)
    else:
        bits = largest.to(tl.int32, bitcast=True)
        exponents = (bits >> 23) - 8
        if RULE == "round_up":
            # Above 448 = 1.75 * 2**8.
            exponents += ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        exponents = tl.maximum(exponents, 0)
        return tl.where(bits == 0, 127, exponents).to(tl.uint8)


@triton.jit
def _spread(blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Return one number for each column of ``[ROWS, COLUMNS // GROUP]`` blocks."""
    wide = tl.broadcast_to(blocks[:, :, None], (ROWS, COLUMNS // GROUP, GROUP))
    return tl.reshape(wide, (ROWS, COLUMNS))


@triton.jit
def quantize_tile(
    numbers, RULE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return the codes ``[ROWS, COLUMNS]`` of fp32 numbers and the scale of each ``GROUP``."""
    finite = tl.abs(numbers) < float("inf")
    sizes = tl.reshape(tl.where(finite, tl.abs(numbers), 0.0), (ROWS, COLUMNS // GROUP, GROUP))
    scales = scales_of(tl.max(sizes, 2), RULE)
    if RULE == "fp32":
        scaled = tl.div_rn(numbers, _spread(scales, ROWS, COLUMNS, GROUP))
    else:
        # By the power of two with the opposite exponent: exact, and never a denormal number.
        inverse = ((254 - scales.to(tl.int32)) << 23).to(tl.float32, bitcast=True)
        scaled = numbers * _spread(inverse, ROWS, COLUMNS, GROUP)
    return encode_e4m3(tl.where(finite, scaled, float("nan"))), scales


@triton.jit
def dequantize_tile(
    codes,
    scales,
    RULE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the fp32 numbers that codes and scales of ``quantize_tile`` stand for."""
    factors = scale_factors(scales, None, "fp32" if RULE == "fp32" else "e8m0")
    return decode_e4m3(codes) * _spread(factors, ROWS, COLUMNS, GROUP)
