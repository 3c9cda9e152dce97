"""Scalar functions on fp32 tiles, written out so that every kernel computes the same bits.

Kernels that move bytes at copy speed have some 40 instructions for an element of h: these functions
avoid what guards operands that cannot occur. Everything runs in the interpreter, libdevice
does not.
"""

import triton
import triton.language as tl
from triton import knobs

if knobs.runtime.interpret:

    @triton.jit
    def _reciprocal(x):
        return 1.0 / x

else:

    @triton.jit
    def _reciprocal(x):
        """Return ``1 / x`` within one unit in the last place; |x| in [2⁻¹²⁶, 2¹²⁶] or infinite."""
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def sigmoid(x):
    """Return ``1 / (1 + exp(-x))``: the bits of that expression in 6 instructions instead of 15.

    exp2 may flush a denormal, since 1 is added; a quarter of the sum and of its reciprocal are
    exact, and keep the reciprocal from being denormal where the sigmoid is.
    """
    decay = tl.exp2(x * -1.4426950408889634)
    return 0.25 * _reciprocal(0.25 * (1.0 + decay))


@triton.jit
def _exp_fp32(x):
    """Return ``exp(x)`` within two units in the last place; NaN stays NaN.

    With x = n ln 2 + r and |r| <= ln 2 / 2: 2ⁿ (1 + r + r² P(r)), P fitted to the least error.
    """
    # Beyond, the result is 0 or infinite anyway.
    x = tl.where(x > 104.0, 104.0, tl.where(x < -104.0, -104.0, x))
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    # The first part of ln 2 has 12 bits: its product with n is exact.
    r = (x - n * 0.693115234375) - n * 3.1946184945309e-05
    tail = 0.0013950616
    tail = tail * r + 0.00836897
    tail = tail * r + 0.041666202
    tail = tail * r + 0.16666518
    tail = tail * r + 0.5
    # In two steps: 2ⁿ alone may be no normal number. NaN has no integer.
    n = tl.where(n == n, n, 0.0)
    half = tl.floor(n * 0.5)
    one = ((half.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    other = (((n - half).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return (1.0 + (r + (r * r) * tail)) * one * other


@triton.jit
def sigmoid_fp32(x):
    """Return ``1 / (1 + exp(-x))`` where the result is not rounded to 16 bits.

    ``sigmoid`` is exp2 of a rounded product, whose error grows with x.
    """
    return tl.div_rn(1.0, 1.0 + _exp_fp32(-x))


@triton.jit
def tanh(x):
    """Return ``tanh(x)`` within three units in the last place, also near 0; NaN stays NaN."""
    size = tl.where(x < 0.0, -x, x)
    # 1 - exp(-2x) cancels near 0: below 0.6, x + x³ P(x²), P fitted to the least relative error.
    square = x * x
    series = -0.005883233156055212
    series = series * square + 0.020785147324204445
    series = series * square - 0.05378039926290512
    series = series * square + 0.13331879675388336
    series = series * square - 0.33333295583724976
    near = x + x * (square * series)
    # The negative exponent keeps the quotient finite for every x.
    decay = tl.exp(-2.0 * size)
    far = (1.0 - decay) / (1.0 + decay)
    far = tl.where(x < 0.0, -far, far)
    return tl.where(size < 0.6, near, far)


@triton.jit
def clamp_above(x, limit):
    """Return ``min(x, limit)``; NaN stays NaN."""
    return tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def clamp_both(x, limit):
    """Return ``x`` clamped to ``[-limit, limit]``; NaN stays NaN."""
    return tl.maximum(clamp_above(x, limit), -limit, propagate_nan=tl.PropagateNan.ALL)
