"""Activations in 8 bits in the reference: accurate, row by row, refused where there is nothing."""

from dataclasses import replace

import pytest
import torch
from row_format_cases import CASES, FP8_CASE, GPT_OSS, MXFP4_CASE, MXFP8_CASE, errors, in_fp32
from torch import Tensor

from samebits import Activation, ProbPlacement, Routing, UnsupportedError
from samebits.backends import explain
from samebits.experts import experts, grouped_experts
from samebits.formats import FP8, MXFP4, MXFP8, ROWS_FP8, FormatPair, WeightFormat, dequantize
from samebits.nn import LoRAExperts, QuantizedExperts
from samebits.parallel import ParallelQuantizedExperts
from samebits.problem import Problem
from samebits.testing.inputs import Inputs, exact, make_inputs, run
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.reference


def _layer(inputs: Inputs, x: Tensor, ids: Tensor, probs: Tensor, **options) -> Tensor:
    routing, options = Routing(ids, probs), {"row_format": ROWS_FP8} | options
    return experts(x, routing, inputs.weights, GPT_OSS, backend="reference", **options)


@pytest.mark.parametrize("placement", list(ProbPlacement))
@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_layer_is_as_accurate_as_its_tensors(name: str, placement: ProbPlacement) -> None:
    problem = replace(CASES[name], placement=placement)
    inputs = make_inputs(problem, 24)
    # Of the weights as they were: without them quantised.
    dense = make_inputs(replace(problem, format=None, row_format=None), 24)
    oracle = exact(problem, dense)["out"]

    out = run(problem, inputs, "reference")["out"]

    measured, allowed = errors(out, in_fp32(problem, inputs), oracle)
    assert 0 < measured <= 1.05 * allowed


def test_layer_rows_are_independent() -> None:
    inputs = make_inputs(FP8_CASE, 13)
    tensors = (inputs.x, inputs.routing.topk_ids, inputs.routing.topk_probs)
    whole = _layer(inputs, *tensors)

    for rows in (slice(0, 1), slice(12, 13), slice(3, 9)):
        assert_bitwise_equal(_layer(inputs, *(t[rows] for t in tensors)), whole[rows])
    inputs.x[5] = torch.nan
    again = _layer(inputs, *tensors)
    assert again[5].isnan().all()
    assert_bitwise_equal(again[:5], whole[:5])


def test_rows_in_8_bits_are_another_layer() -> None:
    inputs = make_inputs(FP8_CASE, 5)
    tensors = (inputs.x, inputs.routing.topk_ids, inputs.routing.topk_probs)

    quantised = _layer(inputs, *tensors)

    assert not torch.equal(quantised, _layer(inputs, *tensors, row_format=None))
    module = QuantizedExperts(inputs.weights, GPT_OSS, row_format=ROWS_FP8)
    with torch.no_grad():
        assert_bitwise_equal(module(inputs.x, inputs.routing), quantised)


@pytest.mark.parametrize("problem", [MXFP8_CASE, MXFP4_CASE], ids=["mxfp8", "mxfp4"])
def test_layer_under_autocast_is_the_layer(problem: Problem) -> None:
    inputs = make_inputs(problem, 4)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = run(problem, inputs, "reference")["out"]

    assert_bitwise_equal(within, run(problem, inputs, "reference")["out"])


def test_sorted_rows_are_the_layer_of_one_choice() -> None:
    inputs = make_inputs(replace(FP8_CASE, K=1), 6)
    ids = inputs.routing.topk_ids.flatten().sort().values
    offsets = torch.searchsorted(ids, torch.arange(FP8_CASE.E + 1))
    probs = torch.rand(6)

    rows = grouped_experts(
        inputs.x, offsets, inputs.weights, GPT_OSS, row_probs=probs, row_format=ROWS_FP8
    )

    expected = _layer(inputs, inputs.x, ids[:, None], probs[:, None])
    assert_bitwise_equal(rows, expected)


