"""The two ways to rows in 8 bits: kernels on an NVIDIA GPU, the definitions elsewhere."""

from typing import NamedTuple

import torch
from torch import Tensor

from samebits.activation import Activation
from samebits.arguments import require_int, require_type
from samebits.errors import must
from samebits.formats.descriptor import WeightFormat, require_rows
from samebits.formats.matrix import QuantizedMatrix
from samebits.formats.packing import ScaleRule
from samebits.ops.quantize import reference
from samebits.ops.quantize.scales import held_offsets, swizzle_scales
from samebits.weights import Layout

# What kernels take; fp64 and blocks of other widths are the definitions'.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_COLUMNS = (32, 64, 128)
_INDICES = (torch.int32, torch.int64)


class SwizzledRows(NamedTuple):
    """MXFP8 rows as a grouped product of Blackwell's takes them."""

    # (R, C), E4M3.
    values: Tensor
    # E8M0 in 32 × 4 × 4 tiles, those of each expert for itself; see ``swizzle_scales``.
    scales: Tensor


def permute_and_quantize(
    x: Tensor,
    inverse: Tensor,
    topk: int,
    probs: Tensor | None,
    row_format: WeightFormat,
    scale_rule: ScaleRule | None = None,
    *,
    swizzle: Tensor | None = None,
) -> QuantizedMatrix | SwizzledRows:
    """Return the rows of ``samebits.ops.permute.permute`` in a format, ``(1, R, H)``.

    Args:
        x: ``(T, H)``.
        inverse: ``(R,)`` row of each slot; R for a dropped one.
        topk: K.
        probs: ``(T, K)``: rows are ``D(fp32(x) * p)``, and that is quantised; None: x itself.
        row_format: ``ROWS_FP8`` or ``MXFP8``.
        scale_rule: See ``samebits.formats.packing``.
        swizzle: ``(E + 1,)`` first row of each expert: E8M0 scales are returned in tiles. They
            ascend from 0 to at most R, which is checked on CPU.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Shapes or devices disagree, or the format is none of rows, or has no tiles.

    Determinism: exact; a row depends on its token and probability only. Rows of no slot are zeros
    of scale 1.
    """
    _check("x", x, row_format, swizzle)
    require_int("topk", topk, minimum=1)
    total = x.shape[0] * topk
    require_type("inverse", inverse, Tensor)
    if inverse.dtype not in _INDICES:
        raise TypeError(must("inverse", "be int32 or int64", inverse.dtype))
    if tuple(inverse.shape) != (total,) or inverse.device != x.device:
        rule = f"have shape (R,) with R = T * K = {total}, on {x.device}"
        raise ValueError(must("inverse", rule, f"{tuple(inverse.shape)} on {inverse.device}"))
    if probs is not None:
        _check_factors("probs", probs, "(T, K)", (x.shape[0], topk), x.device)
    if not _has_kernel(x, row_format):
        rows = reference.permute_and_quantize(x, inverse, topk, probs, row_format, scale_rule)
        return _swizzled(rows, swizzle)
    from samebits.ops.quantize.kernel import launch_permute_and_quantize

    swizzle = None if swizzle is None else held_offsets(swizzle, total)
    kept = (inverse < total).sum(dtype=torch.int32)[None]
    values, scales = launch_permute_and_quantize(
        x if x.stride(1) == 1 else x.contiguous(),
        inverse.contiguous(),
        topk,
        None if probs is None else probs.contiguous(),
        kept,
        row_format,
        scale_rule,
        swizzle=swizzle,
    )
    return _packed(values, scales, row_format, swizzle)


