"""Quantised weights drawn at random, for benchmarks: codes and scales as they are stored."""

import torch

from samebits.formats.matrix import QuantizedMatrix
from samebits.formats.weights import QuantizedWeights
from samebits.ops.dequantize.kernel import launch_dequantize
from samebits.weights import ExpertWeights, Layout

_HALVES = Layout()


def random_matrix(held, shape, seed):
    """Return codes drawn at random (no NaN), with scales that keep sums near 1."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shapes = held.shapes(shape)

    def draw(size, low, high):
        out = torch.empty(size, device="cuda", dtype=torch.uint8)
        for part in out:
            part.random_(low, high, generator=generator)
        return out

    values = draw(shapes["values"], 0, 256)
    if held.values == "e4m3":
        # Below 2, and no NaN.
        values = values.bitwise_and_(0xBF).view(torch.float8_e4m3fn)
    size = shapes["scales"]
    if held.scales == "fp32":
        scales = torch.rand(size, device="cuda", generator=generator) * 0.02 + 0.001
    else:
        scales = draw(size, 118, 123) if held.scales == "e8m0" else draw(size, 0x28, 0x50)
    factor = None
    if held.scales == "e4m3":
        scales = scales.view(torch.float8_e4m3fn)
        factor = torch.rand(shape[0], device="cuda", generator=generator) * 0.01 + 0.001
    return QuantizedMatrix(
        format=held, columns=shape[2], values=values, scales=scales, global_scale=factor
    )


def random_weights(held, problem, layout=_HALVES):
    """Return weights of a problem in a format."""
    e, h, f = problem.E, problem.H, problem.F
    return QuantizedWeights(
        gate_up=random_matrix(held, (e, 2 * f, h), 1),
        down=random_matrix(held, (e, h, f), 2),
        dtype=torch.bfloat16,
        layout=layout,
    )


def dense(weights):
    """Return the weights that quantised ones stand for, in bf16."""
    return ExpertWeights(
        gate_up=launch_dequantize(weights.gate_up, torch.bfloat16),
        down=launch_dequantize(weights.down, torch.bfloat16),
        layout=weights.layout,
    )
