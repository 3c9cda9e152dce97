"""Activations in 8 bits beside weights in 8 bits (W8A8): what is quantised when.

Rows of activations are a ``QuantizedMatrix`` of one "expert", ``(1, R, C)``, in ``ROWS_FP8`` (E4M3
with an fp32 scale for 128 columns, as DeepSeek serves its FP8 blocks) or ``MXFP8``. A row's bits
depend on that row alone. There are no gradients.

* ``permute_and_quantize``: with the probability on the input, ``D(fp32(x) * p)`` is quantised.
* ``activation_and_quantize``: ``h`` is clamped, multiplied by p where that goes there, rounded to D
  as without quantisation, and then quantised.
* ``scaled_product``: the W8A8 rule of CONTRACT section 5 for fp32 scales; for powers of two, where
  the numbers are exact in bf16, the plain product of section 5. A definition in torch; the kernel
  is ``samebits.ops.scaled_gemm``.
* ``swizzle_scales``: E8M0 scales as Blackwell's matrix unit reads them.

The layer of these is ``samebits.experts(…, row_format=…)``.
"""

from samebits.formats.descriptor import ROWS_FP8 as ROWS_FP8
from samebits.ops.quantize.entry import SwizzledRows as SwizzledRows
from samebits.ops.quantize.entry import activation_and_quantize as activation_and_quantize
from samebits.ops.quantize.entry import permute_and_quantize as permute_and_quantize
from samebits.ops.quantize.scales import swizzle_scales as swizzle_scales
from samebits.ops.quantize.scales import unswizzle_scales as unswizzle_scales
from samebits.ops.scaled_gemm.reference import scaled_product as scaled_product
