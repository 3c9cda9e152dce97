"""Rows in 8 bits on a GPU: the bits of the definitions; the product: the rule, and every tile."""

import pytest
import torch
from torch import Tensor

from samebits import Activation
from samebits.formats import FP8, MXFP8, ROWS_FP8, QuantizedMatrix, WeightFormat
from samebits.formats.packing import ScaleRule, quantize_matrix
from samebits.ops.activation.kernel import launch_activation_forward
from samebits.ops.activation.operands import Operands
from samebits.ops.permute.reference import tiles
from samebits.ops.quantize import (
    SwizzledRows,
    activation_and_quantize,
    permute_and_quantize,
    reference,
    swizzle_scales,
)
from samebits.ops.quantize import tuning as quantize_tuning
from samebits.ops.quantize.kernel import (
    launch_activation_and_quantize,
    launch_permute_and_quantize,
)
from samebits.ops.scaled_gemm.kernel import launch_scaled_gemm
from samebits.ops.scaled_gemm.reference import scaled_product
from samebits.ops.scaled_gemm.tuning import CANDIDATES, TABLE, Config
from samebits.routing import Permutation
from samebits.testing.numerics import assert_bitwise_equal, relative_error
from samebits.weights import Layout

pytestmark = pytest.mark.gpu

GPT_OSS = Activation(alpha=1.702, limit=7.0, linear_offset=1.0)
RULES: list[tuple[WeightFormat, ScaleRule | None]]
RULES = [(ROWS_FP8, None), (MXFP8, "floor"), (MXFP8, "round_up")]
EVERY_RULE = pytest.mark.parametrize(("row_format", "scale_rule"), RULES, ids=str)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def _rows(count: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return rows of every size, with zeros, denormals, infinities and NaNs."""
    x = torch.randn(count, columns, device="cuda")
    x = (x * torch.rand_like(x).mul(24).sub(12).exp2()).to(dtype)
    x[1, 40:50] = torch.nan
    x[2] = 0.0
    x[2, 5] = -0.0
    x[3, :33] = torch.finfo(dtype).max
    x[4, :32] = torch.finfo(dtype).tiny / 4
    x[5, 33] = -torch.inf
    return x


def _same(values: Tensor, scales: Tensor | None, expected: QuantizedMatrix) -> None:
    assert scales is not None
    codes = expected.values[0]
    # NaN has one code here; torch's may have a sign.
    wanted = codes.view(torch.uint8).where(~codes.float().isnan(), 0x7F)
    assert_bitwise_equal(values.view(torch.uint8), wanted)
    assert_bitwise_equal(scales, expected.scales[0])


@EVERY_RULE
@pytest.mark.parametrize(
    ("dtype", "columns", "weighted"),
    [
        (torch.bfloat16, 2880, False),
        (torch.bfloat16, 2880, True),
        (torch.bfloat16, 130, True),
        (torch.bfloat16, 7, False),
        (torch.float16, 192, True),
        (torch.float32, 192, True),
    ],
    ids=str,
)
def test_permuted_rows(
    row_format: WeightFormat,
    scale_rule: ScaleRule | None,
    dtype: torch.dtype,
    columns: int,
    weighted: bool,
) -> None:
    x = _rows(77, columns, dtype) if columns > 50 else torch.randn(77, columns).to("cuda", dtype)
    ids = torch.randint(-1, 6, (77, 3), device="cuda")
    permutation = Permutation.of(ids, 6)
    offsets, inverse = permutation.offsets.int(), permutation.inverse.int()
    probs = torch.rand(77, 3) if weighted else None
    # On the CPU: the device's own division and conversion are what is tested.
    expected = reference.permute_and_quantize(
        x.cpu(), inverse.cpu(), 3, probs, row_format, scale_rule
    ).map(Tensor.cuda)
    probs = None if probs is None else probs.cuda()

    found = permute_and_quantize(x, inverse, 3, probs, row_format, scale_rule)

    assert isinstance(found, QuantizedMatrix)
    _same(found.values[0], found.scales[0], expected)
    if row_format == MXFP8:
        placed = permute_and_quantize(x, inverse, 3, probs, row_format, scale_rule, swizzle=offsets)
        assert isinstance(placed, SwizzledRows)
        assert_bitwise_equal(placed.scales, swizzle_scales(expected.scales[0], offsets))
    numbers, _ = launch_permute_and_quantize(
        x, inverse, 3, probs, offsets[-1:], row_format, scale_rule, numbers=True
    )
    assert_bitwise_equal(numbers.nan_to_num(7.0), expected.dequantize(dtype)[0].nan_to_num(7.0))


@DTYPES
@EVERY_RULE
def test_activations(
    row_format: WeightFormat, scale_rule: ScaleRule | None, dtype: torch.dtype
) -> None:
    layout, bf16 = Layout(interleave=1), dtype == torch.bfloat16
    for columns in (2880, 192) if bf16 else (192,):
        z = torch.randn(70, 2 * columns, device="cuda").mul(4).to(dtype)
        z[1, 40:50] = torch.nan
        offsets = torch.tensor([0, 33, 33, 61], dtype=torch.int32, device="cuda")
        # What is of no expert is not read.
        z[61:] = torch.nan
        p = torch.rand(70, device="cuda")
        kept = offsets[-1:]
        h = launch_activation_forward(Operands(z, row_probs=p, num_rows=kept), GPT_OSS, layout)
        h[61:] = 0.0
        expected = reference.quantize_rows(h.cpu(), row_format, scale_rule).map(Tensor.cuda)
        # Every sixth: each is a binary.
        others = quantize_tuning.candidates(columns)[::6] if bf16 else []
        for config in (None, *others):
            values, scales = launch_activation_and_quantize(
                z, GPT_OSS, layout, p, kept, row_format, scale_rule, config=config
            )
            _same(values, scales, expected)
        if row_format == MXFP8:
            placed = activation_and_quantize(
                z, GPT_OSS, layout, p, row_format, scale_rule, swizzle=offsets
            )
            assert isinstance(placed, SwizzledRows)
            assert_bitwise_equal(placed.scales, swizzle_scales(expected.scales[0], offsets))


# A plain tile, to which the others are compared, and those that are used.
PLAIN = Config(block_r=64, block_n=128, num_warps=8, num_stages=3)
USED = [config for _, config in TABLE]


def _product(
    rows: QuantizedMatrix,
    weight: QuantizedMatrix,
    offsets: Tensor,
    config: Config,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    total = rows.shape[1]
    slots = torch.arange(total, dtype=torch.int32, device="cuda")
    bias = torch.arange(weight.shape[1], device="cuda").float().expand(weight.shape[:2]) / 64
    table = tiles(offsets, total, config.block_r)
    return launch_scaled_gemm(
        rows.values[0], rows.scales[0], slots, table, weight, bias, None, dtype, config
    )


def _expected(rows: QuantizedMatrix, weight: QuantizedMatrix, offsets: Tensor) -> Tensor:
    y = torch.full((rows.shape[1], weight.shape[1]), torch.nan, device="cuda")
    bias = torch.arange(weight.shape[1], device="cuda").float() / 64
    bounds = offsets.tolist()
    for expert in range(weight.shape[0]):
        span = slice(bounds[expert], bounds[expert + 1])
        if span.start < span.stop:
            part = rows.map(lambda t, span=span: t[:, span])
            y[span] = scaled_product(part, weight, expert, bias)
    return y


SHAPES = [(320, 192), (2880, 130), (130, 576), (7168, 256)]
LIVE = 333
# Whole tiles and parts, of 128 rows too.
OFFSETS = torch.tensor([0, 1, 1, 200, LIVE], dtype=torch.int32)


def _operands(contraction: int, columns: int, weight_format: WeightFormat):
    rows = reference.quantize_rows(torch.randn(LIVE + 6, contraction), ROWS_FP8).map(Tensor.cuda)
    weight = quantize_matrix(torch.randn(4, columns, contraction), weight_format).map(Tensor.cuda)
    return rows, weight


@pytest.mark.parametrize("weight_format", [FP8, WeightFormat(name="fp8", block=(64, 128))], ids=str)
@pytest.mark.parametrize(("contraction", "columns"), SHAPES)
def test_product_is_the_rule_as_far_as_the_matrix_unit_adds(
    contraction: int, columns: int, weight_format: WeightFormat
) -> None:
    """Whole numbers: exact with any accumulator of 14 bits; others: within what one may lose."""
    offsets = OFFSETS.cuda()
    rows, weight = _operands(contraction, columns, weight_format)
    expected = _expected(rows, weight, offsets)

    y = _product(rows, weight, offsets, PLAIN)

    assert relative_error(y[:LIVE], expected[:LIVE]) < 2.0**-10
    for matrix in (rows, weight):
        # -1, 0 and 1: sums of 128 products are whole numbers of 8 bits.
        matrix.values.copy_(torch.randint(-1, 2, matrix.values.shape, device="cuda").float())
    expected = _expected(rows, weight, offsets)[:LIVE]
    for config in (PLAIN, *USED):
        # The one of many rows is a kernel of its own, whose results have two bytes.
        dtype = torch.bfloat16 if config.specialized else torch.float32
        found = _product(rows, weight, offsets, config, dtype)[:LIVE]
        assert_bitwise_equal(found, expected.to(dtype), str(config))


@pytest.mark.parametrize("config", [USED[0], USED[-1]], ids=["few", "many"])
def test_padding_and_experts_without_rows_are_not_read(config: Config) -> None:
    offsets = OFFSETS.cuda()
    rows, weight = _operands(2880, 192, FP8)
    expected = _product(rows, weight, offsets, config, torch.bfloat16)
    for matrix, place in ((rows, slice(LIVE, None)), (weight, None)):
        for tensor in (matrix.values.view(torch.uint8), matrix.scales.view(torch.uint8)):
            if place is None:
                tensor[1] = 0xFF
            else:
                tensor[:, place] = 0xFF

    y = _product(rows, weight, offsets, config, torch.bfloat16)

    assert_bitwise_equal(y[:LIVE], expected[:LIVE])
    # Fresh memory of the package is NaN in tests.
    assert y[LIVE:].isnan().all()


@pytest.mark.parametrize("loads", ["described", "pointers"])
def test_rows_are_independent_and_repeat(loads: str) -> None:
    rows, weight = _operands(2880, 192, FP8)
    if loads == "pointers":
        wide = torch.full((4, 192, 2881), 0xFF, dtype=torch.uint8, device="cuda")
        wide[..., :2880] = weight.values.view(torch.uint8)
        values = wide.view(torch.float8_e4m3fn)[..., :2880]
        weight = QuantizedMatrix(format=FP8, columns=2880, values=values, scales=weight.scales)
    offsets, dtype = OFFSETS.cuda(), torch.bfloat16
    whole = _product(rows, weight, offsets, PLAIN, dtype)
    for config in USED:
        # Many launches: a race would not show in one.
        for _ in range(50):
            found = _product(rows, weight, offsets, config, dtype)[:LIVE]
            assert_bitwise_equal(found, whole[:LIVE], str(config))
        for first, count in ((1, 1), (1, 2), (5, 16), (1, 65), (2, 64), (3, 150)):
            span = slice(first, first + count)
            part = rows.map(lambda t, span=span: t[:, span].contiguous())
            alone = torch.tensor([0, 0, 0, count, count], dtype=torch.int32, device="cuda")
            y = _product(part, weight, alone, config, dtype)
            assert_bitwise_equal(y, whole[span], str(config))


@pytest.mark.parametrize(("contraction", "columns"), SHAPES)
def test_every_tile_has_the_same_bits(contraction: int, columns: int) -> None:
    """The table's, and those that may enter it."""
    rows, weight = _operands(contraction, columns, FP8)
    offsets = OFFSETS.cuda()
    expected = _product(rows, weight, offsets, PLAIN)[:LIVE]
    for config in (*USED, *CANDIDATES):
        dtypes = (torch.bfloat16, torch.float16) if config.specialized else (torch.float32,)
        for dtype in dtypes:
            for _ in range(5):
                found = _product(rows, weight, offsets, config, dtype)[:LIVE]
                assert_bitwise_equal(found, expected.to(dtype), str(config))