def test_one_graph_computes_it() -> None:
    inputs = make_inputs(FP8_CASE, 5)
    tensors = (inputs.x, inputs.routing.topk_ids, inputs.routing.topk_probs)

    compiled = torch.compile(
        lambda *given: _layer(inputs, *given), fullgraph=True, backend="aot_eager"
    )

    assert_bitwise_equal(compiled(*tensors), _layer(inputs, *tensors))


def test_what_is_missing_is_refused() -> None:
    inputs = make_inputs(FP8_CASE, 3)
    tensors = (inputs.x.requires_grad_(), inputs.routing.topk_ids, inputs.routing.topk_probs)

    with pytest.raises(UnsupportedError, match="activations in 8 bits have no gradient"):
        _layer(inputs, *tensors)
    for device, problem, backend, reason in (
        ("cpu", FP8_CASE, "grouped", "it has activations in 8 bits on a GPU, not on cpu"),
        ("sm_90", FP8_CASE, "fused", "it has no activations in 8 bits"),
        ("sm_90", FP8_CASE, "grouped", None),
        ("sm_90", MXFP8_CASE, "grouped", None),
        ("sm_80", MXFP4_CASE, "grouped", None),
        ("sm_80", FP8_CASE, "grouped", "Triton reads E4M3 numbers on sm_89 or newer"),
        ("sm_90", replace(MXFP8_CASE, dtype="fp16"), "grouped", "may be beyond fp16"),
        ("sm_90", replace(FP8_CASE, grad=True), "grouped", "have no gradient"),
        ("sm_90", replace(FP8_CASE, dtype="fp64", probs="fp64"), "reference", "those of bf16"),
    ):
        found = explain(replace(problem, device=device))[backend]
        assert found == reason if reason is None else reason in found, (device, backend)
    narrow = WeightFormat(name="fp8", block=(64, 64))
    smaller = replace(
        FP8_CASE,
        format=FormatPair(gate_up=narrow, down=narrow),
        row_format=WeightFormat(name="fp8", block=(1, 64)),
        device="sm_90",
    )
    assert explain(smaller)["grouped"] == "its kernels take blocks of 128 columns, not 64"


def test_wrappers_that_would_forget_it_are_refused() -> None:
    module = QuantizedExperts(make_inputs(FP8_CASE, 1).weights, GPT_OSS, row_format=ROWS_FP8)

    with pytest.raises(UnsupportedError, match="merged into dense weights"):
        LoRAExperts(module, gate_up_rank=2, down_rank=0, scaling=1.0)
    # As the parallel style does.
    module.__class__ = ParallelQuantizedExperts
    with pytest.raises(UnsupportedError, match="over ranks have no activations in 8 bits"):
        module.local_weights()


def test_formats_that_do_not_go_together_are_refused() -> None:
    inputs = make_inputs(FP8_CASE, 3)
    dense = replace(inputs, weights=dequantize(inputs.weights))
    tensors = (inputs.x, inputs.routing.topk_ids, inputs.routing.topk_probs)

    for given, row_format, message in (
        (inputs, MXFP8, r"the weights' blocks \(gate_up: fp8_128x128\), got mxfp8"),
        (inputs, FP8, "row_format must be fp8_1x128 or mxfp8, got fp8_128x128"),
        (inputs, MXFP4, "row_format must be fp8_1x128 or mxfp8, got mxfp4"),
        (dense, ROWS_FP8, "row_format must be None where weights are not quantised"),
    ):
        with pytest.raises(ValueError, match=message):
            _layer(given, *tensors, row_format=row_format)
    with pytest.raises(TypeError, match="row_format must be a WeightFormat"):
        _layer(inputs, *tensors, row_format="mxfp8")
    with pytest.raises(ValueError, match="the weights' blocks"):
        QuantizedExperts(inputs.weights, Activation(), row_format=MXFP8)


def test_problems_spell_it() -> None:
    text = "format=fp8_128x128 row_format=fp8_1x128"

    assert text in str(FP8_CASE)
    assert Problem.parse(str(FP8_CASE)) == FP8_CASE
