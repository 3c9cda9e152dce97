"""Activations in 8 bits: what is quantised, the scaled product, the layer, and scales in tiles."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from samebits import Activation, ProbPlacement, Routing, UnsupportedError
from samebits import activation as act
from samebits.formats import FP8, MXFP4, MXFP8, QuantizedWeights, WeightFormat, dequantize, quantize
from samebits.formats.packing import quantize_matrix
from samebits.ops.quantize import (
    ROWS_FP8,
    activation_and_quantize,
    permute_and_quantize,
    scaled_product,
    swizzle_scales,
    unswizzle_scales,
    w8a8_experts,
)
from samebits.ops.quantize.reference import quantize_rows
from samebits.problem import Problem
from samebits.routing import Permutation
from samebits.testing.inputs import Inputs, exact, make_inputs
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weights import ExpertWeights, Layout

pytestmark = pytest.mark.reference

# Rows, and the weights that go with them.
PAIRS = [pytest.param(ROWS_FP8, FP8, id="fp8"), pytest.param(MXFP8, MXFP8, id="mxfp8")]
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


def _quantised(inputs: Inputs, weight_format: WeightFormat) -> QuantizedWeights:
    assert isinstance(inputs.weights, ExpertWeights)
    return quantize(inputs.weights, weight_format)


def _in_fp32(
    problem: Problem, inputs: Inputs, weights: QuantizedWeights, row_format: WeightFormat
) -> Tensor:
    """Return the layer of the same quantised tensors, dequantised and multiplied in fp32."""
    dense = dequantize(weights)
    permutation = Permutation.of(inputs.routing.topk_ids, problem.E)
    bounds = permutation.offsets.tolist()
    probs = inputs.routing.topk_probs.reshape(-1)
    out = torch.zeros(inputs.x.shape)
    for expert in range(problem.E):
        slots = permutation.slots[bounds[expert] : bounds[expert + 1]]
        if not len(slots):
            continue
        p = probs[slots, None]
        x = inputs.x[slots // problem.K]
        if problem.placement == ProbPlacement.FC1_INPUT:
            x = (x.float() * p).bfloat16()
        x = quantize_rows(x, row_format).dequantize(torch.float32)[0]
        z = (x @ dense.gate_up[expert].float().T + dense.gate_up_bias[expert].float()).bfloat16()
        row_p = p[:, 0] if problem.placement == ProbPlacement.FC2_INPUT else None
        h = activation_and_quantize(z, problem.activation, problem.layout, row_p, row_format)
        y = h.dequantize(torch.float32)[0] @ dense.down[expert].float().T
        bias = dense.down_bias[expert].float()
        y = y + (bias * p if row_p is not None else bias)
        y = y.bfloat16().float()
        out.index_add_(0, slots // problem.K, y * p if problem.placement == "fc2_output" else y)
    return out.bfloat16()


@pytest.mark.parametrize("placement", list(ProbPlacement))
@pytest.mark.parametrize(("row_format", "weight_format"), PAIRS)
def test_layer_is_as_accurate_as_its_tensors(
    row_format: WeightFormat, weight_format: WeightFormat, placement: ProbPlacement
) -> None:
    problem = replace(WHOLE, placement=placement)
    inputs = make_inputs(problem, 24)
    weights = _quantised(inputs, weight_format)
    oracle = exact(problem, inputs)["out"]

    got = w8a8_experts(
        inputs.x, inputs.routing, weights, GPT_OSS, row_format=row_format, placement=placement
    )

    allowed = _in_fp32(problem, inputs, weights, row_format)
    errors = [float((out.double() - oracle).norm() / oracle.norm()) for out in (got, allowed)]
    assert 0 < errors[0] <= 1.05 * errors[1]


def test_layer_rows_are_independent() -> None:
    problem = replace(WHOLE, grad=False)
    inputs = make_inputs(problem, 13)
    weights = _quantised(inputs, FP8)

    def layer(x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        return w8a8_experts(x, Routing(ids, probs), weights, GPT_OSS, row_format=ROWS_FP8)

    tensors = (inputs.x, inputs.routing.topk_ids, inputs.routing.topk_probs)
    whole = layer(*tensors)

    for rows in (slice(0, 1), slice(12, 13), slice(3, 9)):
        assert_bitwise_equal(layer(*(t[rows] for t in tensors)), whole[rows])
    inputs.x[5] = torch.nan
    again = layer(*tensors)
    assert again[5].isnan().all()
    assert_bitwise_equal(again[:5], whole[:5])


def test_layer_refuses_what_it_has_not() -> None:
    inputs = make_inputs(replace(WHOLE, norm_eps=1e-5), 3)
    weights = _quantised(inputs, FP8)

    with pytest.raises(UnsupportedError, match="neither a post-expert norm nor fp64"):
        w8a8_experts(inputs.x, inputs.routing, weights, GPT_OSS, row_format=ROWS_FP8)
    bare = replace(weights, norm=None, norm_scale=None)
    with pytest.raises(ValueError, match=r"x must be torch.bfloat16 of shape \(T, 320\)"):
        w8a8_experts(inputs.x.float(), inputs.routing, bare, GPT_OSS, row_format=ROWS_FP8)
    with pytest.raises(ValueError, match="have the blocks of the rows"):
        w8a8_experts(inputs.x, inputs.routing, bare, GPT_OSS, row_format=MXFP8)


def test_layer_refuses_what_a_layer_refuses() -> None:
    """Ids out of range were dropped, missing tokens left out."""
    problem = replace(WHOLE, grad=False)
    inputs = make_inputs(problem, 4)
    weights, routing = _quantised(inputs, FP8), inputs.routing
    ids, probs = routing.topk_ids, routing.topk_probs

    def layer(x=inputs.x, routing=routing, activation=GPT_OSS, row_format=ROWS_FP8):
        return w8a8_experts(x, routing, weights, activation, row_format=row_format)

    for changed, message in (
        (
            {"routing": Routing(ids * 0 + 6, probs)},
            r"topk_ids must be in \[0, N\) with N = 5, .* 6",
        ),
        ({"routing": Routing(ids * 0 - 2, probs)}, r"topk_ids must be in \[0, N\) .* got -2"),
        ({"routing": Routing(ids[:3], probs[:3])}, r"topk_ids must have shape \(4, K\)"),
        ({"routing": Routing(ids[:, :0], probs[:, :0])}, r"topk_ids must have shape \(4, K\)"),
        ({"routing": Routing(ids.clamp(max=2), probs, 3)}, "num_experts must be at least E = 5"),
        ({"x": inputs.x[0]}, r"x must be .* got torch.bfloat16 of shape \(320,\)"),
        ({"activation": Activation(kind="relu", gated=False)}, r"gate_up must have 1 \* F = 192"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(**changed)
    for changed, message in (
        ({"x": None}, "x must be a Tensor"),
        ({"routing": ids}, "routing must be a Routing"),
        ({"activation": "silu"}, "activation must be an Activation"),
        ({"row_format": "mxfp8"}, "row_format must be a WeightFormat"),
    ):
        with pytest.raises(TypeError, match=message):
            layer(**changed)
    # A model of more experts than are held here.
    more = layer(routing=Routing(torch.where(ids == 0, 7, ids), probs, 9))
    assert_bitwise_equal(more, layer(routing=Routing(torch.where(ids == 0, -1, ids), probs)))


@pytest.mark.parametrize(("row_format", "weight_format"), [(MXFP8, MXFP8), (MXFP8, MXFP4)], ids=str)
def test_layer_under_autocast_is_the_layer(
    row_format: WeightFormat, weight_format: WeightFormat
) -> None:
    inputs = make_inputs(replace(WHOLE, grad=False), 4)
    weights = _quantised(inputs, weight_format)

    def layer() -> Tensor:
        return w8a8_experts(inputs.x, inputs.routing, weights, GPT_OSS, row_format=row_format)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = layer()

    assert_bitwise_equal(within, layer())


def test_products_are_of_one_matrix_each() -> None:
    rows, weight = torch.randn(2, 3, 128), quantize_matrix(torch.randn(2, 4, 128), FP8)

    with pytest.raises(
        ValueError, match=r"rows must be one matrix, \(1, R, K\), got \(2, 3, 128\)"
    ):
        scaled_product(quantize_matrix(rows, ROWS_FP8), weight, 0)
    for expert in (-1, 2):
        with pytest.raises(ValueError, match=rf"expert must be in \[0, 2\), got {expert}"):
            scaled_product(quantize_rows(rows[0], ROWS_FP8), weight, expert)


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
