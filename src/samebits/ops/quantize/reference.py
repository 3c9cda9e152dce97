"""See ``samebits.ops.quantize``; torch only, on any device."""

import torch
from torch import Tensor

from samebits import activation as act
from samebits.activation import Activation
from samebits.arguments import require_type
from samebits.errors import must
from samebits.formats.descriptor import WeightFormat
from samebits.formats.matrix import QuantizedMatrix
from samebits.formats.packing import ScaleRule, quantize_matrix
from samebits.ops.permute.reference import permute
from samebits.weights import Layout, split_gate_up

ROWS_FP8 = WeightFormat(name="fp8", block=(1, 128))


def permute_and_quantize(
    x: Tensor,
    inverse: Tensor,
    topk: int,
    probs: Tensor | None,
    row_format: WeightFormat,
    scale_rule: ScaleRule | None = None,
) -> QuantizedMatrix:
    """Return the rows of ``samebits.ops.permute.permute`` in a format, ``(1, R, H)``.

    Args:
        x: ``(T, H)``.
        inverse: ``(R,)`` row of each slot; R for a dropped one.
        topk: K.
        probs: ``(T, K)``: rows are ``D(fp32(x) * p)``, and that is quantised; None: x itself.
        row_format: ``ROWS_FP8`` or ``MXFP8``.
        scale_rule: See ``samebits.formats.packing``.

    Determinism: exact; a row depends on its token and probability only. Rows of no slot are zeros.
    """
    return quantize_rows(permute(x, inverse, topk, probs), row_format, scale_rule)


def activation_and_quantize(
    z: Tensor,
    activation: Activation,
    layout: Layout,
    row_probs: Tensor | None,
    row_format: WeightFormat,
    scale_rule: ScaleRule | None = None,
) -> QuantizedMatrix:
    """Return ``h`` in a format, ``(1, R, F)``.

    Args:
        z: ``(R, 2F or F)``, rounded to D.
        activation: The function; its clamps come before everything else.
        layout: Order of gate and up in the columns of ``z``.
        row_probs: ``(R,)`` where the probability goes here; then ``h = D(fp32(act(z)) * p)``.
        row_format: ``ROWS_FP8`` or ``MXFP8``.
        scale_rule: See ``samebits.formats.packing``.

    Determinism: exact but for the activation's functions; a row depends on its own z and p only.
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    gate, up = split_gate_up(z, layout) if activation.gated else (z, None)
    h = act.apply(activation, gate.to(wide), None if up is None else up.to(wide))
    if row_probs is not None:
        h = h * row_probs[:, None].to(wide)
    return quantize_rows(h.to(z.dtype), row_format, scale_rule)


def quantize_rows(
    rows: Tensor, row_format: WeightFormat, scale_rule: ScaleRule | None = None
) -> QuantizedMatrix:
    """Return rows of activations ``(R, C)`` in a format, ``(1, R, C)``.

    Raises:
        TypeError: ``row_format`` is no format.
        ValueError: The format is none of rows.

    Determinism: exact; a row depends on itself only.
    """
    require_type("row_format", row_format, WeightFormat)
    if row_format.rows != 1 or row_format.values != "e4m3":
        raise ValueError(must("row_format", "be fp8_1x128 or mxfp8", row_format))
    return quantize_matrix(rows[None], row_format, scale_rule)
