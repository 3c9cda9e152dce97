"""Two ways to decode E2M1 with E8M0 scales in fewer steps than the one that is used.

``e2m1_muls`` takes the stored words: a byte of two codes at the low end of each half, where one
mask isolates a code, one product moves its sign and its magnitude to their places, and one mask
keeps them. ``e2m1_paired`` takes words that were shuffled when they were packed (``shuffled``):
eight pairs of weights from two words of 32 bits by a shift and a mask each, but for two of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from samebits.formats.matrix import QuantizedMatrix
from samebits.ops._triton.decoding import scale_factors

_INTERPRETED = tl.constexpr(knobs.runtime.interpret)

# Columns (k, k + 2) and (k + 1, k + 3) of the word $2.
_MULS = tl.constexpr("""{
.reg .b32 u, v;
prmt.b32 u, $2, 0, 0x4140;
and.b32 v, u, 0x000F000F;
sub.u32 u, u, v;
mul.lo.u32 v, v, 0x1040;
mul.lo.u32 u, u, 0x0104;
and.b32 v, v, 0x81C081C0;
and.b32 u, u, 0x81C081C0;
mul.rn.bf16x2 $0, v, $3;
mul.rn.bf16x2 $1, u, $3;
}""")

# The pairs of 64 columns that a thread holds: four of the first 32 from $8, $9 times $10, four of
# the second times $11; see ``_PLACES``.
_PAIRED = tl.constexpr("""{
.reg .b32 u, v;
and.b32 u, $8, 0x81C081C0;
mul.rn.bf16x2 $0, u, $10;
shl.b32 u, $8, 3;
and.b32 u, u, 0x81C081C0;
mul.rn.bf16x2 $1, u, $10;
shf.r.wrap.b32 u, $8, $8, 3;
and.b32 u, u, 0x81C081C0;
mul.rn.bf16x2 $2, u, $10;
shl.b32 u, $8, 6;
shl.b32 v, $9, 4;
and.b32 u, u, 0x00C000C0;
lop3.b32 u, v, 0x81008100, u, 0xEA;
mul.rn.bf16x2 $3, u, $10;
and.b32 u, $9, 0x81C081C0;
mul.rn.bf16x2 $4, u, $11;
shl.b32 u, $9, 6;
and.b32 u, u, 0x81C081C0;
mul.rn.bf16x2 $5, u, $11;
shf.r.wrap.b32 u, $9, $9, 6;
and.b32 u, u, 0x81C081C0;
mul.rn.bf16x2 $6, u, $11;
shr.u32 u, $8, 7;
shl.b32 v, $9, 5;
and.b32 u, u, 0x00C000C0;
lop3.b32 u, v, 0x81008100, u, 0xEA;
mul.rn.bf16x2 $7, u, $11;
}""")

# For each of the eight pairs: (word, bit) of sign, 2, 1 and 1/2 of its number in the low half; the
# number of the high half has them 16 bits on, around the end.
_PLACES = (
    ((0, 15), (0, 8), (0, 7), (0, 6)),
    ((0, 12), (0, 5), (0, 4), (0, 3)),
    ((0, 18), (0, 11), (0, 10), (0, 9)),
    ((1, 11), (1, 4), (0, 1), (0, 0)),
    ((1, 15), (1, 8), (1, 7), (1, 6)),
    ((1, 9), (1, 2), (1, 1), (1, 0)),
    ((1, 21), (1, 14), (1, 13), (1, 12)),
    ((1, 10), (1, 3), (0, 14), (0, 13)),
)


def shuffled(matrix: QuantizedMatrix) -> Tensor:
    """Return MXFP4 values as ``e2m1_paired`` reads them, ``(E, N, K / 8)`` int32; 64 divides K.

    The words 2t and 2t + 1 of each 64 columns hold what thread t of four multiplies: of each 16
    columns the four from 4t on, as pairs of neighbours: ``x`` needs no exchange within a register.
    """
    if matrix.columns % 64:
        raise ValueError(f"K must be a multiple of 64, not {matrix.columns}")
    return torch.stack([_shuffled(values) for values in matrix.values])


def _shuffled(values: Tensor) -> Tensor:
    rows, groups = values.shape[0], values.shape[1] // 32
    packed = values.to(torch.int32)
    codes = torch.stack([packed & 15, packed >> 4], -1)
    # Half of a group of 64; instruction; thread; first or second pair; low or high half of it.
    codes = codes.view(rows, groups, 2, 2, 4, 2, 2)
    out = torch.zeros(rows, groups, 4, 2, dtype=torch.int32, device=values.device)
    for pair, places in enumerate(_PLACES):
        for high in range(2):
            code = codes[:, :, pair // 4, pair // 2 % 2, :, pair % 2, high]
            for bit, (word, place) in zip((3, 2, 1, 0), places, strict=True):
                out[..., word] |= (code >> bit & 1) << ((place + 16 * high) % 32)
    return out.view(rows, groups * 8)


@triton.jit
def _power_of(exponents):
    """Return the factor of numbers that are 2⁻¹²⁶ times as large, as a pair of bf16."""
    return (exponents + 126) * 0x00800080


@triton.jit
def rounded(pair, factor):
    """Return a pair of bf16 numbers times an fp32 factor, rounded once."""
    low = ((pair << 16).to(tl.float32, bitcast=True) * factor).to(tl.bfloat16)
    high = ((pair & 0xFFFF0000).to(tl.float32, bitcast=True) * factor).to(tl.bfloat16)
    low = low.to(tl.uint16, bitcast=True).to(tl.uint32)
    return low | (high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def _bit(y, z, WORD: tl.constexpr, PLACE: tl.constexpr, TO: tl.constexpr):
    word = z if WORD else y
    low = (word >> PLACE) & 1
    high = (word >> ((PLACE + 16) % 32)) & 1
    return (low << TO) | (high << (TO + 16))


@triton.jit
def _raw_pairs(y, z, PAIRS: tl.constexpr):
    """Return the bits of the eight pairs, each 2⁻¹²⁶ times as large; for the interpreter."""
    raw = ()
    for pair in tl.static_range(8):
        sign: tl.constexpr = PAIRS[pair][0]
        two: tl.constexpr = PAIRS[pair][1]
        one: tl.constexpr = PAIRS[pair][2]
        half: tl.constexpr = PAIRS[pair][3]
        value = _bit(y, z, sign[0], sign[1], 15) | _bit(y, z, two[0], two[1], 8)
        value = value | _bit(y, z, one[0], one[1], 7) | _bit(y, z, half[0], half[1], 6)
        raw = raw + (value,)  # noqa: RUF005
    return raw


_PAIRS = tl.constexpr(_PLACES)


@triton.jit
def e2m1_paired(y, z, first, second):
    """Return the eight bf16 pairs of two shuffled words; exponents up to 128."""
    if _INTERPRETED:
        raw = _raw_pairs(y, z, _PAIRS)
        found = ()
        for pair in tl.static_range(8):
            factor = scale_factors(first if pair < 4 else second, None, "e8m0")
            # Two exact products: a denormal fp32 factor would be flushed nowhere here.
            value = rounded(raw[pair], 8.507059173023462e37)
            found = found + (rounded(value, factor),)  # noqa: RUF005
        return found
    else:
        return tl.inline_asm_elementwise(
            _PAIRED,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=r,r,r,r,r",
            [y, z, _power_of(first), _power_of(second)],
            dtype=(tl.uint32,) * 8,
            is_pure=True,
            pack=1,
        )


@triton.jit
def e2m1_muls(words, exponents):
    """Return both bf16 pairs of each word of four E2M1; exponents up to 128."""
    if _INTERPRETED:
        u = (words & 0xFF) | ((words & 0xFF00) << 8)
        v = u & 0x000F000F
        factor = scale_factors(exponents, None, "e8m0")
        first = rounded((v * 0x1040) & 0x81C081C0, 8.507059173023462e37)
        second = rounded(((u - v) * 0x0104) & 0x81C081C0, 8.507059173023462e37)
        return rounded(first, factor), rounded(second, factor)
    else:
        return tl.inline_asm_elementwise(
            _MULS,
            "=&r,=r,r,r",
            [words, _power_of(exponents)],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
