"""The words of ``mxfp4_shuffled`` as pairs of bf16; see ``samebits.formats.shuffled``.

A pair comes out of its words by a shift and a mask or two, 2⁻¹²⁶ times as large, and one product
with a power of two makes both numbers exactly.
"""

import triton
import triton.language as tl
from triton import knobs

from samebits.ops._triton.decoding import scale_factors

# The interpreter has no PTX.
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)
# 2¹²⁶: numbers come out of their words 2⁻¹²⁶ times as large.
_UP = tl.constexpr(8.507059173023462e37)


@triton.jit
def _times(pairs, factors):
    """Return pairs of bf16 times pairs of bf16, each rounded once."""
    if _INTERPRETED:
        return _rounded(pairs, (factors << 16).to(tl.float32, bitcast=True))
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;",
            "=r,r,r",
            [pairs, factors],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _rounded(pairs, factors):
    """Return pairs of bf16 times an fp32 factor, each rounded once."""
    low = ((pairs << 16).to(tl.float32, bitcast=True) * factors).to(tl.bfloat16)
    high = ((pairs & 0xFFFF0000).to(tl.float32, bitcast=True) * factors).to(tl.bfloat16)
    low = low.to(tl.uint16, bitcast=True).to(tl.uint32)
    return low | (high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def _raw_pairs(y, z):
    """Return the eight pairs of bf16 of two words, 2⁻¹²⁶ times as large."""
    both: tl.constexpr = 0x81C081C0
    low: tl.constexpr = 0x00C000C0
    high: tl.constexpr = 0x81008100
    return (
        y & both,
        (y << 3) & both,
        ((y >> 3) | (y << 29)) & both,
        ((y << 6) & low) | ((z << 4) & high),
        z & both,
        (z << 6) & both,
        ((z >> 6) | (z << 26)) & both,
        ((y >> 7) & low) | ((z << 5) & high),
    )


@triton.jit
def numbers_of(pairs):
    """Return pairs as two bf16 numbers, on a new last axis."""
    return tl.join(pairs.to(tl.uint16), (pairs >> 16).to(tl.uint16)).to(tl.bfloat16, bitcast=True)


@triton.jit
def _power(exponents):
    """Return ``2**(exponents - 127)`` of numbers 2⁻¹²⁶ times as large, as a pair of bf16."""
    return (exponents & 0xFF) * 0x00800080 + 126 * 0x00800080


@triton.jit
def _any_power(exponents):
    """Return the scales that all exponents stand for, as pairs of bf16."""
    exponents = exponents & 0xFF
    bits = tl.where(exponents == 0, 0x00400040, exponents * 0x00800080)
    return tl.where(exponents == 255, 0x7FC07FC0, bits)


@triton.jit
def _twice(pairs, factors):
    return _times(_times(pairs, tl.full(pairs.shape, 0x7E807E80, tl.uint32)), factors)


@triton.jit
def _rounded_twice(pairs, factors):
    # No fp32 holds the product of both factors.
    return _rounded(_rounded(pairs, _UP), factors)


@triton.jit
def scaled_pairs(y, z, exponents, PRODUCTS: tl.constexpr):
    """Return eight pairs of bf16 of each two words, times their scales: four of each exponent.

    Every product is exact. ``PRODUCTS``: "one", of exponents up to 128; "two", of all; "fp32", the
    same before sm_90, which multiplies no pairs.
    """
    p = _raw_pairs(y, z)
    if PRODUCTS == "one":
        a = _power(exponents)
        b = _power(exponents >> 8)
        return (
            _times(p[0], a), _times(p[1], a), _times(p[2], a), _times(p[3], a),
            _times(p[4], b), _times(p[5], b), _times(p[6], b), _times(p[7], b),
        )  # fmt: skip
    elif PRODUCTS == "two":
        a = _any_power(exponents)
        b = _any_power(exponents >> 8)
        return (
            _twice(p[0], a), _twice(p[1], a), _twice(p[2], a), _twice(p[3], a),
            _twice(p[4], b), _twice(p[5], b), _twice(p[6], b), _twice(p[7], b),
        )  # fmt: skip
    else:
        a = scale_factors(exponents & 0xFF, None, "e8m0")
        b = scale_factors((exponents >> 8) & 0xFF, None, "e8m0")
        return (
            _rounded_twice(p[0], a), _rounded_twice(p[1], a),
            _rounded_twice(p[2], a), _rounded_twice(p[3], a),
            _rounded_twice(p[4], b), _rounded_twice(p[5], b),
            _rounded_twice(p[6], b), _rounded_twice(p[7], b),
        )  # fmt: skip
