"""Quantised parameters from the tensors of a checkpoint: their names, shapes and scales checked.

Tensors stay where they are, and where a checkpoint stores all experts together they are not copied.
Nothing is inferred from a dtype: the caller says which format the tensors have.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from samebits.arguments import require_type
from samebits.errors import UnsupportedError, must
from samebits.formats.codes import E8M0_NAN, decode_e8m0
from samebits.formats.descriptor import FP8, MXFP4, WeightFormat
from samebits.formats.matrix import QuantizedMatrix
from samebits.formats.weights import QuantizedWeights
from samebits.weights import Layout

# gate, up, down: as DeepSeek, Qwen and others name an expert's matrices, and as Mixtral does.
_PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
# Name of format -> tails of a matrix's scales, and of its global scale.
_SCALES = {
    "fp8": (("weight_scale_inv", "scale"), None),
    "mxfp8": (("weight_scale_inv", "weight_scale", "scale"), None),
    "mxfp4": (("weight_scale_inv", "weight_scale", "scale"), None),
    "nvfp4": (("weight_scale",), "weight_scale_2"),
}
_E8M0 = torch.float8_e8m0fnu
# Dtypes in which two numbers of 4 bits are kept besides uint8.
_PACKED = (torch.int8, torch.float4_e2m1fn_x2)


def from_gpt_oss(
    tensors: Mapping[str, Tensor], prefix: str, *, dtype: torch.dtype = torch.bfloat16
) -> QuantizedWeights:
    """Return the experts of one layer of a gpt-oss checkpoint, in MXFP4 as it is stored.

    Args:
        tensors: Name → tensor. ``gate_up_proj_blocks`` ``(E, 2F, H/32, 16)`` and
            ``gate_up_proj_scales`` ``(E, 2F, H/32)``, both uint8, ``gate_up_proj_bias``
            ``(E, 2F)``; and those of ``down_proj``, with F and H in their places.
        prefix: What is before these names, as "model.layers.0.mlp.experts".
        dtype: D.

    Returns:
        Views of the tensors, gate and up interleaved.

    Raises:
        ValueError: A tensor is missing or has another shape, or a scale is NaN.
        TypeError: A tensor has another dtype.

    Determinism: exact.
    """
    parts: dict[str, Any] = {}
    for name, projection in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
        blocks = _of(tensors, f"{prefix}.{projection}_blocks")
        if blocks.dim() != 4 or blocks.shape[3] != MXFP4.columns // 2:
            rule = "have shape (E, rows, columns / 32, 16)"
            raise ValueError(must(f"{projection}_blocks", rule, tuple(blocks.shape)))
        parts[name] = QuantizedMatrix(
            format=MXFP4,
            columns=blocks.shape[2] * MXFP4.columns,
            values=blocks.flatten(2),
            scales=_of(tensors, f"{prefix}.{projection}_scales"),
        )
        check_scales(f"{prefix}.{projection}", parts[name])
        parts[f"{name}_bias"] = _of(tensors, f"{prefix}.{projection}_bias")
    return QuantizedWeights(dtype=dtype, layout=Layout(interleave=1), **parts)


def from_linears(
    tensors: Mapping[str, Tensor],
    prefix: str,
    *,
    experts: Sequence[int],
    weight_format: WeightFormat = FP8,
    dtype: torch.dtype = torch.bfloat16,
) -> QuantizedWeights:
    """Return the experts of a checkpoint that stores a matrix of each expert on its own.

    Args:
        tensors: Name → tensor: ``{e}.gate_proj.weight``, ``up_proj``, ``down_proj`` (or ``w1``,
            ``w3``, ``w2``) with their scales, ``weight_scale_inv`` as DeepSeek has it,
            ``weight_scale`` or ``scale``; E8M0 scales of FP8 blocks are widened to fp32. NVFP4 has
            ``weight_scale_2`` besides. Packed numbers may be uint8, int8 or float4_e2m1fn_x2.
        prefix: What is before the expert's number, as "model.layers.3.mlp.experts".
        experts: The experts to take, in this order.
        weight_format: How the tensors are stored; DeepSeek's is the one that stands.
        dtype: D.

    Returns:
        Copies, since the experts' tensors are put together.

    Raises:
        ValueError: A tensor is missing or has another shape, or a scale is not finite.
        TypeError: A tensor has another dtype.
        UnsupportedError: Gate and up of an expert have different global scales.

    Determinism: exact; where F is no multiple of a block's rows, scales are repeated.
    """
    require_type("weight_format", weight_format, WeightFormat)
    if not experts:
        raise ValueError(must("experts", "name an expert", "none"))
    first = f"{prefix}.{experts[0]}."
    found = [names for names in _PARTS if f"{first}{names[0]}.weight" in tensors]
    if not found:
        rule = f"hold {first}{_PARTS[0][0]}.weight or {first}{_PARTS[1][0]}.weight"
        raise ValueError(must("tensors", rule, "neither"))
    gate, up, down = (
        _stacked(tensors, [f"{prefix}.{expert}.{part}" for expert in experts], weight_format)
        for part in found[0]
    )
    return QuantizedWeights(gate_up=joined(gate, up), down=down, dtype=dtype)


def joined(gate: QuantizedMatrix, up: QuantizedMatrix) -> QuantizedMatrix:
    """Return gate and up, quantised apart, as the two halves of one matrix.

    Raises:
        ValueError: They differ in format or shape.
        UnsupportedError: Their global scales differ.

    Determinism: exact.
    """
    if gate.format != up.format or gate.shape != up.shape:
        rule = f"be {gate.format} of shape {gate.shape}, as its gate"
        raise ValueError(must("up", rule, f"{up.format} of shape {up.shape}"))
    wholes = gate.global_scale, up.global_scale
    if wholes[0] is not None and wholes[1] is not None and not torch.equal(wholes[0], wholes[1]):
        raise UnsupportedError(
            "gate and up of an expert have different global scales; one matrix has one"
        )
    rows = math.gcd(gate.format.rows, gate.shape[1])
    parts = [part.refine(rows, part.format.columns) for part in (gate, up)]
    values, scales = (
        torch.cat([getattr(part, name) for part in parts], 1) for name in ("values", "scales")
    )
    return replace(parts[0], values=values, scales=scales)


def check_scales(name: str, matrix: QuantizedMatrix) -> None:
    """Raise ``ValueError`` where a scale is NaN or infinite: such a block is no weight.

    Determinism: exact.
    """
    for part, scales in matrix.named_tensors().items():
        if part == "values":
            continue
        bad = scales == E8M0_NAN if scales.dtype == torch.uint8 else ~scales.float().isfinite()
        if bool(bad.any()):
            where = tuple(bad.nonzero()[0].tolist())
            raise ValueError(must(f"{part} of {name}", "be finite", f"NaN or infinity at {where}"))


def fp32_scales(scales: Tensor) -> Tensor:
    """Return scales that are stored as E8M0 in fp32, and others as they are.

    Determinism: exact.
    """
    return decode_e8m0(scales.view(torch.uint8)) if scales.dtype == _E8M0 else scales


def _stacked(
    tensors: Mapping[str, Tensor], names: list[str], weight_format: WeightFormat
) -> QuantizedMatrix:
    """Return the matrices called ``names`` as one."""
    tails, global_tail = _SCALES[weight_format.name]
    tail = next((t for t in tails if f"{names[0]}.{t}" in tensors), tails[0])
    values = torch.stack([_of(tensors, f"{name}.weight") for name in names])
    scales = torch.stack([_of(tensors, f"{name}.{tail}") for name in names])
    packed = weight_format.value.per_byte
    if packed > 1 and values.dtype in _PACKED:
        values = values.view(torch.uint8)
    if scales.dtype == _E8M0:
        scales = scales.view(torch.uint8)
        if weight_format.scales == "fp32":
            scales = decode_e8m0(scales)
    global_scale = None
    if global_tail is not None:
        factors = [_of(tensors, f"{name}.{global_tail}").reshape(-1) for name in names]
        global_scale = torch.cat(factors)
    matrix = QuantizedMatrix(
        format=weight_format,
        columns=values.shape[-1] * packed,
        values=values,
        scales=scales,
        global_scale=global_scale,
    )
    check_scales(names[0].rpartition(".")[2], matrix)
    return matrix


def _of(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise ValueError(must("tensors", f"hold {name}", "no such name"))
    return tensor
