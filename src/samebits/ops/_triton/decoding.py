"""Numbers of 4 and 8 bits as pairs of bf16 or fp16, four neighbours of the contraction at a time.

A word holds the weights of columns k, k + 1, k + 2, k + 3: four bytes of E4M3, or four E2M1 in 16
bits. It becomes two registers, columns (k, k + 2) and (k + 1, k + 3): with that order E2M1 takes
the fewest instructions, and ``samebits.ops._triton.quantized`` orders both operands alike. A weight
is ``D(fp32(value · scale))``, as in ``samebits.formats``; products with powers of two are exact, so
``e2m1_times_power`` multiplies in bf16, both columns at once.

In the interpreter the same numbers come from arithmetic.
"""

import triton
import triton.language as tl
from triton import knobs

# The interpreter has no PTX.
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)

# PTX that rounds two fp32 numbers to a pair of each dtype.
_ROUND = {"bf16": "cvt.rn.bf16x2.f32", "fp16": "cvt.rn.f16x2.f32"}

_E4M3 = """{{
.reg .b16 a, b;
.reg .b32 u, v;
.reg .f32 p, q, r, s;
mov.b32 {{a, b}}, $2;
cvt.rn.f16x2.e4m3x2 u, a;
cvt.rn.f16x2.e4m3x2 v, b;
mov.b32 {{a, b}}, u;
cvt.f32.f16 p, a;
cvt.f32.f16 q, b;
mov.b32 {{a, b}}, v;
cvt.f32.f16 r, a;
cvt.f32.f16 s, b;
mul.rn.f32 p, p, $3;
mul.rn.f32 q, q, $3;
mul.rn.f32 r, r, $3;
mul.rn.f32 s, s, $3;
{round} $0, r, p;
{round} $1, s, q;
}}"""
_E4M3_BF16 = tl.constexpr(_E4M3.format(round=_ROUND["bf16"]))
_E4M3_FP16 = tl.constexpr(_E4M3.format(round=_ROUND["fp16"]))

# The high and low bytes of bf16 numbers by E2M1 code, then the signs: a permute whose selector has
# its high bit set repeats the sign bit of the selected byte.
_E2M1 = """{{
.reg .b32 u, v, w;
.reg .f32 p, q, r, s;
and.b32 u, $2, 0x7777;
prmt.b32 v, 0xC0800000, 0xC0804000, u;
prmt.b32 u, 0x3F3F3F00, 0x40404040, u;
prmt.b32 w, 0x80808080, 0x80808080, $2;
shl.b32 w, w, 1;
lop3.b32 u, u, w, 0x80808080, 0xF8;
prmt.b32 w, v, u, 0x6240;
prmt.b32 v, v, u, 0x7351;
shl.b32 u, w, 16;
mov.b32 p, u;
and.b32 u, w, 0xFFFF0000;
mov.b32 q, u;
shl.b32 u, v, 16;
mov.b32 r, u;
and.b32 u, v, 0xFFFF0000;
mov.b32 s, u;
mul.rn.f32 p, p, $3;
mul.rn.f32 q, q, $3;
mul.rn.f32 r, r, $3;
mul.rn.f32 s, s, $3;
{round} $0, q, p;
{round} $1, s, r;
}}"""
_E2M1_BF16 = tl.constexpr(_E2M1.format(round=_ROUND["bf16"]))
_E2M1_FP16 = tl.constexpr(_E2M1.format(round=_ROUND["fp16"]))

# Exponent and mantissa at their places in bf16 (bits 8 … 6, a number 2⁻¹²⁶ times as large), and the
# sign at its own. Two words at once, in the halves of $4. The unit for integers is the busiest, and
# shifts to the left alone may go to another: each byte stands twice, so that nothing goes right.
_E2M1_TIMES_POWER = tl.constexpr("""{
.reg .b32 u, v, w;
prmt.b32 u, $4, 0, 0x1100;
shl.b32 v, u, 4;
shl.b32 w, u, 6;
and.b32 w, w, 0x01C001C0;
lop3.b32 w, v, 0x80008000, w, 0xEA;
mul.rn.bf16x2 $0, w, $5;
shl.b32 w, u, 2;
and.b32 w, w, 0x01C001C0;
lop3.b32 w, u, 0x80008000, w, 0xEA;
mul.rn.bf16x2 $2, w, $5;
prmt.b32 u, $4, 0, 0x3322;
shl.b32 v, u, 4;
shl.b32 w, u, 6;
and.b32 w, w, 0x01C001C0;
lop3.b32 w, v, 0x80008000, w, 0xEA;
mul.rn.bf16x2 $1, w, $6;
shl.b32 w, u, 2;
and.b32 w, w, 0x01C001C0;
lop3.b32 w, u, 0x80008000, w, 0xEA;
mul.rn.bf16x2 $3, w, $6;
}""")


@triton.jit
def scale_factors(scales, factor, SCALES: tl.constexpr):
    """Return the fp32 numbers that stored scales stand for; ``factor`` is the expert's, or None."""
    if SCALES == "e8m0":
        exponents = scales.to(tl.uint32)
        bits = tl.where(exponents == 0, 0x00400000, exponents << 23)
        scales = tl.where(exponents == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    elif SCALES == "e4m3":
        scales = scales.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if factor is not None:
        scales = scales * factor
    return scales


@triton.jit
def e2m1_numbers(codes):
    """Return the fp32 numbers of the E2M1 codes in the low four bits of ``codes``."""
    # As exponent and mantissa of fp32: a number 2⁻¹²⁶ times as large, 0.5 a denormal one.
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _pair(low, high, FP16: tl.constexpr):
    """Return a register of two fp32 numbers, rounded."""
    dtype: tl.constexpr = tl.float16 if FP16 else tl.bfloat16
    low = low.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
    return low | (high.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def _e4m3_number(words, place: tl.constexpr):
    byte = ((words >> (8 * place)) & 0xFF).to(tl.uint8)
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e4m3_times(words, scales, FP16: tl.constexpr):
    """Return both pairs of each uint32 word of four E4M3, times an fp32 scale."""
    if _INTERPRETED:
        first = _pair(_e4m3_number(words, 0) * scales, _e4m3_number(words, 2) * scales, FP16)
        second = _pair(_e4m3_number(words, 1) * scales, _e4m3_number(words, 3) * scales, FP16)
        return first, second
    else:
        return tl.inline_asm_elementwise(
            _E4M3_FP16 if FP16 else _E4M3_BF16,
            "=r,=r,r,f",
            [words, scales],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def e2m1_times(words, scales, FP16: tl.constexpr):
    """Return both pairs of each uint32 word of four E2M1, times an fp32 scale."""
    if _INTERPRETED:
        first = _pair(e2m1_numbers(words) * scales, e2m1_numbers(words >> 8) * scales, FP16)
        second = _pair(e2m1_numbers(words >> 4) * scales, e2m1_numbers(words >> 12) * scales, FP16)
        return first, second
    else:
        return tl.inline_asm_elementwise(
            _E2M1_FP16 if FP16 else _E2M1_BF16,
            "=r,=r,r,f",
            [words, scales],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def e2m1_times_power(words, exponents):
    """Return both bf16 pairs of each uint16 word, times ``2**(exponents - 127)``; up to 128."""
    if _INTERPRETED:
        return e2m1_times(words.to(tl.uint32), scale_factors(exponents, None, "e8m0"), False)
    else:
        power = (exponents + 126) * 0x00800080
        return tl.inline_asm_elementwise(
            _E2M1_TIMES_POWER,
            "=r,=r,=r,=r,r,r,r",
            [words, power],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=2,
        )
