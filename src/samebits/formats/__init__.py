"""Quantised weights: how low-precision parameters are stored, and what they mean.

One matrix of E experts, ``(E, N, K)``: N output rows (2F or F of ``gate_up`` in the order of its
layout, H of ``down``), K the contraction (H of ``gate_up``, F of ``down``). A format has a block of
``R`` rows by ``C`` columns with one scale; last blocks may be ragged, so nothing is ever padded::

    format      values                              scales                             global_scale
    fp8_RxC     (E, N, K) float8_e4m3fn             (E, ⌈N/R⌉, ⌈K/C⌉) float32          None
    mxfp8       (E, N, K) float8_e4m3fn             (E, N, ⌈K/32⌉) uint8, E8M0         None
    mxfp4       (E, N, ⌈K/2⌉) uint8, two E2M1       (E, N, ⌈K/32⌉) uint8, E8M0         None
    nvfp4       (E, N, ⌈K/2⌉) uint8, two E2M1       (E, N, ⌈K/16⌉) float8_e4m3fn       (E,) float32

    mxfp4_shuffled is mxfp4 in the order of its kernels (``samebits.formats.shuffled``), where 64
    divides K: values of the same shape, scales (E, ⌈K/128⌉, N, 4) uint8; those of columns past K
    have no meaning.

    E2M1   4 bits: sign, 2 exponent, 1 mantissa; codes 0…7 are 0 0.5 1 1.5 2 3 4 6, codes 8…15 the
           same negative. Column 2j is in the low half of byte j, column 2j + 1 in the high half;
           the high half of the last byte of an odd K has no meaning.
    E8M0   byte b is 2**(b - 127), also for b = 0 (2**-127, a denormal of fp32); 255 is NaN.

What a weight is (CONTRACT section 5), with n, k its row and column::

    s = fp32(scales[e, n // R, k // C])             nvfp4: s = fp32(s * global_scale[e])
    w = D(fp32(fp32(values[e, n, k]) * s))

The product with a power of two is exact, so ``mxfp8`` and ``mxfp4`` are exact in bf16 and fp32 but
for exponents out of range (fp16 overflows to infinity, as a cast does). Rows of scales are rows of
*storage*: a block of ``gate_up`` may hold gate and up. Where gate and up were quantised apart and F
is no multiple of R, loaders repeat scales for smaller blocks (R' = gcd(R, F)), which changes no
weight. Tensors may have any strides on the way in; ``quantize`` and the loaders make ``values`` and
``scales`` contiguous in their last dimension.
"""

from samebits.formats.descriptor import FP8 as FP8
from samebits.formats.descriptor import MXFP4 as MXFP4
from samebits.formats.descriptor import MXFP4_SHUFFLED as MXFP4_SHUFFLED
from samebits.formats.descriptor import MXFP8 as MXFP8
from samebits.formats.descriptor import NVFP4 as NVFP4
from samebits.formats.descriptor import ROWS_FP8 as ROWS_FP8
from samebits.formats.descriptor import FormatPair as FormatPair
from samebits.formats.descriptor import WeightFormat as WeightFormat
from samebits.formats.matrix import QuantizedMatrix as QuantizedMatrix
from samebits.formats.weights import Parameters as Parameters
from samebits.formats.weights import QuantizedWeights as QuantizedWeights
from samebits.formats.weights import dequantize as dequantize
from samebits.formats.weights import quantize as quantize
