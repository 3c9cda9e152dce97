"""See ``samebits.ops.quantize``; torch only, on any device."""

import torch
from torch import Tensor

from samebits import activation as act
from samebits.activation import Activation
from samebits.formats.descriptor import WeightFormat, require_rows
from samebits.formats.matrix import QuantizedMatrix
from samebits.formats.packing import ScaleRule, quantize_matrix
from samebits.ops.permute.reference import permute
from samebits.weights import Layout, split_gate_up


def permute_and_quantize(
    x: Tensor,
    inverse: Tensor,
    topk: int,
    probs: Tensor | None,
    row_format: WeightFormat,
    scale_rule: ScaleRule | None = None,
) -> QuantizedMatrix:
    """Return ``(1, R, H)``; see ``samebits.ops.quantize.permute_and_quantize``.

    Determinism: exact; a row depends on its token and probability only.
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
    """Return ``h``, ``(1, R, F)``; see ``samebits.ops.quantize.activation_and_quantize``.

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
    require_rows(row_format)
    return quantize_matrix(rows[None], row_format, scale_rule)
