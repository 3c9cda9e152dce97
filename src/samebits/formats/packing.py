"""From weights to a format: the scale of each block, then its values; every case has one answer.

* Sizes are taken in fp32, never in the weights' own dtype; a scale is rounded once.
* E8M0, ``scale_rule="floor"``: the exponent of the largest weight less that of the largest number
  (the MX specification); weights above the largest number saturate. ``"round_up"``: the smallest
  power of two with which nothing saturates.
* fp32: ``s = fp32(largest / 448)``, at least 2**-126.
* NVFP4: ``global = fp32(largest of the expert / 2688)``, at least 2**-126, and
  ``s = E4M3(largest / 6 / global)``, at least 2**-9.
* A block (an expert) of zeros has scale 1, so that no denormal stands for a factor.
* Values are divided by their factor and rounded to nearest, ties to even; what is too large
  saturates.
* NaN and infinities become NaN: the value where values have a NaN (E4M3), otherwise the scale and
  with it the block (E2M1). They don't count as the largest weight of a block.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from samebits.arguments import require_name, require_type
from samebits.errors import must
from samebits.formats.codes import E8M0_NAN, encode_e2m1, encode_e4m3, encode_e8m0, together
from samebits.formats.descriptor import MXFP4, WeightFormat
from samebits.formats.matrix import QuantizedMatrix

ScaleRule = Literal["floor", "round_up"]
SCALE_RULES: tuple[ScaleRule, ...] = ("floor", "round_up")
_TINY = torch.finfo(torch.float32).tiny
_LEAST_E4M3 = 2.0**-9


def rule_of(weight_format: WeightFormat, scale_rule: ScaleRule | None) -> ScaleRule | None:
    """Return the rule that applies: "round_up" for E8M0 unless stated, None for other scales.

    Raises:
        ValueError: The rule is unknown, or is stated where there is none.
    """
    if weight_format.scales != "e8m0":
        if scale_rule is not None:
            raise ValueError(must("scale_rule", f"be None for {weight_format}", repr(scale_rule)))
        return None
    if scale_rule is None:
        return "round_up"
    require_name("scale_rule", scale_rule, SCALE_RULES)
    return scale_rule


def quantize_matrix(
    weight: Tensor, weight_format: WeightFormat, scale_rule: ScaleRule | None = None
) -> QuantizedMatrix:
    """Return ``weight`` in a format; the rules are those of the module.

    Args:
        weight: ``(E, N, K)``, a float dtype, any strides.
        weight_format: The format.
        scale_rule: "floor" or "round_up", for E8M0 scales only; None means "round_up" there.

    Returns:
        New tensors, contiguous.

    Raises:
        TypeError: ``weight`` is no float tensor.
        ValueError: It has not three dimensions, or K or the rule is none of the format's.

    Determinism: exact; a block's bits depend on the block only (NVFP4: on its expert only).
    """
    require_type("weight", weight, Tensor)
    require_type("weight_format", weight_format, WeightFormat)
    if not weight.dtype.is_floating_point or weight.element_size() < 2:
        raise TypeError(must("weight", "be a tensor of at least 16 bits", weight.dtype))
    if weight.dim() != 3:
        raise ValueError(must("weight", "have three dimensions", tuple(weight.shape)))
    rule = rule_of(weight_format, scale_rule)
    if weight_format.shuffled:
        weight_format.check_columns(weight.shape[2])
        return quantize_matrix(weight, MXFP4, rule).shuffled()
    parts = [_one(matrix, weight_format, rule) for matrix in weight.detach()]
    if not parts:
        parts = [_one(weight.new_zeros(weight.shape[1:]), weight_format, rule)]
    experts = slice(weight.shape[0])
    wholes = [part[2] for part in parts if part[2] is not None]
    return QuantizedMatrix(
        format=weight_format,
        columns=weight.shape[2],
        values=together(torch.stack, [part[0] for part in parts])[experts],
        scales=together(torch.stack, [part[1] for part in parts])[experts],
        global_scale=torch.stack(wholes)[experts] if wholes else None,
    )


def _one(
    weight: Tensor, held: WeightFormat, rule: ScaleRule | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return values, scales and the global scale of one expert's ``(N, K)``."""
    weight = weight.float()
    rows, columns = weight.shape
    block = max(1, min(held.rows, rows)), max(1, min(held.columns, columns))
    blocks = pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    blocks = blocks.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    finite = blocks.isfinite()
    largest = torch.where(finite, blocks, 0.0).abs().amax((1, 3))
    if held.values == "e2m1":
        broken = ~finite.all(3).all(1)
    else:
        broken = torch.zeros_like(largest, dtype=torch.bool)
    scales, factors, whole = _scales(largest, broken, held, rule)
    scaled = torch.where(finite, blocks, torch.nan) / factors[:, None, :, None]
    scaled = scaled.flatten(2).flatten(0, 1)[:rows, :columns]
    encode = encode_e2m1 if held.values == "e2m1" else encode_e4m3
    return encode(scaled), scales, whole


def _scales(
    largest: Tensor, broken: Tensor, held: WeightFormat, rule: ScaleRule | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the scales of blocks, the fp32 factors that they stand for, and the global scale."""
    empty = largest == 0
    if held.scales == "fp32":
        factors = torch.where(empty, 1.0, _over(largest, held.value.largest).clamp(min=_TINY))
        return factors, factors, None
    if held.scales == "e8m0":
        mantissa, exponent = torch.frexp(largest)
        exponent = exponent - held.value.exponent
        if rule == "round_up":
            exponent = exponent + (mantissa > held.value.mantissa).int()
        exponent = torch.where(empty, 0, exponent).clamp(-127, 127)
        factors = torch.ldexp(torch.ones_like(largest), exponent)
        scales = torch.where(broken, E8M0_NAN, encode_e8m0(exponent))
        return scales.to(torch.uint8), factors, None
    # No rows have no largest weight.
    whole = _over(pad(largest.flatten(), (0, 1)).amax(), held.value.largest * 448.0)
    whole = torch.where(whole > 0, whole.clamp(min=_TINY), 1.0)
    factors = (_over(largest, held.value.largest) / whole).clamp(min=_LEAST_E4M3)
    factors = torch.where(empty, 1.0, factors)
    scales = encode_e4m3(torch.where(broken, torch.nan, factors))
    return scales, encode_e4m3(factors).float() * whole, whole


def _over(numbers: Tensor, divisor: float) -> Tensor:
    """Return ``numbers / divisor``, rounded once: CUDA multiplies by 1/x where x is no tensor."""
    return numbers / numbers.new_full((), divisor)
