"""Quantised weights on a GPU: the bits of the dense layer, forward and around it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from samebits.backends import repetition
from samebits.experts import experts
from samebits.formats import (
    FP8,
    MXFP4,
    MXFP4_SHUFFLED,
    MXFP8,
    NVFP4,
    WeightFormat,
    dequantize,
    quantize,
)
from samebits.formats.weights import QuantizedWeights
from samebits.ops.indirect_gemm.tuning import (
    QUANTIZED_FEW,
    QUANTIZED_TABLE,
    TABLE,
    supports_upcast,
)
from samebits.problem import Problem, ProbPlacement
from samebits.routing import Permutation, Routing
from samebits.testing.cases import CASES
from samebits.testing.inputs import Inputs, make_inputs
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weights import ExpertWeights, Layout

pytestmark = pytest.mark.gpu

# The last is no power of two and has ragged blocks: it is always made dense.
FORMATS = (FP8, MXFP8, MXFP4, NVFP4, MXFP4_SHUFFLED, WeightFormat(name="fp8", block=(48, 40)))
LAYOUTS = (Layout(), Layout(interleave=1), Layout(interleave=16), Layout(up_first=True))
BOTH = pytest.mark.parametrize("backend", ["fused", "grouped"])
TOKENS = (0, 1, 2, 7, 16, 17, 64, 257)
BASE = replace(CASES["bf16-gpt-oss"], H=256, F=192, E=8, grad=False)


def _layer(
    problem: Problem, inputs: Inputs, weights: ExpertWeights | QuantizedWeights, backend: str
) -> Tensor:
    return experts(
        inputs.x,
        inputs.routing,
        weights,
        problem.activation,
        placement=problem.placement,
        backend=backend,
    )


def _rows(inputs: Inputs, count: int) -> Inputs:
    r = inputs.routing
    picked = Routing(r.topk_ids[:count], r.topk_probs[:count], r.num_experts)
    return replace(inputs, x=inputs.x[:count], routing=picked)


@BOTH
@pytest.mark.parametrize(
    ("dtype", "layout"),
    [*(("bf16", layout) for layout in LAYOUTS), ("fp16", Layout()), ("fp32", Layout())],
    ids=str,
)
@pytest.mark.parametrize("held", FORMATS, ids=str)
def test_bits_of_the_dense_layer(
    held: WeightFormat, dtype: str, layout: Layout, backend: str
) -> None:
    problem = replace(BASE, dtype=dtype, gate_up_bias=dtype, down_bias=dtype, layout=layout)
    whole = make_inputs(problem, max(TOKENS), device="cuda")
    stored = quantize(whole.weights, held)
    dense = dequantize(stored)
    for tokens in TOKENS:
        inputs = _rows(whole, tokens)

        out = _layer(problem, inputs, stored, backend)

        assert_bitwise_equal(out, _layer(problem, inputs, dense, backend), f"T = {tokens}")


@BOTH
@pytest.mark.parametrize("placement", ProbPlacement, ids=str)
def test_every_placement(placement: ProbPlacement, backend: str) -> None:
    problem = replace(BASE, placement=placement)
    for tokens in (5, 300):
        inputs = make_inputs(problem, tokens, distribution="dropped", device="cuda")
        stored = quantize(inputs.weights, MXFP4)

        out = _layer(problem, inputs, stored, backend)

        assert_bitwise_equal(out, _layer(problem, inputs, dequantize(stored), backend))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("held", FORMATS[:5], ids=str)
def test_every_tile_has_the_bits_of_the_dense_table(held: WeightFormat, dtype: torch.dtype) -> None:
    from samebits.ops.indirect_gemm.kernel import launch_first_projection, launch_second_projection
    from samebits.ops.permute.reference import tiles

    ragged = ((64, 192), (2112, 128)) if held.shuffled else ((64, 96), (2080, 160))
    for hidden, columns in (*ragged, (2880, 512)):
        problem = replace(BASE, H=hidden, F=columns)
        inputs = make_inputs(problem, 60, distribution="zipf", device="cuda")
        stored = quantize(inputs.weights.map(lambda t: t.to(dtype)), held)
        dense = dequantize(stored)
        permutation = Permutation.of(inputs.routing.topk_ids, problem.E)
        slots, offsets = permutation.slots.int(), permutation.offsets.int()
        x = inputs.x.to(dtype)

        def both(weights, entry, x=x, slots=slots, offsets=offsets, problem=problem):
            table = tiles(offsets, slots.numel(), entry.first.block_r)
            h, z = launch_first_projection(
                x, slots, table, weights, problem.activation, None, entry.first,
                topk=problem.K, gather=True, save=True,
            )  # fmt: skip
            return (
                z,
                h,
                launch_second_projection(
                    h, slots, table, weights.down, weights.down_bias, None, entry.second
                ),
            )

        expected = both(dense, TABLE[0])
        for entry in (*QUANTIZED_TABLE[held.name], QUANTIZED_FEW[held.name]):
            assert supports_upcast(entry.first, held)
            # Many launches: a race would not show in one.
            for _ in range(20):
                for value, other in zip(both(stored, entry), expected, strict=True):
                    assert_bitwise_equal(value, other, f"{hidden} {columns} {entry}")


@BOTH
@pytest.mark.parametrize("held", FORMATS, ids=str)
def test_repeated_calls_see_the_weights_that_are_there(
    held: WeightFormat, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tests fill the memory that a call takes: here that is no operation of the call.
    monkeypatch.setattr(repetition, "ALLOCATIONS", repetition.ALLOCATIONS | {"fill_"})
    inputs = make_inputs(BASE, 6, device="cuda")
    layers = [
        quantize(make_inputs(BASE, 6, seed=seed, device="cuda").weights, held) for seed in range(3)
    ]
    expected = [_layer(BASE, inputs, dequantize(weights), backend) for weights in layers]
    repetition.forget()

    for number in (0, 1, 2, 0):
        assert_bitwise_equal(_layer(BASE, inputs, layers[number], backend), expected[number])
    # A refit in place.
    for tensor, other in zip(*(w.named_tensors().values() for w in layers[:2]), strict=True):
        tensor.copy_(other)
    assert_bitwise_equal(_layer(BASE, inputs, layers[0], backend), expected[1])
    moved = layers[2].map(torch.clone)
    assert_bitwise_equal(_layer(BASE, inputs, moved, backend), expected[2])
    assert len(repetition.plans()) == 1
    assert repetition.plans()[0] is not None


@pytest.mark.parametrize("exponent", [0, 1, 128, 129, 200, 254, 255])
@pytest.mark.parametrize("held", [MXFP8, MXFP4, MXFP4_SHUFFLED], ids=str)
def test_scales_of_every_size(held: WeightFormat, exponent: int) -> None:
    inputs = make_inputs(BASE, 6, device="cuda")
    stored = quantize(inputs.weights, held)
    if held.shuffled:
        stored.gate_up.scales[:, 0, 3, 1] = exponent
        stored.down.scales[:, 0, 5, 2] = exponent
        # Bytes of no columns.
        stored.down.scales[:, 1, :, 2:] = 255
    else:
        stored.gate_up.scales[:, 3, 1] = exponent
        stored.down.scales[:, 5, 2] = exponent
    dense = dequantize(stored)
    from samebits.ops.dequantize.kernel import launch_dequantize

    made = launch_dequantize(stored.gate_up, torch.bfloat16)

    assert_bitwise_equal(made.nan_to_num(7.0), dense.gate_up.nan_to_num(7.0))
    out = _layer(BASE, inputs, stored, "fused")
    assert_bitwise_equal(out, _layer(BASE, inputs, dense, "fused"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("held", FORMATS, ids=str)
def test_every_code_is_made_dense_as_torch_makes_it(held: WeightFormat, dtype: torch.dtype) -> None:
    from samebits.ops.dequantize.kernel import launch_dequantize

    weights = make_inputs(replace(BASE, H=256, F=256), 1, device="cuda").weights
    matrix = quantize(weights, held).gate_up
    codes = torch.arange(256, device="cuda", dtype=torch.uint8)
    matrix.values.view(torch.uint8)[:, ::3, : codes.numel()] = codes[: matrix.values.shape[2]]

    assert_bitwise_equal(
        launch_dequantize(matrix, dtype).nan_to_num(7.0), matrix.dequantize(dtype).nan_to_num(7.0)
    )


@BOTH
@pytest.mark.parametrize("held", [FP8, MXFP4, MXFP4_SHUFFLED], ids=str)
def test_gradients_around_frozen_weights(held: WeightFormat, backend: str) -> None:
    for tokens in (6, 300):
        inputs = make_inputs(replace(BASE, grad=True), tokens, device="cuda")
        stored = quantize(inputs.weights, held)
        results = []
        frozen = stored.map(Tensor.detach)
        for weights in (frozen, dequantize(frozen)):
            x = inputs.x.detach().requires_grad_()
            probs = inputs.routing.topk_probs.detach().requires_grad_()
            routing = Routing(inputs.routing.topk_ids, probs, inputs.routing.num_experts)
            out = _layer(BASE, replace(inputs, x=x, routing=routing), weights, backend)
            results.append((out, *torch.autograd.grad(out, [x, probs], inputs.dout)))

        for value, expected in zip(*results, strict=True):
            assert_bitwise_equal(value, expected)


@BOTH
@pytest.mark.parametrize("tokens", [3, 200])
def test_experts_without_rows_are_not_read(tokens: int, backend: str) -> None:
    inputs = make_inputs(BASE, tokens, device="cuda")
    inputs.routing.topk_ids.clamp_(max=BASE.E - 2)
    stored = quantize(inputs.weights, MXFP4)
    expected = _layer(BASE, inputs, stored, backend)
    stored.gate_up.scales[-1] = stored.down.scales[-1] = 0xFF

    assert_bitwise_equal(_layer(BASE, inputs, stored, backend), expected)


@BOTH
@pytest.mark.parametrize("held", [FP8, MXFP4, MXFP4_SHUFFLED], ids=str)
def test_graph_replay_and_no_synchronisation(held: WeightFormat, backend: str) -> None:
    for tokens in (4, 200):
        inputs, other = (make_inputs(BASE, tokens, seed=s, device="cuda") for s in (0, 1))
        stored = quantize(inputs.weights, held)
        expected = _layer(BASE, replace(other, weights=inputs.weights), stored, backend)
        torch.cuda.set_sync_debug_mode("error")
        try:
            _layer(BASE, inputs, stored, backend)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = _layer(BASE, inputs, stored, backend)
        inputs.x.copy_(other.x)
        inputs.routing.topk_ids.copy_(other.routing.topk_ids)
        inputs.routing.topk_probs.copy_(other.routing.topk_probs)

        graph.replay()

        assert_bitwise_equal(out, expected)
