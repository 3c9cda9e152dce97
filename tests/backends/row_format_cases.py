"""Layers with activations in 8 bits that several tests compute, and what their error may be."""

from dataclasses import replace

import torch
from torch import Tensor

from samebits import Activation, ProbPlacement
from samebits.formats import FP8, MXFP4, MXFP8, ROWS_FP8, FormatPair, QuantizedWeights, dequantize
from samebits.ops.quantize import reference
from samebits.ops.quantize.reference import quantize_rows
from samebits.problem import Problem
from samebits.routing import Permutation
from samebits.testing.inputs import Inputs
from samebits.weights import Layout

GPT_OSS = Activation(alpha=1.702, limit=2.0, linear_offset=1.0)
# Blocks of FP8 are ragged in both projections.
FP8_CASE = Problem(
    H=320,
    F=192,
    E=5,
    K=3,
    dtype="bf16",
    activation=GPT_OSS,
    layout=Layout(interleave=1),
    gate_up_bias="bf16",
    down_bias="bf16",
    format=FormatPair(gate_up=FP8, down=FP8),
    row_format=ROWS_FP8,
)
MXFP8_CASE = replace(FP8_CASE, format=FormatPair(gate_up=MXFP8, down=MXFP8), row_format=MXFP8)
MXFP4_CASE = replace(MXFP8_CASE, format=FormatPair(gate_up=MXFP4, down=MXFP4))
CASES = {"fp8": FP8_CASE, "mxfp8": MXFP8_CASE, "mxfp4": MXFP4_CASE}


def in_fp32(problem: Problem, inputs: Inputs) -> Tensor:
    """Return the layer of the same quantised tensors, dequantised and multiplied in fp32."""
    assert isinstance(inputs.weights, QuantizedWeights)
    assert problem.row_format is not None
    held, dense = problem.row_format, dequantize(inputs.weights)
    permutation = Permutation.of(inputs.routing.topk_ids, problem.E)
    bounds = permutation.offsets.tolist()
    probs = inputs.routing.topk_probs.reshape(-1)
    out = torch.zeros(inputs.x.shape, device=inputs.x.device)
    for expert in range(problem.E):
        slots = permutation.slots[bounds[expert] : bounds[expert + 1]]
        if not len(slots):
            continue
        p = probs[slots, None]
        x = inputs.x[slots // problem.K]
        if problem.placement == ProbPlacement.FC1_INPUT:
            x = (x.float() * p).to(x.dtype)
        x = quantize_rows(x, held).dequantize(torch.float32)[0]
        z = x @ dense.gate_up[expert].float().T + dense.gate_up_bias[expert].float()
        row_p = p[:, 0] if problem.placement == ProbPlacement.FC2_INPUT else None
        h = reference.activation_and_quantize(
            z.to(inputs.x.dtype), problem.activation, problem.layout, row_p, held
        )
        y = h.dequantize(torch.float32)[0] @ dense.down[expert].float().T
        bias = dense.down_bias[expert].float()
        y = y + (bias * p if row_p is not None else bias)
        y = y.to(inputs.x.dtype).float()
        out.index_add_(0, slots // problem.K, y * p if problem.placement == "fc2_output" else y)
    return out.to(inputs.x.dtype)


def errors(out: Tensor, allowed: Tensor, oracle: Tensor) -> tuple[float, float]:
    """Return the errors of a layer and of ``in_fp32`` against the layer without quantisation."""
    measured, other = (
        float((value.cpu().double() - oracle).norm() / oracle.norm()) for value in (out, allowed)
    )
    return measured, other