def activation_and_quantize(
    z: Tensor,
    activation: Activation,
    layout: Layout,
    row_probs: Tensor | None,
    row_format: WeightFormat,
    scale_rule: ScaleRule | None = None,
    *,
    swizzle: Tensor | None = None,
) -> QuantizedMatrix | SwizzledRows:
    """Return ``h`` in a format, ``(1, R, F)``.

    Args:
        z: ``(R, 2F or F)``, rounded to D.
        activation: The function; its clamps come before everything else.
        layout: Order of gate and up in the columns of ``z``.
        row_probs: ``(R,)`` where the probability goes here; then ``h = D(fp32(act(z)) * p)``.
        row_format: ``ROWS_FP8`` or ``MXFP8``.
        scale_rule: See ``samebits.formats.packing``.
        swizzle: As there; rows past the last expert's are zeros.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Shapes or devices disagree, or the format is none of rows, or has no tiles.

    Determinism: exact but for the activation's functions; a row depends on its own z and p only.
    """
    require_type("activation", activation, Activation)
    require_type("layout", layout, Layout)
    _check("z", z, row_format, swizzle)
    if z.shape[1] % activation.columns:
        rule = f"have {activation.columns} columns for each of h"
        raise ValueError(must("z", rule, z.shape[1]))
    if activation.gated:
        layout.block(z.shape[1] // 2)
    if row_probs is not None:
        _check_factors("row_probs", row_probs, "(R,)", (z.shape[0],), z.device)
    if not _has_kernel(z, row_format):
        if swizzle is not None:
            live = torch.arange(z.shape[0], device=z.device) < swizzle[-1]
            z = torch.where(live[:, None], z, 0.0)
        rows = reference.activation_and_quantize(
            z, activation, layout, row_probs, row_format, scale_rule
        )
        return _swizzled(rows, swizzle)
    from samebits.ops.quantize.kernel import launch_activation_and_quantize

    swizzle = None if swizzle is None else held_offsets(swizzle, z.shape[0])
    whole = torch.full((1,), z.shape[0], dtype=torch.int32, device=z.device)
    values, scales = launch_activation_and_quantize(
        z if z.stride(1) == 1 else z.contiguous(),
        activation,
        layout,
        None if row_probs is None else row_probs.contiguous(),
        whole if swizzle is None else swizzle[-1:],
        row_format,
        scale_rule,
        swizzle=swizzle,
    )
    return _packed(values, scales, row_format, swizzle)


def _check(name: str, rows: Tensor, row_format: WeightFormat, swizzle: Tensor | None) -> None:
    require_type(name, rows, Tensor)
    if rows.dim() != 2:
        raise ValueError(must(name, "have two dimensions", tuple(rows.shape)))
    if rows.dtype not in (*_DTYPES, torch.float64):
        raise TypeError(must(name, "be bfloat16, float16, float32 or float64", rows.dtype))
    require_rows(row_format)
    if swizzle is None:
        return
    require_type("swizzle", swizzle, Tensor)
    if row_format.scales != "e8m0":
        raise ValueError(must("swizzle", f"be None for {row_format}", "a tensor"))
    if swizzle.dim() != 1 or swizzle.shape[0] < 2 or swizzle.device != rows.device:
        rule = f"have shape (E + 1,), E >= 1, on {rows.device}"
        raise ValueError(must("swizzle", rule, f"{tuple(swizzle.shape)} on {swizzle.device}"))
    if swizzle.dtype not in _INDICES:
        raise TypeError(must("swizzle", "be int32 or int64", swizzle.dtype))


def _check_factors(
    name: str, factors: Tensor, spelled: str, shape: tuple[int, ...], device: torch.device
) -> None:
    require_type(name, factors, Tensor)
    if tuple(factors.shape) != shape or factors.device != device:
        rule = f"have shape {spelled} = {shape}, on {device}"
        raise ValueError(must(name, rule, f"{tuple(factors.shape)} on {factors.device}"))
    if not factors.dtype.is_floating_point:
        raise TypeError(must(name, "be a float tensor", factors.dtype))


def _has_kernel(rows: Tensor, row_format: WeightFormat) -> bool:
    known = rows.dtype in _DTYPES and row_format.columns in _COLUMNS
    return rows.device.type == "cuda" and torch.version.hip is None and known


def _swizzled(rows: QuantizedMatrix, offsets: Tensor | None) -> QuantizedMatrix | SwizzledRows:
    if offsets is None:
        return rows
    return SwizzledRows(rows.values[0], swizzle_scales(rows.scales[0], offsets))


def _packed(
    values: Tensor, scales: Tensor | None, row_format: WeightFormat, offsets: Tensor | None
) -> QuantizedMatrix | SwizzledRows:
    assert scales is not None
    if offsets is not None:
        return SwizzledRows(values, scales)
    return QuantizedMatrix(
        format=row_format, columns=values.shape[1], values=values[None], scales=scales[None]
    )
