"""transformers' ``FP8Experts`` in the words of this library: quantised parameters, dense function.

=============================  ===============================================================
transformers                   samebits
=============================  ===============================================================
``gate_up_proj`` float8_e4m3   FP8 in blocks of ``block_size``; None: one scale each for gate,
                               up and down
``gate_up_proj`` int8          MXFP4, ``block_size`` has no meaning
``*_scale_inv`` fp32           scales as they are
``*_scale_inv`` E8M0           widened to fp32 for FP8, as they are for MXFP4
``*_scale_inv`` bf16, fp16     widened to fp32
``activation_scheme``          "dynamic": x and h are **not** quantised here; "static": refused
``_apply_gate``, ``act_fn``    ``Activation``, by probing, as for any class
=============================  ===============================================================

The weights are frozen, as in transformers' own backward.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from samebits.errors import UnsupportedError
from samebits.formats import MXFP4, QuantizedMatrix, QuantizedWeights, WeightFormat
from samebits.formats.loading import fp32_scales
from samebits.integrations.transformers.translation import Translation

SCALE = "_scale_inv"
# What the table of attach() says of every such module.
NOTE = "x and h are not quantised (transformers' own FP8 code rounds them to 8 bits)"
_E8M0 = torch.float8_e8m0fnu


def first_name(module: Any) -> str:
    """Return the name of the first projection's parameter."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def check(module: Any) -> None:
    """Raise ``UnsupportedError`` where the tensors of ``module`` are in no format of ours."""
    if module.activation_scheme != "dynamic":
        raise UnsupportedError(
            f"its activation_scheme is {module.activation_scheme!r}: activations rounded to one "
            "scale for all tokens, which samebits does not do"
        )
    for name in (first_name(module), "down_proj"):
        matrix_of(module, name)


def quantized_weights_of(
    module: Any, translation: Translation, dtype: torch.dtype
) -> QuantizedWeights:
    """Return the parameters of ``module`` in their format: views, but for small tensors of scales.

    Args:
        module: The experts.
        translation: What was learned of them.
        dtype: D, of the tokens.

    Raises:
        UnsupportedError: See ``check``.
    """
    return QuantizedWeights(
        gate_up=matrix_of(module, first_name(module)),
        down=matrix_of(module, "down_proj"),
        dtype=dtype,
        layout=translation.layout,
    )


def matrix_of(module: Any, name: str) -> QuantizedMatrix:
    """Return one projection of ``module`` in its format.

    Raises:
        UnsupportedError: It is in no format of ours, or its scales may belong to other rows.
    """
    values, scales = (getattr(module, part).detach() for part in (name, name + SCALE))
    if values.dtype == torch.int8:
        if scales.dtype != _E8M0:
            raise UnsupportedError(f"its {name} is FP4 with {scales.dtype} scales, not E8M0")
        return QuantizedMatrix(
            format=MXFP4,
            columns=2 * values.shape[2],
            values=values.view(torch.uint8),
            scales=scales.view(torch.uint8),
        )
    stored, scales = scales.dtype, fp32_scales(scales)
    if values.dtype != torch.float8_e4m3fn or scales.dtype != torch.float32:
        raise UnsupportedError(f"its {name} is {values.dtype} with {stored} scales")
    parts = 2 if name == "gate_up_proj" else 1
    rows, apart = _rows(module.block_size, values, scales, parts)
    columns = values.shape[2] if module.block_size is None else int(module.block_size[1])
    if apart:
        rows, scales = _smaller(scales, values.shape[1] // parts, parts, rows)
    held = WeightFormat(name="fp8", block=(rows, columns))
    expected = held.shapes((values.shape[0], values.shape[1], values.shape[2]))["scales"]
    if tuple(scales.shape) != expected:
        raise UnsupportedError(
            f"its scales have shape {tuple(scales.shape)}, not {expected} for {held}"
        )
    return QuantizedMatrix(format=held, columns=values.shape[2], values=values, scales=scales)


def _rows(block_size: Any, values: Tensor, scales: Tensor, parts: int) -> tuple[int, bool]:
    """Return the rows of a block, and whether blocks begin anew at up within a block's rows."""
    height, stored = values.shape[1], scales.shape[1]
    each = height // parts
    if block_size is None:
        return (each if stored == parts else height), False
    rows = int(block_size[0])
    if each % rows == 0 or parts == 1:
        return rows, False
    whole, apart = math.ceil(height / rows), parts * math.ceil(each / rows)
    if whole == apart:
        raise UnsupportedError(
            f"F = {each} is no multiple of its blocks of {rows} rows, and {stored} rows of scales "
            "may belong to gate and up apart or to both together"
        )
    return rows, stored == apart


def _smaller(scales: Tensor, each: int, parts: int, rows: int) -> tuple[int, Tensor]:
    """Return rows of smaller blocks, which end where a part ends, and their scales."""
    smaller = math.gcd(rows, each)
    halves = scales.unflatten(1, (parts, -1)).repeat_interleave(rows // smaller, 2)
    return smaller, halves[:, :, : each // smaller].flatten(1, 2)


def is_quantized(module: nn.Module) -> bool:
    """Return whether ``module`` holds matrices in 8 bits or fewer, with scales beside them."""
    down, scales = (getattr(module, name, None) for name in ("down_proj", "down_proj" + SCALE))
    return isinstance(down, Tensor) and down.element_size() == 1 and isinstance(scales, Tensor)
