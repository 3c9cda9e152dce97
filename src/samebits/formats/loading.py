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

from samebits.arguments import require_int, require_type
from samebits.errors import UnsupportedError, must
from samebits.formats.codes import E8M0_NAN, decode_e8m0, together
from samebits.formats.descriptor import FP8, MXFP4, WeightFormat
from samebits.formats.matrix import QuantizedMatrix
from samebits.formats.weights import QuantizedWeights
from samebits.weights import Layout

# gate, up, down: as DeepSeek, Qwen and others name an expert's matrices, and as Mixtral does.
_PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
# Name of format -> tails of a matrix's scales, and of its global scale.
_SCALES = {
    "fp8": (("weight_scale_inv", "weight_scale", "scale"), None),
    "mxfp8": (("weight_scale_inv", "weight_scale", "scale"), None),
    "mxfp4": (("weight_scale_inv", "weight_scale", "scale"), None),
    "nvfp4": (("weight_scale",), "weight_scale_2"),
}
_E8M0 = torch.float8_e8m0fnu
# Dtypes that fp32 holds exactly.
_NARROW = (torch.bfloat16, torch.float16)
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
        prefix: What is before these names, as "model.layers.0.mlp.experts"; may be empty.
        dtype: D. Biases of 16 bits in another dtype are widened to fp32.

    Returns:
        Views of the tensors, gate and up interleaved.

    Raises:
        ValueError: A tensor is missing or has another shape, or a scale is NaN.
        TypeError: A tensor has another dtype.

    Determinism: exact.
    """
    parts: dict[str, Any] = {}
    for name, part in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
        projection = _name(prefix, part)
        blocks = _of(tensors, f"{projection}_blocks")
        if blocks.dim() != 4 or blocks.shape[3] != MXFP4.columns // 2:
            rule = "have shape (E, rows, columns / 32, 16)"
            raise ValueError(must(f"{projection}_blocks", rule, tuple(blocks.shape)))
        parts[name] = QuantizedMatrix(
            format=MXFP4,
            columns=blocks.shape[2] * MXFP4.columns,
            values=blocks.flatten(2),
            scales=_of(tensors, f"{projection}_scales"),
        )
        check_scales(projection, parts[name])
        parts[f"{name}_bias"] = _bias(_of(tensors, f"{projection}_bias"), dtype)
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
            ``weight_scale`` or ``scale``; E8M0, bf16 and fp16 scales of FP8 blocks are widened to
            fp32. NVFP4 has ``weight_scale_2`` besides. Packed numbers may be uint8, int8 or
            float4_e2m1fn_x2. Biases, ``{e}.gate_proj.bias`` …, are all experts' or nobody's.
            Scales of activations (``input_scale``) are not read: these are weights only.
        prefix: What is before the expert's number, as "model.layers.3.mlp.experts"; may be empty.
        experts: The experts to take, in this order.
        weight_format: How the tensors are stored; DeepSeek's is the one that stands.
        dtype: D; see ``from_gpt_oss``.

    Returns:
        Copies, since the experts' tensors are put together.

    Raises:
        ValueError: A tensor is missing or has another shape, or a scale is not finite.
        TypeError: A tensor has another dtype.
        UnsupportedError: Gate and up of an expert have different global scales.

    Determinism: exact; where F is no multiple of a block's rows, scales are repeated.
    """
    require_type("weight_format", weight_format, WeightFormat)
    require_type("experts", experts, Sequence)
    if not experts:
        raise ValueError(must("experts", "name an expert", "none"))
    for expert in experts:
        require_int("an expert", expert, minimum=0)
    first = _name(prefix, f"{experts[0]}.")
    found = [names for names in _PARTS if f"{first}{names[0]}.weight" in tensors]
    if not found:
        rule = f"hold {first}{_PARTS[0][0]}.weight or {first}{_PARTS[1][0]}.weight"
        raise ValueError(must("tensors", rule, "neither"))
    names = [[_name(prefix, f"{expert}.{part}") for expert in experts] for part in found[0]]
    gate, up, down = (_stacked(tensors, each, weight_format) for each in names)
    biases: dict[str, Any] = {}
    for name, parts in (("gate_up_bias", names[:2]), ("down_bias", names[2:])):
        if any(f"{one}.bias" in tensors for part in parts for one in part):
            found_biases = [_of_all(tensors, part, "bias") for part in parts]
            biases[name] = _bias(torch.cat(found_biases, 1), dtype)
    return QuantizedWeights(gate_up=joined(gate, up), down=down, dtype=dtype, **biases)


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
        together(lambda halves: torch.cat(halves, 1), [getattr(part, name) for part in parts])
        for name in ("values", "scales")
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
    """Return scales that are stored as E8M0, bf16 or fp16 in fp32, and others as they are.

    Determinism: exact.
    """
    if scales.dtype == _E8M0:
        return decode_e8m0(scales.view(torch.uint8))
    return scales.float() if scales.dtype in _NARROW else scales


def _stacked(
    tensors: Mapping[str, Tensor], names: list[str], weight_format: WeightFormat
) -> QuantizedMatrix:
    """Return the matrices called ``names`` as one."""
    tails, global_tail = _SCALES[weight_format.name]
    tail = next((t for t in tails if f"{names[0]}.{t}" in tensors), tails[0])
    values, scales = _of_all(tensors, names, "weight"), _of_all(tensors, names, tail)
    packed = weight_format.value.per_byte
    if packed > 1 and values.dtype in _PACKED:
        values = values.view(torch.uint8)
    if weight_format.scales == "fp32":
        scales = fp32_scales(scales)
    elif scales.dtype == _E8M0:
        scales = scales.view(torch.uint8)
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


def _of_all(tensors: Mapping[str, Tensor], names: list[str], tail: str) -> Tensor:
    """Return the tensors ``tail`` of matrices of the same kind as one."""
    found = [_of(tensors, f"{name}.{tail}") for name in names]
    like = f"{found[0].dtype} of shape {tuple(found[0].shape)}"
    for name, tensor in zip(names, found, strict=True):
        actual = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        if actual != like:
            raise ValueError(must(f"{name}.{tail}", f"be {like}, as {names[0]}.{tail}", actual))
    return together(torch.stack, found)


def _bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias that may stand beside weights of ``dtype``: another of 16 bits in fp32."""
    return bias.float() if bias.dtype != dtype and bias.dtype in _NARROW else bias


def _name(prefix: str, tail: str) -> str:
    return f"{prefix}.{tail}" if prefix else tail


def _of(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise ValueError(must("tensors", f"hold {name}", "no such name"))
    return tensor
