"""Activations in 8 bits: what is quantised, the scaled product, and scales in tiles."""

from dataclasses import replace

import pytest
import torch

from samebits import Activation
from samebits import activation as act
from samebits.formats import FP8, MXFP4, MXFP8, QuantizedMatrix, WeightFormat
from samebits.formats.packing import quantize_matrix
from samebits.ops.quantize import (
    ROWS_FP8,
    activation_and_quantize,
    permute_and_quantize,
    scaled_product,
    swizzle_scales,
    unswizzle_scales,
)
from samebits.ops.quantize.reference import quantize_rows
from samebits.ops.quantize.scales import held_offsets
from samebits.problem import Problem
from samebits.routing import Permutation
from samebits.testing.inputs import make_inputs
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weights import Layout

pytestmark = pytest.mark.reference

GPT_OSS = Activation(alpha=1.702, limit=2.0, linear_offset=1.0)
WHOLE = Problem(
    H=320,
    F=192,
    E=5,
    K=3,
    dtype="bf16",
    activation=GPT_OSS,
    layout=Layout(interleave=1),
    gate_up_bias="bf16",
    down_bias="bf16",
)


@pytest.mark.parametrize("row_format", [ROWS_FP8, MXFP8], ids=str)
def test_the_probability_comes_before_quantisation(row_format: WeightFormat) -> None:
    inputs = make_inputs(WHOLE, 6, distribution="dropped")
    routing = inputs.routing
    permutation = Permutation.of(routing.topk_ids, WHOLE.E)
    kept = int(permutation.offsets[-1])

    got = permute_and_quantize(
        inputs.x, permutation.inverse, WHOLE.K, routing.topk_probs, row_format
    )

    slots = permutation.slots[:kept]
    p = routing.topk_probs.reshape(-1)[slots, None]
    scaled = (inputs.x[slots // WHOLE.K].float() * p).bfloat16()
    assert_bitwise_equal(
        got.values[0, :kept].float(), quantize_rows(scaled, row_format).values[0].float()
    )
    assert not got.dequantize(torch.float32)[0, kept:].any()


@pytest.mark.parametrize("row_format", [ROWS_FP8, MXFP8], ids=str)
def test_clamps_come_before_quantisation(row_format: WeightFormat) -> None:
    """A gate beyond the limit must not set the scale of its block."""
    z = torch.randn(7, 2 * 192).bfloat16() * 4
    p = torch.rand(7)

    got = activation_and_quantize(z, GPT_OSS, Layout(interleave=1), p, row_format)

    h = act.apply(GPT_OSS, z[:, ::2].float(), z[:, 1::2].float()) * p[:, None]
    expected = quantize_rows(h.bfloat16(), row_format)
    assert_bitwise_equal(got.scales, expected.scales)
    assert_bitwise_equal(got.values.float(), expected.values.float())
    free = replace(GPT_OSS, limit=None)
    unclamped = activation_and_quantize(z, free, Layout(interleave=1), p, row_format)
    assert not torch.equal(unclamped.scales, got.scales)


@pytest.mark.parametrize("row_format", [ROWS_FP8, MXFP8], ids=str)
def test_a_row_is_quantised_alone(row_format: WeightFormat) -> None:
    rows = torch.randn(9, 300).bfloat16()
    rows[4] = torch.nan
    whole = quantize_rows(rows, row_format)

    for row in (0, 3, 5, 8):
        alone = quantize_rows(rows[row : row + 1], row_format)
        assert_bitwise_equal(whole.scales[:, row], alone.scales[:, 0])
        assert_bitwise_equal(whole.values[:, row].float(), alone.values[:, 0].float())


def test_scaled_product_is_the_rule_of_the_contract() -> None:
    """Block by block, number by number."""
    rows = quantize_rows(torch.randn(3, 300), ROWS_FP8)
    weight = quantize_matrix(torch.randn(2, 150, 300), FP8)

    got = scaled_product(rows, weight, 1)

    for r, n in ((0, 0), (1, 127), (2, 128), (2, 149)):
        total = torch.zeros(())
        for block in range(3):
            span = slice(128 * block, 128 * (block + 1))
            terms = rows.values[0, r, span].double() * weight.values[1, n, span].double()
            term = terms.sum().float() * rows.scales[0, r, block]
            total = total + term * weight.scales[1, n // 128, block]
        assert_bitwise_equal(got[r, n], total)


def test_scaled_product_of_powers_of_two_is_that_of_the_numbers() -> None:
    rows = quantize_rows(torch.randn(3, 96), MXFP8)
    weight = quantize_matrix(torch.randn(2, 40, 96), MXFP8)

    got = scaled_product(rows, weight, 0)

    a, w = rows.dequantize(torch.bfloat16)[0], weight.dequantize(torch.bfloat16)[0]
    assert_bitwise_equal(got, a.float() @ w.float().T)


def test_products_refuse_other_blocks() -> None:
    rows = quantize_rows(torch.randn(3, 128), ROWS_FP8)

    with pytest.raises(ValueError, match=r"have the blocks of the rows \(fp8_1x128, K = 128\)"):
        scaled_product(rows, quantize_matrix(torch.randn(1, 4, 128), MXFP8), 0)
    with pytest.raises(ValueError, match="row_format must be fp8_1x128 or mxfp8, got mxfp4"):
        quantize_rows(torch.randn(3, 128), MXFP4)


def test_products_are_of_one_matrix_each() -> None:
    rows, weight = torch.randn(2, 3, 128), quantize_matrix(torch.randn(2, 4, 128), FP8)

    with pytest.raises(
        ValueError, match=r"rows must be one matrix, \(1, R, K\), got \(2, 3, 128\)"
    ):
        scaled_product(quantize_matrix(rows, ROWS_FP8), weight, 0)
    for expert in (-1, 2):
        with pytest.raises(ValueError, match=rf"expert must be in \[0, 2\), got {expert}"):
            scaled_product(quantize_rows(rows[0], ROWS_FP8), weight, expert)


def test_rows_may_have_their_scales_in_tiles() -> None:
    x, ids = torch.randn(9, 96).bfloat16(), torch.randint(-1, 3, (9, 2))
    permutation = Permutation.of(ids, 3)
    offsets = permutation.offsets
    rows = permute_and_quantize(x, permutation.inverse, 2, None, MXFP8)
    assert isinstance(rows, QuantizedMatrix)

    placed = permute_and_quantize(x, permutation.inverse, 2, None, MXFP8, swizzle=offsets)

    assert_bitwise_equal(placed.values.float(), rows.values[0].float())
    assert_bitwise_equal(placed.scales, swizzle_scales(rows.scales[0], offsets))
    z = torch.randn(18, 96).bfloat16()
    # Of no expert: not looked at.
    z[int(offsets[-1]) :] = torch.nan
    h = activation_and_quantize(z, Activation(), Layout(), None, MXFP8, swizzle=offsets)
    assert not h.values[int(offsets[-1]) :].float().any()


def test_bad_rows_are_refused() -> None:
    x, inverse = torch.randn(5, 64), torch.arange(10)
    z = torch.randn(4, 64)

    for call, message in (
        (lambda: permute_and_quantize(x, inverse, 3, None, MXFP8), r"R = T \* K = 15"),
        (lambda: permute_and_quantize(x, inverse, 2, x, MXFP8), r"probs must have shape \(T, K\)"),
        (lambda: permute_and_quantize(x[0], inverse, 2, None, MXFP8), "x must have two dimensions"),
        (
            lambda: permute_and_quantize(x, inverse, 2, None, ROWS_FP8, swizzle=inverse),
            "swizzle must be None for fp8_1x128",
        ),
        (
            lambda: activation_and_quantize(z[:, 1:], Activation(), Layout(), None, MXFP8),
            "z must have 2 columns for each of h, got 63",
        ),
        (
            lambda: activation_and_quantize(z, Activation(), Layout(), z[0], MXFP8),
            r"row_probs must have shape \(R,\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_rows_of_a_wrong_type_are_refused_by_their_name() -> None:
    x, inverse, z = torch.randn(5, 64), torch.arange(10), torch.randn(4, 64)

    def permuted(**wrong) -> object:
        given = {"x": x, "inverse": inverse, "topk": 2, "probs": None} | wrong
        return permute_and_quantize(**given, row_format=MXFP8)

    def activated(**wrong) -> object:
        given = {"z": z, "row_probs": None} | wrong
        return activation_and_quantize(
            **given, activation=Activation(), layout=Layout(), row_format=MXFP8
        )

    for call, name, wrong in (
        (permuted, "x", x.int()),
        (permuted, "inverse", inverse.float()),
        (permuted, "inverse", [0]),
        (permuted, "topk", 2.0),
        (permuted, "probs", [1.0]),
        (permuted, "probs", torch.ones(5, 2, dtype=torch.int64)),
        (activated, "z", z.int()),
        (activated, "row_probs", [1.0]),
    ):
        with pytest.raises(TypeError, match=f"^{name} must be"):
            call(**{name: wrong})
    with pytest.raises(ValueError, match=r"^probs must have shape .* on cpu, got \(5, 2\) on meta"):
        permuted(probs=torch.ones(5, 2, device="meta"))


def test_offsets_that_cannot_be_looked_at_are_held_within_the_rows() -> None:
    for given, held in (
        ([0, 3, 3, 8], [0, 3, 3, 8]),
        ([0, 5, 3, 9], [0, 5, 5, 8]),
        ([-4, 2**40, -1, 6], [0, 8, 8, 8]),
        ([5, 6, 7, 8], [0, 1, 2, 3]),
    ):
        offsets = torch.tensor(given)
        assert held_offsets(offsets, 8).tolist() == held
        assert held_offsets(offsets, 8).dtype == offsets.dtype


def test_bad_offsets_and_tiles_are_refused() -> None:
    scales = torch.ones(6, 3, dtype=torch.uint8)

    for bounds in ([0, 4, 3], [1, 6], []):
        with pytest.raises(ValueError, match="offsets must ascend from 0 on"):
            swizzle_scales(scales, torch.tensor(bounds, dtype=torch.int64))
    with pytest.raises(ValueError, match="offsets must end at R = 6 or before, got 9"):
        swizzle_scales(scales, torch.tensor([0, 9]))
    with pytest.raises(TypeError, match=r"offsets must be int32 or int64, got torch\.float32"):
        swizzle_scales(scales, torch.tensor([0.0, 6.0]))
    for rows, columns in ((129, 3), (6, 5)):
        with pytest.raises(ValueError, match=r"swizzled must have shape .*, got \(128, 4\)"):
            unswizzle_scales(swizzle_scales(scales), rows, columns)


def test_tiles_of_scales_are_where_the_page_says() -> None:
    scales = torch.randint(0, 255, (300, 9), dtype=torch.uint8)

    got = swizzle_scales(scales)

    assert got.shape == (384, 12)
    flat = got.flatten()
    for r, c in ((0, 0), (31, 3), (32, 0), (127, 2), (128, 0), (299, 8), (200, 5)):
        tile = (r // 128) * 3 + c // 4
        byte = tile * 512 + (r % 128 % 32) * 16 + (r % 128 // 32) * 4 + c % 4
        assert flat[byte] == scales[r, c]


def test_tiles_of_scales_are_those_of_torchao() -> None:
    formats = pytest.importorskip("torchao.prototype.mx_formats.utils", reason="needs torchao")
    scales = torch.randint(0, 255, (300, 9), dtype=torch.uint8)

    assert_bitwise_equal(swizzle_scales(scales).flatten(), formats.to_blocked(scales).flatten())


@pytest.mark.parametrize("counts", [[5, 0, 130, 1], [0, 0, 0], [128, 128], [31, 33]])
def test_experts_have_tiles_of_their_own_and_padding_is_not_read(counts: list[int]) -> None:
    offsets = torch.tensor([0, *counts]).cumsum(0)
    total = int(offsets[-1]) + 3
    scales = torch.randint(1, 255, (total, 6), dtype=torch.uint8)

    got = swizzle_scales(scales, offsets)

    experts = len(counts)
    assert got.shape == (-(-(total + 127 * experts) // 128) * 128, 8)
    live = scales[: offsets[-1]]
    assert_bitwise_equal(unswizzle_scales(got, total, 6, offsets)[: offsets[-1]], live)
    ones = swizzle_scales(torch.full_like(scales, 1), offsets)
    poisoned = torch.where(ones == 1, got, 0xFF)
    assert_bitwise_equal(unswizzle_scales(poisoned, total, 6, offsets)[: offsets[-1]], live)
    first = 0
    for expert, count in enumerate(counts):
        tiles = -(-count // 128)
        span = slice(int(offsets[expert]), int(offsets[expert]) + count)
        own = swizzle_scales(scales[span])
        assert_bitwise_equal(got[128 * first : 128 * (first + tiles)], own)
        first += tiles
