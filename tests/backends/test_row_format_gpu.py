"""Activations in 8 bits on a GPU: accurate, the same for every T, and in graphs."""

from dataclasses import replace

import pytest
import torch
from row_format_cases import CASES, FP8_CASE, MXFP8_CASE, errors, in_fp32
from torch import Tensor

from samebits import ProbPlacement, Routing
from samebits.experts import experts, grouped_experts
from samebits.formats import QuantizedWeights
from samebits.problem import Problem
from samebits.testing.inputs import Inputs, exact, make_inputs, run
from samebits.testing.numerics import assert_bitwise_equal, relative_error
from samebits.warmup import warmup

pytestmark = pytest.mark.gpu

EVERY_CASE = pytest.mark.parametrize("name", list(CASES))
MOST = 600


def _layer(problem: Problem, inputs: Inputs) -> Tensor:
    return run(problem, inputs, "grouped")["out"]


def _some(inputs: Inputs, rows: slice) -> Inputs:
    r = inputs.routing
    return replace(
        inputs,
        x=inputs.x[rows],
        routing=Routing(r.topk_ids[rows], r.topk_probs[rows], r.num_experts),
    )


@pytest.mark.parametrize("placement", list(ProbPlacement))
@EVERY_CASE
def test_layer_is_as_accurate_as_its_tensors(name: str, placement: ProbPlacement) -> None:
    problem = replace(CASES[name], placement=placement)
    for tokens in (24, MOST):
        inputs = make_inputs(problem, tokens, device="cuda")
        dense = make_inputs(replace(problem, format=None, row_format=None), tokens)
        oracle = exact(problem, dense)["out"]

        out = _layer(problem, inputs)

        measured, allowed = errors(out, in_fp32(problem, inputs), oracle)
        assert 0 < measured <= 1.05 * allowed, (tokens, measured, allowed)


@EVERY_CASE
def test_layer_is_the_reference_but_for_sums(name: str) -> None:
    """Sums and exp are the device's own: now and then a number is rounded to its neighbour."""
    inputs = make_inputs(CASES[name], 40, distribution="dropped", device="cuda")

    out = _layer(CASES[name], inputs)

    expected = run(CASES[name], inputs, "reference")["out"]
    assert relative_error(out, expected) < 2.0**-7


@EVERY_CASE
def test_rows_are_independent_and_repeat(name: str) -> None:
    problem = CASES[name]
    inputs = make_inputs(problem, MOST, distribution="zipf", device="cuda")
    whole = _layer(problem, inputs)
    for _ in range(10):
        assert_bitwise_equal(_layer(problem, inputs), whole)
    for rows in (
        slice(0, 1),
        slice(MOST - 1, MOST),
        *(slice(3, 3 + n) for n in (2, 7, 16, 65, 257)),
    ):
        assert_bitwise_equal(_layer(problem, _some(inputs, rows)), whole[rows], str(rows))
    inputs.x[5] = torch.nan
    again = _layer(problem, inputs)
    assert again[5].isnan().all()
    assert_bitwise_equal(again[6:], whole[6:])


@pytest.mark.parametrize("problem", [FP8_CASE, MXFP8_CASE], ids=["fp8", "mxfp8"])
def test_experts_without_rows_and_uncounted_tokens_are_not_read(problem: Problem) -> None:
    problem = replace(problem, counted=True)
    inputs = make_inputs(problem, 50, valid_tokens=44, device="cuda")
    inputs.routing.topk_ids.clamp_(max=problem.E - 2)
    expected = _layer(problem, inputs)
    weights = inputs.weights
    assert isinstance(weights, QuantizedWeights)
    for matrix in (weights.gate_up, weights.down):
        for tensor in (matrix.values, matrix.scales):
            tensor[-1].view(torch.uint8).fill_(0xFF)
    inputs.x[44:] = torch.nan

    out = _layer(problem, inputs)

    assert_bitwise_equal(out, expected)
    assert not out[44:].any()


@pytest.mark.parametrize("problem", [FP8_CASE, MXFP8_CASE], ids=["fp8", "mxfp8"])
def test_graph_replay_and_no_synchronisation(problem: Problem) -> None:
    inputs, other = (make_inputs(problem, 60, seed=seed, device="cuda") for seed in (0, 1))
    expected = _layer(problem, replace(other, weights=inputs.weights))
    warmup(problem, [60], backend="grouped")
    torch.cuda.set_sync_debug_mode("error")
    try:
        _layer(problem, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    # run() copies its inputs.
    def layer() -> Tensor:
        return experts(
            inputs.x, inputs.routing, inputs.weights, problem.activation,
            backend="grouped", row_format=problem.row_format,
        )  # fmt: skip

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    inputs.x.copy_(other.x)
    inputs.routing.topk_ids.copy_(other.routing.topk_ids)
    inputs.routing.topk_probs.copy_(other.routing.topk_probs)

    graph.replay()

    assert_bitwise_equal(out, expected)


def test_sorted_rows_have_the_bits_of_the_layer() -> None:
    problem = replace(FP8_CASE, K=1)
    inputs = make_inputs(problem, 70, device="cuda")
    ids = inputs.routing.topk_ids.flatten().sort().values
    offsets = torch.searchsorted(ids, torch.arange(problem.E + 1, device="cuda"))
    probs = inputs.routing.topk_probs
    sorted_inputs = replace(inputs, routing=Routing(ids[:, None], probs, problem.E))

    rows = grouped_experts(
        inputs.x, offsets, inputs.weights, problem.activation,
        row_probs=probs[:, 0], row_format=problem.row_format, backend="grouped",
    )  # fmt: skip

    assert_bitwise_equal(rows, _layer(problem, sorted_inputs))
