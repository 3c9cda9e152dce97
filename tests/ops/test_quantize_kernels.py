"""Kernels that quantise rows, in the interpreter: the bits of the definitions."""

import pytest
import torch
import triton
import triton.language as tl

from samebits import Activation
from samebits.formats import MXFP8, WeightFormat
from samebits.formats.packing import ScaleRule
from samebits.ops.activation.kernel import launch_activation_forward
from samebits.ops.activation.operands import Operands
from samebits.ops.quantize import ROWS_FP8, permute_and_quantize, swizzle_scales
from samebits.ops.quantize.kernel import (
    launch_activation_and_quantize,
    launch_permute_and_quantize,
)
from samebits.ops.quantize.reference import quantize_rows
from samebits.ops.quantize.tiles import decode_e4m3, encode_e4m3
from samebits.ops.quantize.tuning import Config
from samebits.routing import Permutation
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weights import Layout

pytestmark = pytest.mark.interpret

GPT_OSS = Activation(alpha=1.702, limit=2.0, linear_offset=1.0)
RULES = [(ROWS_FP8, None), (MXFP8, "floor"), (MXFP8, "round_up")]
EVERY_RULE = pytest.mark.parametrize(("row_format", "scale_rule"), RULES, ids=str)
TILE = Config(block_r=4, block_c=128, num_warps=4)


@triton.jit
def _codes_kernel(numbers_ptr, codes_ptr, back_ptr, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    codes = encode_e4m3(tl.load(numbers_ptr + index))
    tl.store(codes_ptr + index, codes)
    tl.store(back_ptr + index, decode_e4m3(codes))


def test_codes_are_those_of_torch() -> None:
    """Every number of E4M3, every tie, the neighbours of each, and what is out of range."""
    exact = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = exact[exact.isfinite()].sort().values
    ties = (finite[1:] + finite[:-1]) / 2
    odd = torch.tensor([-0.0, 1e-40, 448.1, 464.0, 480.0, 1e30, torch.inf, -torch.inf, torch.nan])
    far = torch.tensor(1e9)
    numbers = [exact, ties, torch.nextafter(ties, far), torch.nextafter(ties, -far), odd]
    whole = torch.nn.functional.pad(torch.cat(numbers), (0, 2048))[:2048]
    codes, back = torch.empty(2048, dtype=torch.uint8), torch.empty(2048)

    _codes_kernel[(1,)](whole, codes, back, COUNT=2048)

    expected = whole.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    # NaN has one code.
    assert_bitwise_equal(codes, expected.view(torch.uint8).where(~whole.isnan(), 0x7F))
    assert_bitwise_equal(back.nan_to_num(7.0), expected.float().nan_to_num(7.0))


def _odd_rows(tokens: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(tokens, columns) * torch.rand(tokens, columns).mul(20).sub(10).exp2()
    x = x.to(dtype)
    x[1, 40:50] = torch.nan
    x[2] = 0.0
    x[2, 5] = -0.0
    x[3, :33] = torch.finfo(dtype).max / 2
    x[4, :32] = torch.finfo(dtype).tiny / 4
    x[4, 33] = -torch.inf
    return x


@EVERY_RULE
@pytest.mark.parametrize("columns", [160])
def test_permuted_rows_have_the_bits_of_the_definition(
    row_format: WeightFormat, scale_rule: ScaleRule | None, columns: int
) -> None:
    x = _odd_rows(5, columns, torch.float16)
    ids, probs = torch.randint(-1, 3, (5, 2)), torch.rand(5, 2)
    permutation = Permutation.of(ids, 3)
    inverse, offsets = permutation.inverse.int(), permutation.offsets.int()
    for factors in (None, probs):
        expected = permute_and_quantize(x, inverse, 2, factors, row_format, scale_rule)

        def launched(factors=factors, **options):
            return launch_permute_and_quantize(
                x, inverse, 2, factors, offsets[-1:], row_format, scale_rule, **options
            )

        values, scales = launched(config=TILE)

        assert_bitwise_equal(values.view(torch.uint8), expected.values[0].view(torch.uint8))
        assert_bitwise_equal(scales, expected.scales[0])
        numbers, none = launched(numbers=True)
        assert none is None
        dense = expected.dequantize(torch.float16)[0]
        assert_bitwise_equal(numbers.nan_to_num(7.0), dense.nan_to_num(7.0))
        if row_format == MXFP8:
            tiles = launched(swizzle=offsets).scales
            assert_bitwise_equal(tiles, swizzle_scales(expected.scales[0], offsets))


@EVERY_RULE
@pytest.mark.parametrize(
    ("activation", "layout"),
    [(GPT_OSS, Layout(interleave=1)), (Activation(kind="relu2", gated=False), Layout())],
    ids=["gpt-oss", "relu2"],
)
def test_activations_have_the_bits_of_both_kernels(
    row_format: WeightFormat,
    scale_rule: ScaleRule | None,
    activation: Activation,
    layout: Layout,
) -> None:
    z = torch.randn(7, activation.columns * 160).mul(4.0).half()
    z[1, 40:50] = torch.nan
    z[2] = 0.0
    # Not read.
    z[5:] = torch.inf
    p, kept = torch.rand(7), torch.tensor([5], dtype=torch.int32)
    # Rows that do not exist are zeros.
    h = launch_activation_forward(Operands(z, row_probs=p, num_rows=kept), activation, layout)
    h[5:] = 0.0
    expected = quantize_rows(h, row_format, scale_rule)

    values, scales = launch_activation_and_quantize(
        z, activation, layout, p, kept, row_format, scale_rule, config=TILE
    )

    assert_bitwise_equal(values.view(torch.uint8), expected.values[0].view(torch.uint8))
    assert_bitwise_equal(scales, expected.scales[0])
    if row_format == MXFP8:
        offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
        tiles = launch_activation_and_quantize(
            z, activation, layout, p, kept, row_format, scale_rule, swizzle=offsets
        ).scales
        assert_bitwise_equal(tiles, swizzle_scales(expected.scales[0], offsets))
