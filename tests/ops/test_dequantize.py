"""Quantised matrices to dense ones, in the interpreter: the numbers of ``samebits.formats``."""

import pytest
import torch

from samebits.formats import FP8, MXFP4, MXFP4_SHUFFLED, MXFP8, NVFP4, WeightFormat
from samebits.formats.packing import quantize_matrix
from samebits.ops.dequantize.kernel import launch_dequantize
from samebits.ops.dequantize.reference import dequantize
from samebits.ops.dequantize.tuning import Config
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.interpret

FORMATS = [FP8, MXFP8, MXFP4, NVFP4, WeightFormat(name="fp8", block=(3, 48))]
TILE = Config(block_n=16, block_k=64, num_warps=4)


def drawn(held: WeightFormat, shape: tuple[int, int, int]):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.rand(shape, generator=generator).mul(20).sub(10).exp2()
    weight = torch.randn(shape, generator=generator) * sizes
    # The interpreter's E4M3 has no NaN.
    if held.scales == "e8m0" and held.values == "e2m1":
        weight[0, 1, 2] = torch.nan
    return quantize_matrix(weight, held)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("held", FORMATS, ids=str)
def test_ragged_matrices_have_the_numbers_of_the_format(held, dtype) -> None:
    for shape in ((3, 33, 80), (2, 5, 129)):
        matrix = drawn(held, shape)

        assert_bitwise_equal(
            launch_dequantize(matrix, dtype, None, TILE), dequantize(matrix, dtype, None)
        )


@pytest.mark.parametrize("shuffled", [False, True], ids=["stored", "shuffled"])
def test_mxfp4_in_bf16_is_exact_whatever_its_scales_are(shuffled: bool) -> None:
    matrix = drawn(MXFP4, (3, 33, 192))
    # In the interpreter the smallest bf16 numbers become zeros.
    matrix.scales.clamp_(4)
    for exponent in (127, 128, 129, 250, 255):
        matrix.scales[1, 5, 3] = exponent
        held = matrix.shuffled() if shuffled else matrix

        made = launch_dequantize(held, torch.bfloat16, None, TILE)
        assert_bitwise_equal(
            made.nan_to_num(7.0), matrix.dequantize(torch.bfloat16).nan_to_num(7.0)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_shuffled_words_have_the_numbers_of_mxfp4(dtype) -> None:
    for shape in ((3, 33, 64), (2, 5, 192)):
        matrix = drawn(MXFP4_SHUFFLED, shape)
        matrix.scales[..., matrix.columns % 128 // 32 or 4 :] = 0xFF

        assert_bitwise_equal(
            launch_dequantize(matrix, dtype, None, TILE), dequantize(matrix, dtype, None)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("held", FORMATS, ids=str)
def test_strides_and_scale_padding_change_nothing(held, dtype) -> None:
    matrix = drawn(held, (2, 20, 96))

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 1:
            return tensor
        experts, rows, columns = tensor.shape
        wide = torch.full((experts, rows + 2, columns + 16), 0xFF, dtype=torch.uint8)
        wide = wide.repeat_interleave(tensor.element_size(), 2).view(tensor.dtype)
        part = wide[:, :rows, :columns]
        part.view(torch.uint8 if tensor.element_size() == 1 else torch.int32).copy_(
            tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int32)
        )
        return part

    poisoned = matrix.map(padded)

    assert_bitwise_equal(
        launch_dequantize(poisoned, dtype, None, TILE),
        launch_dequantize(matrix, dtype, None, TILE),
    )


def test_experts_without_rows_stay_as_they_were() -> None:
    matrix = drawn(MXFP4, (4, 20, 64))
    offsets = torch.tensor([0, 2, 2, 3, 3], dtype=torch.int32)

    dense = launch_dequantize(matrix, torch.float32, offsets, TILE)

    expected = dequantize(matrix, torch.float32, offsets)
    assert_bitwise_equal(dense[::2], expected[::2])
    # Fresh memory of the package is NaN in tests.
    assert dense[1::2].isnan().all()
