"""See ``samebits.ops.quantize``; torch only, on any device."""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.amp import is_autocast_available as _has_autocast

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


def scaled_product(
    rows: QuantizedMatrix, weight: QuantizedMatrix, expert: int, addend: Tensor | None = None
) -> Tensor:
    """Return ``rows · weight[expert]ᵀ + addend`` in fp32, ``(R, N)``, not yet rounded to D.

    With fp32 scales, for each block b of the contraction in ascending order, every step rounded to
    fp32::

        t = Σ a[r, k] * w[n, k]  over k in b      (one accumulator; here: the exact sum, rounded)
        sum += (t * a_scale[r, b]) * w_scale[n, b]

    With E8M0 scales, the product of the numbers themselves in one fp32 accumulator.

    Args:
        rows: ``(1, R, K)``.
        weight: ``(E, N, K)``, scales of the same kind and as many columns to a block.
        expert: Which matrix.
        addend: ``(R, N)`` or ``(N,)`` fp32: a bias.

    Raises:
        ValueError: The formats do not go together, or there is no such matrix.

    Determinism: with fp32 scales exact, hence independent of other rows; otherwise torch's product.
    """
    a, w = rows.format, weight.format
    if (a.scales, a.columns) != (w.scales, w.columns) or weight.columns != rows.columns:
        rule = f"have the blocks of the rows ({a}, K = {rows.columns})"
        raise ValueError(must("weight", rule, f"{w}, K = {weight.columns}"))
    if rows.shape[0] != 1:
        raise ValueError(must("rows", "be one matrix, (1, R, K)", rows.shape))
    if not 0 <= expert < weight.shape[0]:
        raise ValueError(must("expert", f"be in [0, {weight.shape[0]})", expert))
    if a.scales == "e8m0":
        only = weight.select([expert]).dequantize(torch.float32)[0]
        numbers = rows.dequantize(torch.float32)[0]
        device = numbers.device.type
        # Autocast would narrow the fp32 product.
        with torch.autocast(device, enabled=False) if _has_autocast(device) else nullcontext():
            total = numbers @ only.T
        return total if addend is None else total + addend
    # Products of two E4M3 numbers and sums of 128 of them are exact in fp64, in any order.
    left, right = rows.values[0].double(), weight.values[expert].double()
    left_scales = rows.scales[0]
    right_scales = weight.scales[expert].repeat_interleave(w.rows, 0)[: weight.shape[1]]
    total = torch.zeros(left.shape[0], right.shape[0], device=left.device)
    for block in range(left_scales.shape[1]):
        span = slice(block * a.columns, (block + 1) * a.columns)
        term = (left[:, span] @ right[:, span].T).float()
        total += term * left_scales[:, block, None] * right_scales[:, block]
    return total if addend is None else total + addend
