"""Kinds of faults that users reported elsewhere, of experts spread over ranks, on one process.

A rank holds some experts, sees the model's ids, and returns its part of the sum; the parts are
added here as a reduction would add them. Letters and numbers in the names are those of the
project's list of faults.
"""

from dataclasses import replace

import pytest
import torch

from samebits import Problem, ProbPlacement, Routing
from samebits.testing.inputs import PER_EXPERT, Inputs, exact, judge_all, make_inputs, plain, run
from samebits.testing.numerics import assert_bitwise_equal, assert_within_budget

pytestmark = pytest.mark.reference

BOTH = pytest.mark.parametrize("backend", ["reference", "grouped"])
# The experts of each rank; 5 over 2 and 3 do not divide.
SPLITS = pytest.mark.parametrize("split", [[3, 2], [1, 3, 1], [1, 1, 1, 1, 1]], ids=str)
PLACEMENTS = pytest.mark.parametrize("placement", list(ProbPlacement))
WHOLE = Problem(
    H=48, F=80, E=5, K=3, dtype="fp32", gate_up_bias="fp32", down_bias="fp32", grad=True
)


def ranks(problem: Problem, inputs: Inputs, split: list[int]) -> list[tuple[Problem, Inputs]]:
    """Return the problem and the inputs of each rank; every rank sees every token."""
    found, start = [], 0
    for count in split:
        weights = inputs.weights.map(lambda t, s=start, n=count: t[s : s + n])
        local = replace(problem, E=count, N=problem.E, expert_start=start)
        found.append((local, replace(inputs, weights=weights)))
        start += count
    return found


@BOTH
@SPLITS
@PLACEMENTS
def test_p4_p5_p6_parts_and_their_gradients_add_up(
    backend: str, split: list[int], placement: ProbPlacement
) -> None:
    problem = replace(WHOLE, placement=placement)
    inputs = make_inputs(problem, 9, distribution="dropped")
    parts = [run(p, i, backend) for p, i in ranks(problem, inputs, split)]
    budget, oracle = plain(problem, inputs), exact(problem, inputs)

    for quantity, value in oracle.items():
        of_ranks = [part[quantity] for part in parts]
        per_expert = quantity in PER_EXPERT
        # Gradients of parameters stay with their rank; all else is summed over ranks.
        together = torch.cat(of_ranks) if per_expert else torch.stack(of_ranks).sum(0)
        assert_within_budget(
            together, budget[quantity], value, torch.float32, quantity, per_expert=per_expert
        )


@BOTH
def test_p2_every_rank_takes_the_ids_of_the_model(backend: str) -> None:
    inputs = make_inputs(WHOLE, 9)

    for local, given in ranks(WHOLE, inputs, [2, 2, 1]):
        judgements = judge_all(local, given, run(local, given, backend))
        assert {name: str(j) for name, j in judgements.items() if not j.passed} == {}


@BOTH
def test_p6_a_rank_has_the_parameter_gradients_of_the_whole(backend: str) -> None:
    inputs = make_inputs(WHOLE, 9)
    whole = run(WHOLE, inputs, backend)

    for local, given in ranks(WHOLE, inputs, [3, 2]):
        found = run(local, given, backend)
        for quantity in PER_EXPERT:
            held = whole[quantity][local.expert_start :][: local.E]
            assert_bitwise_equal(found[quantity], held, quantity)


@BOTH
def test_p8_a_bias_is_added_by_the_rank_that_has_the_expert(backend: str) -> None:
    inputs = make_inputs(WHOLE, 9)
    bias = torch.arange(1.0, 6.0)[:, None].expand(5, 48).contiguous()
    weights = replace(inputs.weights.map(torch.zeros_like), down_bias=bias)
    split = ranks(WHOLE, replace(inputs, weights=weights), [2, 3])

    parts = torch.stack([run(p, i, backend)["out"] for p, i in split])

    routing = inputs.routing
    once = (routing.topk_probs * (routing.topk_ids + 1)).sum(1, keepdim=True).expand(9, 48)
    assert_within_budget(parts.sum(0), once, once.double(), torch.float32)


@BOTH
def test_e9_a_rank_without_rows_keeps_its_parameters_in_the_graph(backend: str) -> None:
    inputs = make_inputs(WHOLE, 9)
    first = torch.zeros_like(inputs.routing.topk_ids)
    routing = Routing(first, inputs.routing.topk_probs, 5)
    _, (idle, given) = ranks(WHOLE, replace(inputs, routing=routing), [3, 2])

    found = run(idle, given, backend)

    assert found.keys() == run(WHOLE, inputs, backend).keys()
    for quantity, value in found.items():
        assert (value == 0).all(), quantity
