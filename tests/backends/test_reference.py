"""Each backend against formulas written a second time, slot by slot, and numeric gradients."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from samebits.problem import Problem, ProbPlacement
from samebits.testing.cases import CASES
from samebits.testing.inputs import Inputs, make_inputs, run, widened
from samebits.testing.numerics import assert_within_budget

pytestmark = pytest.mark.reference

_ACT = {
    "silu": lambda v, alpha: v / (1 + math.exp(-alpha * v)),
    "gelu": lambda v, _: v * 0.5 * math.erfc(-v / math.sqrt(2)),
    "gelu_tanh": lambda v, _: (
        v / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
    ),
    "relu": lambda v, _: max(v, 0.0),
    "relu2": lambda v, _: max(v, 0.0) ** 2,
}


def _gate_and_up(z: Tensor, problem: Problem) -> list[tuple[float, float]]:
    columns, block = problem.F, problem.layout.interleave or problem.F
    pairs = []
    for f in range(columns):
        first = f // block * 2 * block + f % block
        gate, up = (first + block, first) if problem.layout.up_first else (first, first + block)
        pairs.append((float(z[gate]), float(z[up])))
    return pairs


def _h(gate: float, up: float, problem: Problem) -> float:
    a = problem.activation
    limit = math.inf if a.limit is None else a.limit
    up = min(max(up, -limit), limit)
    if a.kind == "situ":
        assert a.gate_softcap is not None
        act = a.gate_softcap * math.tanh(gate / a.gate_softcap) / (1 + math.exp(-gate))
        up = up if a.up_softcap is None else a.up_softcap * math.tanh(up / a.up_softcap)
    elif a.limit_position == "pre":
        act = _ACT[a.kind](min(gate, limit), a.alpha)
    else:
        act = min(_ACT[a.kind](gate, a.alpha), limit)
    return act * (up + a.linear_offset)


def _slot_by_slot(problem: Problem, inputs: Inputs) -> Tensor:
    w, a = inputs.weights, problem.activation
    out = torch.zeros(inputs.x.shape, dtype=torch.float64)
    live = len(inputs.x) if inputs.num_valid_tokens is None else int(inputs.num_valid_tokens)
    for t in range(live):
        for k in range(problem.K):
            expert = int(inputs.routing.topk_ids[t, k]) - problem.expert_start
            p = float(inputs.routing.topk_probs[t, k])
            if not 0 <= expert < problem.E:
                continue
            scaled = {place: p if place == problem.placement else 1.0 for place in ProbPlacement}
            z = w.gate_up[expert] @ (inputs.x[t] * scaled[ProbPlacement.FC1_INPUT])
            z = z if w.gate_up_bias is None else z + w.gate_up_bias[expert]
            if a.gated:
                h = [_h(gate, up, problem) for gate, up in _gate_and_up(z, problem)]
            else:
                h = [_ACT[a.kind](float(v), a.alpha) for v in z]
            y = w.down[expert] @ torch.tensor(h, dtype=torch.float64)
            y = y if w.down_bias is None else y + w.down_bias[expert]
            y = y * scaled[ProbPlacement.FC2_INPUT]
            if w.norm_scale is not None and problem.norm_eps is not None:
                # The norm sees the scaled product, so the factor must be in before it.
                y = y * w.norm_scale
                y = y / torch.sqrt((y * y).mean() + problem.norm_eps)
            out[t] += y * scaled[ProbPlacement.FC2_OUTPUT]
    return out


@pytest.mark.parametrize("name", CASES)
def test_output_equals_the_formula_slot_by_slot(name: str) -> None:
    problem = widened(CASES[name])
    inputs = make_inputs(problem, 6, distribution="dropped", valid_tokens=4)

    out = run(replace(problem, grad=False), inputs, "reference")["out"]

    expected = _slot_by_slot(problem, inputs)
    assert_within_budget(out, expected, expected, torch.float64)


@pytest.mark.parametrize(
    "name", ["gpt-oss-whole", "fc1_input", "fc2_input", "norm", "situ", "relu2"]
)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_gradients_equal_finite_differences(name: str, backend: str) -> None:
    problem = replace(widened(CASES[name]), grad=True)
    inputs = make_inputs(problem, 4)
    tensors = {"x": inputs.x, "gate_up": inputs.weights.gate_up, "down": inputs.weights.down}
    generator = torch.Generator().manual_seed(1)
    grads = run(problem, inputs, backend)
    for quantity, tensor in tensors.items():
        direction = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        step = 1e-6

        values = []
        for sign in (1, -1):
            moved = tensor + sign * step * direction
            where = (
                {"x": moved}
                if quantity == "x"
                else {"weights": replace(inputs.weights, **{quantity: moved})}
            )
            out = run(replace(problem, grad=False), replace(inputs, **where), backend)["out"]
            values.append((out * inputs.dout).sum())

        slope = (values[0] - values[1]) / (2 * step)
        predicted = (grads[f"d_{quantity}"] * direction).sum()
        # Central differences in fp64 are good to about the square root of eps.
        assert_within_budget(
            slope.reshape(1).float(), predicted.reshape(1), predicted.reshape(1), torch.bfloat16
        )
