"""Kinds of faults that users reported elsewhere: an option that some path drops, doubles or fixes.

Letters and numbers in the names are those of the project's list of faults. None of these needs an
oracle: a changed option must change the result, on every backend, in every dtype.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits import (
    Activation,
    ExpertWeights,
    Layout,
    PostExpertNorm,
    Problem,
    ProbPlacement,
    Routing,
    RoutingRule,
    experts,
)
from samebits.backends import BACKENDS
from samebits.nn import Experts, MoE, Router
from samebits.testing.inputs import judge_all, make_inputs, run
from samebits.testing.numerics import assert_bitwise_equal, bitwise_equal

pytestmark = pytest.mark.reference

BOTH = pytest.mark.parametrize("backend", ["reference", "grouped"])
DTYPES = pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])

# Every option at a value of its own, none neutral.
FULL = Activation(alpha=1.702, limit=2.0, limit_position="pre", linear_offset=0.5)
SITU = Activation(kind="situ", gate_softcap=4.0, up_softcap=5.0, linear_offset=0.5)

# For each option of an activation, two functions that differ in it alone.
PAIRS = {
    "kind": [(Activation(), Activation(kind=kind)) for kind in ("gelu", "gelu_tanh", "relu")]
    + [(Activation(kind="gelu"), Activation(kind="gelu_tanh"))]
    + [(Activation(kind="relu"), Activation(kind="relu2"))],
    "alpha": [(FULL, replace(FULL, alpha=1.3)), (Activation(), Activation(alpha=1.702))],
    "limit": [(FULL, replace(FULL, limit=1.0)), (FULL, replace(FULL, limit=None))],
    "limit_position": [(FULL, replace(FULL, limit_position="post"))],
    "linear_offset": [(FULL, replace(FULL, linear_offset=offset)) for offset in (0.0, 0.25, 1.0)],
    "gate_softcap": [(SITU, replace(SITU, gate_softcap=3.0))],
    "up_softcap": [(SITU, replace(SITU, up_softcap=cap)) for cap in (3.0, None)],
}
SMALL = Problem(H=48, F=80, E=5, K=1, dtype="fp32", grad=True)


def test_d4_every_option_of_an_activation_is_varied() -> None:
    options = {f.name for f in fields(Activation) if f.init}

    # A gate is a matter of shape: the other test below.
    assert PAIRS.keys() == options - {"gated"}


@BOTH
@DTYPES
@pytest.mark.parametrize("option", PAIRS)
def test_d1_d3_d6_d7_an_option_changes_output_and_gradients(
    backend: str, dtype: str, option: str
) -> None:
    for first, second in PAIRS[option]:
        problem = replace(SMALL, dtype=dtype, activation=first)
        inputs = make_inputs(problem, 33)
        before = run(problem, inputs, backend)
        after = run(replace(problem, activation=second), inputs, backend)
        for quantity in ("out", "d_x", "d_gate_up", "d_down"):
            assert not bitwise_equal(before[quantity], after[quantity]), (first, second, quantity)


@BOTH
@DTYPES
def test_d1_a_limit_beyond_every_value_is_no_limit(backend: str, dtype: str) -> None:
    problem = replace(SMALL, dtype=dtype, activation=replace(FULL, limit=None))
    inputs = make_inputs(problem, 33)
    expected = run(problem, inputs, backend)

    found = run(replace(problem, activation=replace(FULL, limit=1e9)), inputs, backend)

    for quantity, value in expected.items():
        assert_bitwise_equal(found[quantity], value, quantity)


@BOTH
def test_a_gate_cannot_be_dropped(backend: str) -> None:
    inputs = make_inputs(SMALL, 5)

    with pytest.raises(ValueError, match="gate_up must have 1"):
        experts(
            inputs.x,
            inputs.routing,
            inputs.weights,
            Activation(kind="relu2", gated=False),
            backend=backend,
        )


def _weights(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(call: dict[str, Any]) -> dict[str, Any]:
        return {"weights": replace(call["weights"], **changes)}

    return change


def _ones(call: dict[str, Any]) -> dict[str, Any]:
    routing: Routing = call["routing"]
    ones = torch.ones_like(routing.topk_probs)
    return {"routing": Routing(routing.topk_ids, ones, routing.num_experts)}


# What else a call may ask for, each changed alone.
CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "placement fc1_input": lambda _: {"placement": ProbPlacement.FC1_INPUT},
    "placement fc2_input": lambda _: {"placement": ProbPlacement.FC2_INPUT},
    "d20 probabilities": _ones,
    "expert_start": lambda _: {"expert_start": 1},
    "num_valid_tokens": lambda _: {"num_valid_tokens": torch.tensor([30], dtype=torch.int32)},
    "layout": _weights(layout=Layout()),
    "layout, order": _weights(layout=Layout(interleave=1, up_first=True)),
    "layout, block": _weights(layout=Layout(interleave=2)),
    "bias of the first projection": _weights(gate_up_bias=None),
    "bias of the second projection": _weights(down_bias=None),
    "norm": _weights(norm=None, norm_scale=None),
    "eps of the norm": _weights(norm=PostExpertNorm(eps=1.0)),
    "scale of the norm": _weights(norm_scale=torch.ones(48)),
}


@BOTH
@pytest.mark.parametrize("option", CHANGES)
def test_d18_d20_an_option_of_a_call_changes_the_output(backend: str, option: str) -> None:
    problem = replace(
        SMALL,
        N=9,
        activation=FULL,
        layout=Layout(interleave=1),
        gate_up_bias="fp32",
        down_bias="fp32",
        norm_eps=1e-5,
    )
    inputs = make_inputs(problem, 33)
    call = {"x": inputs.x, "routing": inputs.routing, "weights": inputs.weights}
    call |= {"activation": FULL, "backend": backend}

    before, after = experts(**call), experts(**(call | CHANGES[option](call)))

    assert not bitwise_equal(before, after)


# Options that some path may know one by one and not together.
FACTORS: dict[str, list[Any]] = {
    "activation": [Activation(), FULL, replace(FULL, limit_position="post"), SITU],
    "placement": list(ProbPlacement),
    "layout": [Layout(), Layout(interleave=1), Layout(interleave=16, up_first=True)],
    "gate_up_bias": [None, "fp32"],
    "down_bias": [None, "fp32"],
    "norm_eps": [None, 1e-5],
    "N": [None, 9],
    "counted": [False, True],
    "K": [1, 3],
}


def _pairwise() -> list[dict[str, Any]]:
    """Return combinations in which each two values of two factors meet at least once."""
    draw = random.Random(0)
    names = list(FACTORS)
    pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(FACTORS[a]))
        for j in range(len(FACTORS[b]))
    }
    chosen = []
    while pairs:
        candidates = [{n: draw.randrange(len(FACTORS[n])) for n in names} for _ in range(60)]
        best = max(candidates, key=lambda c: sum(c[a] == i and c[b] == j for a, i, b, j in pairs))
        pairs = {(a, i, b, j) for a, i, b, j in pairs if not (best[a] == i and best[b] == j)}
        chosen.append({name: FACTORS[name][index] for name, index in best.items()})
    return chosen


@pytest.mark.parametrize("combination", _pairwise(), ids=lambda c: str(replace(SMALL, **c)))
def test_d8_d18_any_two_options_work_together(combination: dict[str, Any]) -> None:
    problem = replace(SMALL, **combination)
    trains = BACKENDS["grouped"].why_not(problem) is None
    problem = replace(problem, grad=trains)
    inputs = make_inputs(problem, 9, distribution="dropped", valid_tokens=7)

    judgements = judge_all(problem, inputs, run(problem, inputs, "grouped"))

    assert {name: str(j) for name, j in judgements.items() if not j.passed} == {}


@BOTH
def test_d10_shared_experts_have_their_own_offset(backend: str) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 80, "backend": backend}
    routed = Activation(limit=2.0, linear_offset=1.0)

    def layer(shared: Activation) -> MoE:
        torch.manual_seed(0)
        return MoE(
            router=Router(hidden_size=48, num_experts=3, rule=RoutingRule(topk=2)),
            experts=Experts(num_experts=3, activation=routed, **sizes),
            shared=Experts(num_experts=1, activation=shared, **sizes),
        )

    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
    module = layer(Activation(linear_offset=0.5))
    alone = Routing(torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1), 1)
    routing, offset = module.router(x).routing, Activation(linear_offset=0.5)
    shared = experts(x, alone, module.shared.weights, offset, backend=backend)
    expected = experts(x, routing, module.experts.weights, routed, backend=backend)

    assert_bitwise_equal(module(x), expected + shared)
    for other in (Activation(), Activation(linear_offset=1.0), routed):
        assert not bitwise_equal(layer(other)(x), module(x))


@BOTH
@pytest.mark.parametrize("value", [-2.0, 2.0])
def test_d21_kinds_that_are_taken_for_one_another_differ(backend: str, value: float) -> None:
    weights = ExpertWeights(gate_up=torch.ones(1, 1, 1), down=torch.ones(1, 1, 1))
    routing = Routing(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))

    def of(**options: Any) -> float:
        x, activation = torch.full((1, 1), value), Activation(gated=False, **options)
        return float(experts(x, routing, weights, activation, backend=backend))

    erf, tanh, quick = of(kind="gelu"), of(kind="gelu_tanh"), of(kind="silu", alpha=1.702)

    # At 2: 1.95450, 1.95460, 1.93565; at -2 each is less by 2.
    assert 5e-5 < abs(erf - tanh) < 2e-4
    assert 1e-2 < abs(erf - quick) < 3e-2
    assert len({erf, tanh, quick, of(kind="silu"), of(kind="relu2"), of(kind="relu")}) >= 5


@BOTH
def test_d23_what_trains_the_router_is_there_on_every_backend(backend: str) -> None:
    def gradient(name: str) -> Tensor:
        torch.manual_seed(0)
        layer = MoE(
            router=Router(hidden_size=48, num_experts=3, rule=RoutingRule(topk=2)),
            experts=Experts(num_experts=3, hidden_size=48, intermediate_size=80, backend=name),
        )
        x = torch.randn(9, 48, generator=torch.Generator().manual_seed(1))
        output = layer(x, losses=True)
        (output.balance_loss + output.z_loss).backward()
        found = layer.router.weight.grad
        assert found is not None
        return found

    assert (gradient(backend) != 0).all()
    assert_bitwise_equal(gradient(backend), gradient("auto"))
