"""Formats on a GPU: the bits of the CPU, in both directions, denormal scales included.

A NaN is a NaN in the same place: its payload is the device's.
"""

import pytest
import torch
from torch import Tensor

from samebits.formats import FP8, MXFP4, MXFP8, NVFP4, QuantizedMatrix, WeightFormat
from samebits.formats.packing import quantize_matrix
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.gpu

FORMATS = [FP8, MXFP8, MXFP4, NVFP4]


def assert_same_numbers(there: Tensor, here: Tensor) -> None:
    assert_bitwise_equal(there.isnan().cpu(), here.isnan(), "places of NaN")
    assert_bitwise_equal(there.cpu().nan_to_num(nan=0.0), here.nan_to_num(nan=0.0), "numbers")


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize("exponent", [-130, -126, 0, 100])
def test_packing_and_its_inverse_have_the_bits_of_the_cpu(
    weight_format: WeightFormat, exponent: int
) -> None:
    weight = torch.ldexp(torch.randn(2, 192, 80), torch.tensor(exponent))
    weight[0, 3, 4], weight[1, 5, :32] = torch.nan, 0.0
    here = quantize_matrix(weight, weight_format)

    there = quantize_matrix(weight.cuda(), weight_format)

    for name, tensor in here.named_tensors().items():
        found = there.named_tensors()[name].cpu()
        assert_bitwise_equal(found.view(torch.uint8), tensor.view(torch.uint8))
    for dtype in (torch.bfloat16, torch.float32):
        assert_same_numbers(there.dequantize(dtype), here.dequantize(dtype))


def test_every_scale_of_e8m0() -> None:
    """Byte 0 is a denormal number of fp32, which a device may flush."""
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    values = torch.randint(0, 256, (1, 256, 16), dtype=torch.uint8)
    matrix = QuantizedMatrix(format=MXFP4, columns=32, values=values, scales=scales)

    there = matrix.map(torch.Tensor.cuda).dequantize(torch.float32)

    assert_same_numbers(there, matrix.dequantize(torch.float32))
