"""The scaled product, in the interpreter: the rule of CONTRACT section 5, block by block."""

import pytest
import torch

from samebits.formats import FP8, QuantizedMatrix, WeightFormat
from samebits.formats.packing import quantize_matrix
from samebits.ops.permute.reference import tiles
from samebits.ops.quantize import ROWS_FP8, scaled_product
from samebits.ops.quantize.reference import quantize_rows
from samebits.ops.scaled_gemm.kernel import launch_scaled_gemm
from samebits.ops.scaled_gemm.tuning import Config
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.interpret

TILES = [
    Config(block_r=16, block_n=64, num_warps=4, num_stages=1),
    Config(block_r=32, block_n=64, num_warps=4, num_stages=1, swap=False),
    Config(block_r=16, block_n=64, num_warps=4, num_stages=1, tma=False),
]
EVERY_TILE = pytest.mark.parametrize("tile", TILES, ids=["weights-first", "rows-first", "pointers"])
OFFSETS = torch.tensor([0, 5, 5, 23], dtype=torch.int32)


def _whole_numbers(*shape: int) -> torch.Tensor:
    """Return numbers of few bits: any sum of 128 of their products is exact in fp32."""
    return torch.randint(-4, 5, shape).float() * torch.randint(-3, 3, (*shape[:-1], 1)).exp2()


def _product(
    rows: QuantizedMatrix,
    weight: QuantizedMatrix,
    bias: torch.Tensor,
    probs: torch.Tensor,
    tile: Config,
) -> torch.Tensor:
    slots = torch.arange(rows.shape[1], dtype=torch.int32).flip(0)
    return launch_scaled_gemm(
        rows.values[0], rows.scales[0], slots, tiles(OFFSETS, rows.shape[1], tile.block_r),
        weight, bias, probs, torch.float32, tile,
    )  # fmt: skip


@EVERY_TILE
@pytest.mark.parametrize(
    ("weight_format", "strided"),
    [(FP8, False), (FP8, True), (WeightFormat(name="fp8", block=(48, 128)), True)],
    ids=str,
)
def test_bits_of_the_rule(weight_format: WeightFormat, strided: bool, tile: Config) -> None:
    rows = quantize_rows(_whole_numbers(25, 320), ROWS_FP8)
    weight = quantize_matrix(_whole_numbers(3, 130, 320), weight_format)
    # What is padding, or of no expert, must not count.
    rows.values.view(torch.uint8)[:, 23:] = 0xFF
    rows.scales.view(torch.int32)[:, 23:] = -1
    for part in (weight.values.view(torch.uint8), weight.scales.view(torch.int32)):
        part[1] = -1 if part.dtype == torch.int32 else 0xFF
    stored = weight
    if strided:
        wide = torch.full((3, 130, 336), 0xFF, dtype=torch.uint8)
        wide[..., :320] = weight.values.view(torch.uint8)
        odd = wide.view(torch.float8_e4m3fn)[..., :320]
        stored = QuantizedMatrix(
            format=weight_format,
            columns=320,
            values=odd,
            scales=weight.scales.transpose(1, 2).contiguous().transpose(1, 2),
        )
    bias, p = torch.randn(3, 130), torch.rand(25)

    y = _product(rows, stored, bias, p, tile)

    for expert in (0, 2):
        span = slice(int(OFFSETS[expert]), int(OFFSETS[expert + 1]))
        addend = bias[expert] * p.flip(0)[span, None]
        part = rows.map(lambda tensor, span=span: tensor[:, span])
        assert_bitwise_equal(y[span], scaled_product(part, weight, expert, addend))
    # Fresh memory of the package is NaN in tests.
    assert y[23:].isnan().all()


@EVERY_TILE
def test_a_row_is_multiplied_alone(tile: Config) -> None:
    rows = quantize_rows(torch.randn(23, 200), ROWS_FP8)
    weight = quantize_matrix(torch.randn(3, 64, 200), FP8)
    bias, p = torch.zeros(3, 64), torch.ones(23)
    expected = _product(rows, weight, bias, p, tile)
    rows.scales[:, 7] = torch.nan

    y = _product(rows, weight, bias, p, tile)

    assert y[7].isnan().all()
    others = torch.arange(23) != 7
    assert_bitwise_equal(y[others], expected[others])
