"""Kinds of faults that users reported elsewhere: empty and extreme shapes, NaN, rounding.

Letters and numbers in the names are those of the project's list of faults.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from samebits import (
    Activation,
    ExpertWeights,
    Layout,
    Problem,
    Routing,
    RoutingRule,
    experts,
    grouped_experts,
)
from samebits.testing.inputs import Inputs, exact, make_inputs, plain, run
from samebits.testing.numerics import assert_bitwise_equal, assert_within_budget

pytestmark = pytest.mark.reference

BOTH = pytest.mark.parametrize("backend", ["reference", "grouped"])
SMALL = Problem(H=48, F=80, E=3, K=2, dtype="fp32", grad=True)
GPT_OSS = replace(
    SMALL,
    activation=Activation(alpha=1.702, limit=2.0, linear_offset=1.0),
    layout=Layout(interleave=1),
    gate_up_bias="fp32",
    down_bias="fp32",
)


def _with_ids(inputs: Inputs, ids: Tensor) -> Inputs:
    return replace(
        inputs, routing=Routing(ids, inputs.routing.topk_probs, inputs.routing.num_experts)
    )


def _judge(problem: Problem, inputs: Inputs, backend: str) -> dict[str, Tensor]:
    results = run(problem, inputs, backend)
    budget, oracle = plain(problem, inputs), exact(problem, inputs)
    for name, value in results.items():
        per_expert = name.startswith(("d_gate_up", "d_down"))
        assert_within_budget(
            value, budget[name], oracle[name], torch.float32, name, per_expert=per_expert
        )
    return results


# --- E: empty, degenerate and extreme shapes


@BOTH
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_e6_no_tokens_leave_every_parameter_in_the_graph(backend: str, dtype: str) -> None:
    problem = replace(GPT_OSS, dtype=dtype)

    results = run(problem, make_inputs(problem, 0), backend)

    assert results["out"].shape == (0, 48)
    assert str(results["out"].dtype) == {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[dtype]
    assert results.keys() >= {"d_x", "d_gate_up", "d_down", "d_gate_up_bias", "d_down_bias"}
    for name, value in results.items():
        assert (value == 0).all(), name


@BOTH
def test_e6_all_slots_dropped_leave_every_parameter_in_the_graph(backend: str) -> None:
    inputs = make_inputs(GPT_OSS, 7)
    dropped = torch.where(torch.arange(14).reshape(7, 2) % 2 == 0, -1, 3)
    poisoned = inputs.map(lambda t: t if t.shape != (7, 2) else torch.full_like(t, float("nan")))

    for name, value in run(GPT_OSS, _with_ids(poisoned, dropped), backend).items():
        assert (value == 0).all(), name


def test_e11_one_expert_per_token_normalises_over_experts_not_over_tokens() -> None:
    rule = RoutingRule(topk=1, renormalize=True)

    routing = Routing.from_logits(torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 1.0]]), rule)

    assert routing.topk_probs.tolist() == [[1.0], [1.0], [1.0]]


@BOTH
def test_e12_one_expert_per_token_leaves_the_router_its_gradient(backend: str) -> None:
    problem = replace(SMALL, K=1)
    inputs = make_inputs(problem, 7)
    logits = torch.randn(7, 3).requires_grad_()
    routing = Routing.from_logits(logits, RoutingRule(topk=1))

    out = experts(inputs.x, routing, inputs.weights, backend=backend)

    (grad,) = torch.autograd.grad(out, logits, inputs.dout)
    assert (grad.abs().sum(-1) > 0).all()


@BOTH
@pytest.mark.parametrize("count", [1, 3, 5, 6, 7, 33, 72, 160, 384])
def test_e13_any_number_of_experts(backend: str, count: int) -> None:
    problem = replace(SMALL, H=16, F=24, E=count, K=1)
    inputs = make_inputs(problem, count + 64)
    every = _with_ids(inputs, (torch.arange(count + 64) % count).flip(0)[:, None])

    results = _judge(problem, every, backend)

    assert (results["d_down"].flatten(1).abs().sum(1) > 0).all()


@BOTH
@pytest.mark.parametrize("tokens", [1, 7])
def test_e14_an_expert_that_nobody_chose_is_not_read(backend: str, tokens: int) -> None:
    inputs = make_inputs(GPT_OSS, tokens)
    ids = torch.tensor([[1, 2]] * tokens)
    clean = run(GPT_OSS, _with_ids(inputs, ids), backend)

    def poison(tensor: Tensor) -> Tensor:
        if tensor.shape[0] != 3 or tensor.dim() < 2:
            return tensor
        return torch.cat([torch.full_like(tensor[:1], float("nan")), tensor[1:]])

    weights = inputs.weights.map(poison)
    poisoned = run(GPT_OSS, _with_ids(replace(inputs, weights=weights), ids), backend)

    for name, value in poisoned.items():
        assert_bitwise_equal(value, clean[name], name)
    assert (poisoned["d_gate_up"][0] == 0).all()


@BOTH
@pytest.mark.parametrize("sizes", [(0, 8, 0), (0, 0, 8), (8, 0, 0), (3, 0, 5)])
def test_e1_e4_e16_empty_experts_and_rows_of_no_expert(
    backend: str, sizes: tuple[int, ...]
) -> None:
    inputs = make_inputs(SMALL, 11)
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    results = []
    for filler in (float("nan"), float("inf"), 0.0):
        rows = inputs.x.clone()
        rows[8:] = filler
        rows.requires_grad_()
        weights = inputs.weights.map(lambda t: t.detach().clone().requires_grad_())
        probs = torch.full((11,), 0.5)
        probs[8:] = filler
        out = grouped_experts(rows, offsets, weights, row_probs=probs, backend=backend)
        out.sum().backward()
        results.append([out, rows.grad, weights.gate_up.grad, weights.down.grad])

    for poisoned in results[:2]:
        for value, clean in zip(poisoned, results[2], strict=True):
            assert_bitwise_equal(value, clean)
    out, d_rows, d_gate_up, _ = results[0]
    assert (out[8:] == 0).all()
    assert (d_rows[8:] == 0).all()
    for expert, size in enumerate(sizes):
        assert (d_gate_up[expert] == 0).all() == (size == 0)


@BOTH
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129])
def test_e19_every_side_of_a_path_chosen_by_the_token_count_is_right(
    backend: str, tokens: int
) -> None:
    _judge(GPT_OSS, make_inputs(GPT_OSS, tokens, distribution="zipf"), backend)


@BOTH
def test_duplicate_experts_of_a_token_are_separate_slots(backend: str) -> None:
    inputs = make_inputs(SMALL, 7)

    _judge(SMALL, _with_ids(inputs, torch.tensor([[1, 1]] * 7)), backend)


@BOTH
def test_ids_are_checked_before_they_are_narrowed(backend: str) -> None:
    inputs = make_inputs(SMALL, 7)
    ids = torch.zeros(7, 2, dtype=torch.int64)
    ids[3, 1] = 2**32 + 1

    with pytest.raises(ValueError, match="topk_ids must be in"):
        run(SMALL, _with_ids(inputs, ids), backend)


# --- N: NaN containment


@BOTH
@pytest.mark.parametrize("filler", [float("nan"), float("inf")])
def test_n1_padding_does_not_reach_valid_tokens(backend: str, filler: float) -> None:
    problem = replace(GPT_OSS, counted=True)
    inputs = make_inputs(problem, 9, valid_tokens=5)

    def padded(value: float) -> dict[str, Tensor]:
        x = inputs.x.clone()
        x[5:] = value
        return run(problem, replace(inputs, x=x), backend)

    poisoned, clean = padded(filler), padded(0.0)

    for name, value in poisoned.items():
        assert_bitwise_equal(value, clean[name], name)
    assert (poisoned["out"][5:] == 0).all()
    assert (poisoned["d_x"][5:] == 0).all()


@BOTH
@pytest.mark.parametrize(
    "activation",
    [
        Activation(limit=7.0),
        Activation(limit=7.0, limit_position="post"),
        Activation(kind="relu2"),
        Activation(kind="situ", gate_softcap=4.0, up_softcap=25.0),
    ],
    ids=str,
)
def test_n6_nan_passes_a_clamp_and_stays_in_its_row(backend: str, activation: Activation) -> None:
    problem = replace(SMALL, activation=activation)
    inputs = make_inputs(problem, 7)
    clean = run(problem, inputs, backend)
    x = inputs.x.clone()
    x[3] = float("nan")

    poisoned = run(problem, replace(inputs, x=x), backend)

    others = torch.arange(7) != 3
    for name in ("out", "d_x", "d_topk_probs"):
        assert_bitwise_equal(poisoned[name][others], clean[name][others], name)
        assert poisoned[name][3].isnan().all(), name


# --- R: dtype, rounding, gradients


@BOTH
@pytest.mark.parametrize("at", [-2.0, 2.0])
def test_r3_the_gradient_of_a_clamp_is_one_at_the_bound(backend: str, at: float) -> None:
    # One hidden unit: gate 1, up = x exactly at ±limit; h = silu(1) · up.
    weights = ExpertWeights(gate_up=torch.tensor([[[0.0], [1.0]]]), down=torch.ones(1, 1, 1))
    bias = torch.tensor([[1.0, 0.0]])
    weights = replace(weights, gate_up_bias=bias)
    slopes = []
    for value in (at, at * 1.5):
        x = torch.tensor([[value]], requires_grad=True)
        routing = Routing(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), 1)
        out = experts(x, routing, weights, Activation(limit=2.0), backend=backend)
        slopes.append(float(torch.autograd.grad(out.sum(), x)[0]))

    silu = torch.nn.functional.silu(torch.ones(1)).double()
    assert_within_budget(torch.tensor(slopes[:1]), silu.float(), silu, torch.float32)
    assert slopes[1] == 0.0


@BOTH
def test_r6_the_sum_over_slots_is_taken_in_fp32(backend: str) -> None:
    values = torch.tensor([1.0, 2.0**-9] * 4).bfloat16()
    weights = ExpertWeights(
        gate_up=torch.zeros(8, 2, 4, dtype=torch.bfloat16),
        down=torch.zeros(8, 4, 1, dtype=torch.bfloat16),
        down_bias=values[:, None].expand(8, 4).contiguous(),
    )
    routing = Routing(torch.arange(8)[None], torch.ones(1, 8), 8)
    x = torch.zeros(1, 4, dtype=torch.bfloat16)

    out = experts(x, routing, weights, backend=backend, out_dtype=torch.float32)

    assert out.tolist() == [[4.0 + 4 * 2.0**-9] * 4]


@BOTH
@pytest.mark.parametrize("bias", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("probs", [torch.bfloat16, torch.float32])
def test_r8_dtypes_of_biases_and_probabilities_mix(
    backend: str, bias: torch.dtype, probs: torch.dtype
) -> None:
    names = {torch.bfloat16: "bf16", torch.float32: "fp32"}
    problem = replace(
        GPT_OSS,
        dtype="bf16",
        gate_up_bias=names[bias],
        down_bias=names[bias],
        probs=names[probs],
    )
    inputs = make_inputs(problem, 7)

    results = run(problem, inputs, backend)

    budget, oracle = plain(problem, inputs), exact(problem, inputs)
    assert_within_budget(results["out"], budget["out"], oracle["out"], torch.bfloat16)
    assert results["d_topk_probs"].dtype == probs
    assert results["d_down_bias"].dtype == bias


@BOTH
def test_r13_softmax_before_and_after_the_choice_give_other_outputs(backend: str) -> None:
    inputs = make_inputs(SMALL, 1)
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    before, after = (
        experts(inputs.x, Routing.from_logits(logits, rule), inputs.weights, backend=backend)
        for rule in (RoutingRule(topk=2), RoutingRule(topk=2, topk_first=True))
    )

    # Without renormalisation the probabilities differ by the softmax mass of the two chosen.
    mass = torch.softmax(logits.double(), -1)[0, :2].sum()
    truth = after.double() * mass
    assert_within_budget(before, truth.float(), truth, torch.float32)
