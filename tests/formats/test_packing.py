"""From weights to a format and back: every number, tie, scale and special case, by hand or law."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from samebits.formats import (
    FP8,
    MXFP4,
    MXFP8,
    NVFP4,
    FormatPair,
    QuantizedMatrix,
    WeightFormat,
    dequantize,
    quantize,
)
from samebits.formats.codes import (
    E2M1,
    decode_e2m1,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
)
from samebits.formats.packing import quantize_matrix
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weights import ExpertWeights, Layout

pytestmark = pytest.mark.reference

FORMATS = [FP8, WeightFormat(name="fp8", block=(16, 32)), MXFP8, MXFP4, NVFP4]
RULED = [
    pytest.param(weight_format, rule, id=f"{weight_format}-{rule}")
    for weight_format in FORMATS
    for rule in ((None,) if weight_format.scales != "e8m0" else ("floor", "round_up"))
]


def _weight(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def test_e2m1_rounds_to_nearest_even_and_saturates() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0])

    for sign in (1.0, -1.0):
        got = decode_e2m1(encode_e2m1(sign * ties[None]), len(ties))
        assert_bitwise_equal(got[0], sign * expected)


def test_e2m1_takes_the_nearest_number_of_every_bf16() -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16).float()
    values = values[values.abs() <= 6.0]

    got = decode_e2m1(encode_e2m1(values[None]), len(values))[0]

    table = torch.tensor(E2M1)
    assert torch.equal((got - values).abs(), (values[:, None] - table).abs().amin(1))
    assert torch.equal(got.signbit(), values.signbit())


def test_low_half_of_a_byte_comes_first() -> None:
    packed = encode_e2m1(torch.tensor([[0.5, 6.0, -1.0]]))

    assert packed.tolist() == [[0x71, 0x0A]]


def test_e8m0_is_every_power_of_two_and_nan() -> None:
    decoded = decode_e8m0(torch.arange(256, dtype=torch.uint8))

    assert decoded[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert math.isnan(decoded[255].item())
    exponents = torch.arange(-130, 131)
    assert encode_e8m0(exponents).tolist() == [min(max(e + 127, 0), 254) for e in range(-130, 131)]


def test_e4m3_saturates_and_keeps_nan() -> None:
    values = torch.tensor([449.0, -1e30, math.inf, math.nan, 464.0, -0.0])

    got = encode_e4m3(values).float()

    assert got[:3].tolist() == [448.0, -448.0, 448.0]
    assert math.isnan(got[3].item())
    assert got[4] == 448.0
    assert got[5].signbit()


@pytest.mark.parametrize(
    ("weight_format", "largest", "floor", "round_up"),
    [
        # The examples of which implementations disagree: a scale too small clips the largest value.
        (MXFP8, 4.8046875, 2.0**-6, 2.0**-6),
        (MXFP8, 448.0, 1.0, 1.0),
        (MXFP8, 449.0, 1.0, 2.0),
        (MXFP8, 511.0, 1.0, 2.0),
        (MXFP4, 6.0, 1.0, 1.0),
        (MXFP4, 6.01, 1.0, 2.0),
        (MXFP4, 7.99, 1.0, 2.0),
        (MXFP4, 8.0, 2.0, 2.0),
        # In bf16 this is 2.0: the size of a block is taken in fp32.
        (MXFP4, 1.9990234, 2.0**-2, 2.0**-1),
        (MXFP4, 2.0**-127, 2.0**-127, 2.0**-127),
        (MXFP4, 2.0**127, 2.0**125, 2.0**125),
    ],
)
def test_scale_of_a_block(
    weight_format: WeightFormat, largest: float, floor: float, round_up: float
) -> None:
    weight = torch.zeros(1, 1, 32)
    weight[0, 0, 5] = -largest

    for rule, expected in (("floor", floor), ("round_up", round_up)):
        packed = quantize_matrix(weight, weight_format, rule)
        assert packed.scale_factors().item() == expected
        kept = packed.dequantize(torch.float32)[0, 0, 5].item()
        top = weight_format.value.largest * expected
        if rule == "floor" and largest > top:
            assert kept == -top
        if rule == "round_up":
            assert abs(kept) <= top


@pytest.mark.parametrize(("weight_format", "rule"), RULED)
def test_a_block_of_zeros_has_scale_one(weight_format: WeightFormat, rule: str | None) -> None:
    weight = torch.zeros(2, 3, 5)
    weight[1, 2, 4] = -0.0

    packed = quantize_matrix(weight, weight_format, rule)

    assert packed.scale_factors().unique().tolist() == [1.0]
    assert_bitwise_equal(packed.dequantize(torch.float32), weight)


@pytest.mark.parametrize(("weight_format", "rule"), RULED)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_become_nan_and_spoil_no_other_block(
    weight_format: WeightFormat, rule: str | None, broken: float
) -> None:
    weight = _weight(2, 20, 70)
    clean = quantize_matrix(weight, weight_format, rule).dequantize(torch.bfloat16)
    weight[0, 3, 40] = broken

    got = quantize_matrix(weight, weight_format, rule).dequantize(torch.bfloat16)

    rows, columns = weight_format.rows, weight_format.columns
    assert got[0, 3, 40].isnan()
    elsewhere = torch.ones_like(got, dtype=torch.bool)
    block = slice(3 // rows * rows, (3 // rows + 1) * rows)
    elsewhere[0, block, 40 // columns * columns : (40 // columns + 1) * columns] = False
    assert_bitwise_equal(got[elsewhere], clean[elsewhere])
    assert got.isnan().sum() == (1 if weight_format.values == "e4m3" else columns)


@pytest.mark.parametrize(("weight_format", "rule"), RULED)
@pytest.mark.parametrize("exponent", [-126, -20, 20, 120])
def test_tiny_and_huge_blocks_keep_their_relative_error(
    weight_format: WeightFormat, rule: str | None, exponent: int
) -> None:
    weight = torch.ldexp(_weight(1, 32, 64, dtype=torch.float32), torch.tensor(exponent))

    got = quantize_matrix(weight, weight_format, rule).dequantize(torch.float32)

    error = (got.double() - weight.double()).norm() / weight.double().norm()
    # Half a step at the top of a block, relative: 2**-4 for E4M3, 2**-2 for E2M1; a scale at its
    # smallest leaves fewer steps.
    step = 2.0**-4 if weight_format.values == "e4m3" else 2.0**-2
    assert error < (step if exponent > -126 else 2 * step)


@pytest.mark.parametrize(("weight_format", "rule"), RULED)
def test_what_is_dequantised_quantises_to_itself(
    weight_format: WeightFormat, rule: str | None
) -> None:
    once = quantize_matrix(_weight(3, 33, 70), weight_format, rule).dequantize(torch.float32)

    again = quantize_matrix(once, weight_format, rule).dequantize(torch.float32)

    if weight_format.scales == "e8m0":
        assert_bitwise_equal(again, once)
    else:
        # Scales are fp32 quotients: off by a rounding, and with them the products.
        worst = ((again - once).abs() / once.abs().clamp(min=1e-30)).max()
        assert worst <= 4 * torch.finfo(torch.float32).eps


@given(
    experts=st.integers(1, 3),
    rows=st.integers(1, 40),
    columns=st.integers(1, 70),
    which=st.integers(0, len(FORMATS) - 1),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, derandomize=True, deadline=None)
def test_weights_are_what_the_page_says(
    experts: int, rows: int, columns: int, which: int, seed: int
) -> None:
    """Every weight from its own value and scale, by the index formula, one by one."""
    weight_format = FORMATS[which]
    packed = quantize_matrix(_weight(experts, rows, columns, seed=seed), weight_format)

    got = packed.dequantize(torch.bfloat16)

    assert got.shape == (experts, rows, columns)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(20):
        e, n, k = (
            int(torch.randint(size, (), generator=generator)) for size in (experts, rows, columns)
        )
        expected = torch.tensor(_one(packed, e, n, k)).to(torch.bfloat16)
        assert_bitwise_equal(got[e, n, k], expected)


def _one(packed: QuantizedMatrix, e: int, n: int, k: int) -> float:
    held = packed.format
    if held.values == "e2m1":
        byte = int(packed.values[e, n, k // 2])
        value = E2M1[byte >> 4 if k % 2 else byte & 15]
    else:
        value = packed.values[e, n, k].float().item()
    scale = packed.scales[e, n // held.rows, k // held.columns]
    factor = 2.0 ** (int(scale) - 127) if held.scales == "e8m0" else scale.float().item()
    if packed.global_scale is not None:
        factor = (torch.tensor(factor) * packed.global_scale[e]).item()
    return (torch.tensor(value) * torch.tensor(factor)).item()


@given(seed=st.integers(0, 2**16), rows=st.integers(1, 9), columns=st.integers(1, 70))
@settings(max_examples=20, derandomize=True, deadline=None)
def test_a_block_is_quantised_alone(seed: int, rows: int, columns: int) -> None:
    weight = _weight(2, rows, columns, seed=seed)
    whole = quantize_matrix(weight, MXFP4).dequantize(torch.float32)

    for first in range(0, columns, 32):
        part = quantize_matrix(weight[1:, :, first : first + 32], MXFP4)
        assert_bitwise_equal(part.dequantize(torch.float32), whole[1:, :, first : first + 32])


def test_padding_is_never_read() -> None:
    """The spare half byte of an odd row, and memory around strided tensors."""
    weight = _weight(2, 6, 63)
    packed = quantize_matrix(weight, MXFP4)
    expected = packed.dequantize(torch.bfloat16)
    values = torch.full((2, 8, 40), 0xFF, dtype=torch.uint8)
    scales = torch.full((2, 8, 4), 0xFF, dtype=torch.uint8)
    values[:, :6, :32], scales[:, :6, :2] = packed.values, packed.scales
    values[:, :6, 31] |= 0xF0

    poisoned = QuantizedMatrix(
        format=MXFP4, columns=63, values=values[:, :6, :32], scales=scales[:, :6, :2]
    )

    assert_bitwise_equal(poisoned.dequantize(torch.bfloat16), expected)


@pytest.mark.parametrize("shape", [(0, 4, 32), (2, 192, 80), (1, 80, 576)])
def test_shapes_and_ragged_blocks(shape: tuple[int, int, int]) -> None:
    for weight_format in FORMATS:
        packed = quantize_matrix(_weight(*shape), weight_format)
        assert {n: tuple(t.shape) for n, t in packed.named_tensors().items()} == (
            weight_format.shapes(shape)
        )
        assert packed.dequantize(torch.float16).shape == shape


def test_blocks_larger_than_the_matrix_take_no_memory() -> None:
    weight = _weight(2, 6, 40)
    huge = WeightFormat(name="fp8", block=(2**40, 2**40))

    packed = quantize_matrix(weight, huge)

    exact = WeightFormat(name="fp8", block=(6, 40))
    expected = quantize_matrix(weight, exact).dequantize(torch.bfloat16)
    assert_bitwise_equal(packed.dequantize(torch.bfloat16), expected)
    assert_bitwise_equal(packed.refine(1, 2**20).dequantize(torch.bfloat16), expected)


def test_smaller_blocks_are_the_same_weights() -> None:
    packed = quantize_matrix(_weight(2, 192, 300), FP8)

    finer = packed.refine(64, 128)

    assert finer.format.key == "fp8_64x128"
    assert finer.scales.shape == (2, 3, 3)
    assert_bitwise_equal(finer.dequantize(torch.bfloat16), packed.dequantize(torch.bfloat16))
    with pytest.raises(ValueError, match=r"block must divide \(128, 128\), got \(96, 128\)"):
        packed.refine(96, 128)


@pytest.mark.parametrize("key", ["fp8_128x128", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4"])
def test_keys_are_read_back(key: str) -> None:
    assert WeightFormat.parse(key).key == key
    assert FormatPair.parse(key).key == key


def test_pairs_are_read_back_and_hold_one_kind() -> None:
    pair = FormatPair.parse("fp8_64x128/fp8_128x128")

    assert (pair.gate_up.block, pair.down.block) == ((64, 128), (128, 128))
    assert FormatPair.parse(str(pair)) == pair
    with pytest.raises(ValueError, match=r"be of the kind of gate_up \(mxfp4\), got mxfp8"):
        FormatPair.parse("mxfp4/mxfp8")
    with pytest.raises(ValueError, match="be spelled mxfp4"):
        FormatPair.parse("mxfp4/mxfp4")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("int4", "unknown format 'int4'"),
        ("fp8", "block must be stated for fp8"),
        ("mxfp4_1x16", r"block must be \(1, 32\) for mxfp4"),
        ("mxfp4_1x32", "be spelled mxfp4"),
        ("FP8_128x128", "look like"),
    ],
)
def test_bad_keys_are_refused(key: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightFormat.parse(key)


def test_a_rule_where_there_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="scale_rule must be None for fp8_128x128"):
        quantize_matrix(_weight(1, 4, 4), FP8, "floor")
    with pytest.raises(ValueError, match="unknown scale_rule 'ceil'"):
        quantize_matrix(_weight(1, 4, 4), MXFP8, "ceil")  # type: ignore[arg-type]


def test_tensors_of_a_matrix_are_checked() -> None:
    packed = quantize_matrix(_weight(2, 6, 64), MXFP8)
    fields = packed.named_tensors()

    with pytest.raises(TypeError, match=r"scales must be torch.uint8 for mxfp8, got torch.float32"):
        QuantizedMatrix(
            format=MXFP8, columns=64, values=fields["values"], scales=fields["scales"].float()
        )
    with pytest.raises(ValueError, match=r"scales must have shape \(2, 6, 2\)"):
        QuantizedMatrix(
            format=MXFP8, columns=64, values=fields["values"], scales=fields["scales"][..., :1]
        )
    with pytest.raises(ValueError, match="values must have shape"):
        QuantizedMatrix(format=MXFP8, columns=63, **fields)
    with pytest.raises(ValueError, match="global_scale must be None for mxfp8"):
        QuantizedMatrix(format=MXFP8, columns=64, global_scale=torch.ones(2), **fields)
    with pytest.raises(TypeError, match="global_scale must be a Tensor, got NoneType"):
        QuantizedMatrix(
            format=NVFP4,
            columns=64,
            values=torch.zeros(2, 6, 32, dtype=torch.uint8),
            scales=torch.zeros(2, 6, 4).to(torch.float8_e4m3fn),
        )


@pytest.mark.parametrize("weight_format", [FP8, MXFP8, MXFP4, NVFP4], ids=str)
def test_autocast_changes_nothing(weight_format: WeightFormat) -> None:
    """It refuses to stack 8-bit floats."""
    weights = ExpertWeights(
        gate_up=torch.randn(3, 96, 40).bfloat16(), down=torch.randn(3, 40, 48).bfloat16()
    )
    layout = Layout(interleave=1)
    without = quantize(weights, weight_format).to_layout(layout)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = quantize(weights, weight_format).to_layout(layout)
        dense = dequantize(within)

    for name, tensor in without.named_tensors().items():
        assert_bitwise_equal(within.named_tensors()[name].float(), tensor.float())
    assert_bitwise_equal(dense.gate_up, dequantize(without).gate_up)


@pytest.mark.parametrize("weight_format", [FP8, MXFP8, MXFP4, NVFP4], ids=str)
def test_no_rows_and_no_experts_are_matrices_too(weight_format: WeightFormat) -> None:
    for shape in ((2, 0, 40), (0, 5, 40)):
        packed = quantize_matrix(torch.zeros(shape), weight_format)

        assert packed.shape == packed.dequantize(torch.bfloat16).shape == shape
    with pytest.raises(ValueError, match="columns must be >= 1, got 0"):
        quantize_matrix(torch.zeros(2, 5, 0), weight_format)


@pytest.mark.parametrize("weight_format", [FP8, MXFP4, NVFP4], ids=str)
def test_both_ways_in_one_compiled_graph(weight_format: WeightFormat) -> None:
    def there_and_back(weights: ExpertWeights) -> Tensor:
        return dequantize(quantize(weights, weight_format)).gate_up

    weights = ExpertWeights(gate_up=_weight(2, 96, 40, seed=1), down=_weight(2, 40, 48, seed=2))

    compiled = torch.compile(there_and_back, backend="aot_eager", fullgraph=True)

    assert_bitwise_equal(compiled(weights), there_and_back(weights))


def test_weights_have_no_gradient_to_their_scales() -> None:
    packed = quantize_matrix(torch.randn(2, 40, 40), FP8)
    learned = replace(packed, scales=packed.scales.clone().requires_grad_())

    assert not learned.dequantize(torch.float32).requires_grad


def test_sizes_of_blocks_are_checked() -> None:
    packed = quantize_matrix(torch.randn(1, 8, 64), FP8)

    with pytest.raises(ValueError, match="block must be >= 1, got 0"):
        packed.refine(0, 128)
    with pytest.raises(TypeError, match=r"block must be an int, got 64\.0"):
        packed.refine(128, 64.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"block must divide \(128, 128\), got \(128, 48\)"):
        packed.refine(128, 48)
