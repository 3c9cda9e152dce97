"""Scalar functions on fp32 tiles, written out so that every kernel computes the same bits.

Only ``tl.exp`` and ``tl.erf`` are used: both exist in the interpreter, libdevice does not.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """Return ``1 / (1 + exp(-x))``."""
    return 1.0 / (1.0 + tl.exp(-x))


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
    """Return ``min(x, limit)``; NaN stays NaN, which ``tl.minimum`` does not promise."""
    return tl.where(x > limit, limit, x)


@triton.jit
def clamp_both(x, limit):
    """Return ``x`` clamped to ``[-limit, limit]``; NaN stays NaN."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))
