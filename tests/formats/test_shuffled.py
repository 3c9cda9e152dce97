"""MXFP4 in the order of its kernels: the same weights, in and out, and what it refuses."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from samebits.checkpoints.quantized import load_quantized, save_quantized
from samebits.formats import (
    FP8,
    MXFP4,
    MXFP4_SHUFFLED,
    FormatPair,
    QuantizedMatrix,
    QuantizedWeights,
    WeightFormat,
    dequantize,
    quantize,
)
from samebits.formats.packing import quantize_matrix
from samebits.nn import QuantizedExperts
from samebits.problem import Problem
from samebits.testing.inputs import make_inputs, run
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weights import Layout

pytestmark = pytest.mark.reference

SMALL = Problem(H=192, F=64, E=3, K=2, dtype="bf16")


def every_code_and_scale(columns: int) -> QuantizedMatrix:
    """Return a matrix whose rows have all 256 scales, each with all 16 codes, twice."""
    groups = columns // 32
    rows = 256 // groups
    codes = torch.arange(16, dtype=torch.uint8)
    scales = torch.arange(rows * groups).to(torch.uint8).view(1, rows, groups)
    values = (codes | codes.flip(0) << 4).repeat(1, rows, groups)
    return QuantizedMatrix(format=MXFP4, columns=columns, values=values, scales=scales)


def packed(layout: Layout = Layout()) -> QuantizedWeights:
    weights = make_inputs(replace(SMALL, layout=layout), 1).weights
    assert not isinstance(weights, QuantizedWeights)
    return quantize(weights, MXFP4)


@pytest.mark.parametrize("columns", [64, 128])
def test_every_code_with_every_scale_comes_back(columns: int) -> None:
    matrix = every_code_and_scale(columns)
    shuffled = matrix.shuffled()

    for name, tensor in shuffled.unshuffled().named_tensors().items():
        assert torch.equal(tensor, matrix.named_tensors()[name])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        made, expected = shuffled.dequantize(dtype), matrix.dequantize(dtype)
        assert_bitwise_equal(made.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert not torch.equal(shuffled.values, matrix.values)


def test_every_bit_of_a_code_has_a_place_of_its_own() -> None:
    for byte in range(32):
        for bit in range(8):
            values = torch.zeros(1, 1, 32, dtype=torch.uint8)
            values[0, 0, byte] = 1 << bit
            scales = torch.full((1, 1, 2), 127, dtype=torch.uint8)
            matrix = QuantizedMatrix(format=MXFP4, columns=64, values=values, scales=scales)

            words = matrix.shuffled().values

            assert sum(int(v).bit_count() for v in words.flatten()) == 1
            assert torch.equal(matrix.shuffled().unshuffled().values, values)


def test_shapes_and_spelling() -> None:
    pair = packed().shuffled()

    assert pair.format.key == "mxfp4_shuffled"
    assert FormatPair.parse("mxfp4_shuffled") == pair.format
    assert WeightFormat.parse("mxfp4_shuffled") == MXFP4_SHUFFLED
    assert pair.gate_up.shape == (3, 128, 192)
    assert pair.gate_up.scales.shape == (3, 2, 128, 4)
    assert pair.shuffled().gate_up is pair.gate_up
    assert packed().unshuffled().gate_up.format == MXFP4


def test_quantising_to_it_is_quantising_and_shuffling() -> None:
    weight = make_inputs(SMALL, 1).weights.gate_up
    assert isinstance(weight, Tensor)

    made = quantize_matrix(weight, MXFP4_SHUFFLED, "floor")

    expected = quantize_matrix(weight, MXFP4, "floor").shuffled()
    for name, tensor in made.named_tensors().items():
        assert torch.equal(tensor, expected.named_tensors()[name])


@pytest.mark.parametrize("backend", ["reference", "grouped"])
def test_layers_have_the_bits_of_the_dequantised_one(backend: str) -> None:
    problem = replace(SMALL, grad=True, format=FormatPair.parse("mxfp4_shuffled"))
    inputs = make_inputs(problem, 9, distribution="zipf")
    assert isinstance(inputs.weights, QuantizedWeights)

    got = run(problem, inputs, backend)

    dense = replace(inputs, weights=dequantize(inputs.weights))
    expected = run(replace(problem, format=None), dense, backend)
    assert got.keys() == expected.keys() - {"d_gate_up", "d_down"}
    for quantity, value in got.items():
        assert_bitwise_equal(value, expected[quantity])


def test_layouts_and_some_experts() -> None:
    shuffled = packed(Layout(interleave=1)).shuffled()

    for layout in (Layout(), Layout(up_first=True), Layout(interleave=16)):
        converted = shuffled.to_layout(layout)
        assert converted.format == shuffled.format
        expected = dequantize(shuffled).to_layout(layout)
        assert_bitwise_equal(dequantize(converted).gate_up, expected.gate_up)
    some = shuffled.gate_up.select([2, 0])
    expected_some = dequantize(shuffled).gate_up[[2, 0]]
    assert_bitwise_equal(some.dequantize(torch.bfloat16), expected_some)


def test_bytes_of_no_columns_have_no_meaning() -> None:
    shuffled = packed().shuffled()
    expected = dequantize(shuffled)
    shuffled.gate_up.scales[:, -1, :, 2:] = 0xFF

    assert_bitwise_equal(dequantize(shuffled).gate_up, expected.gate_up)


def test_files_and_modules_keep_it(tmp_path: Path) -> None:
    shuffled = packed().shuffled()
    save_quantized({"layer": shuffled}, tmp_path / "file.safetensors")

    loaded = load_quantized(tmp_path / "file.safetensors")["layer"]

    assert loaded.format == shuffled.format
    module, other = QuantizedExperts(loaded), QuantizedExperts(packed().shuffled())
    other.load_state_dict(module.state_dict())
    for weights in (loaded, other.weights):
        for name, tensor in weights.named_tensors().items():
            assert torch.equal(tensor, shuffled.named_tensors()[name])
    with pytest.raises((RuntimeError, ValueError), match="mxfp4"):
        QuantizedExperts(packed()).load_state_dict(module.state_dict())


def test_what_cannot_be_shuffled_is_refused_with_the_reason() -> None:
    odd = make_inputs(replace(SMALL, F=80), 1).weights
    assert not isinstance(odd, QuantizedWeights)
    with pytest.raises(ValueError, match="K must be a multiple of 64 for mxfp4_shuffled, got 80"):
        quantize(odd, MXFP4).shuffled()
    with pytest.raises(ValueError, match="K must be a multiple of 64"):
        quantize(odd, MXFP4_SHUFFLED)
    with pytest.raises(ValueError, match="K must be a multiple of 64"):
        replace(SMALL, F=80, format=FormatPair.parse("mxfp4_shuffled"))
    with pytest.raises(ValueError, match="format must be mxfp4 to be shuffled, got fp8"):
        quantize_matrix(torch.zeros(1, 64, 64), FP8).shuffled()
    with pytest.raises(ValueError, match="have shape"):
        replace(packed().gate_up, format=MXFP4_SHUFFLED)
