"""Gradients against finite differences in fp64: every activation, layout, bias, norm, place."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from samebits.experts import experts
from samebits.problem import Problem, ProbPlacement
from samebits.routing import Routing
from samebits.testing.cases import CASES
from samebits.testing.inputs import make_inputs, options_of, widened

pytestmark = pytest.mark.reference


def _tiny(problem: Problem) -> Problem:
    """The problem at a size that gradcheck can afford, without what has no gradient of its own."""
    layout = problem.layout
    if layout.interleave is not None:
        layout = replace(layout, interleave=min(layout.interleave, 2))
    tiny = replace(problem, H=5, F=4, E=3, K=2, N=None, expert_start=0, layout=layout)
    return replace(widened(replace(tiny, counted=False)), grad=True)


# Each combination once; where the probability goes is asked of all of them.
PROBLEMS = {
    str(tiny): tiny
    for problem in CASES.values()
    if problem.format is None
    for placement in ProbPlacement
    for tiny in [replace(_tiny(problem), placement=placement)]
}


def test_the_catalogue_has_every_option_that_gradients_depend_on() -> None:
    problems = PROBLEMS.values()
    assert len({problem.activation for problem in problems}) >= 16
    assert len({problem.layout for problem in problems}) >= 4
    assert {problem.placement for problem in problems} == set(ProbPlacement)
    assert any(problem.gate_up_bias and problem.down_bias for problem in problems)
    assert any(problem.norm_eps for problem in problems)


@pytest.mark.parametrize("backend", ["reference", "grouped"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_gradient_equals_finite_differences(name: str, backend: str) -> None:
    problem = PROBLEMS[name]
    inputs = make_inputs(problem, 4, distribution="dropped")
    tensors = {"x": inputs.x, "topk_probs": inputs.routing.topk_probs}
    tensors |= inputs.weights.named_tensors()

    def layer(*values: Tensor) -> Tensor:
        held = dict(zip(tensors, values, strict=True))
        x, probs = held.pop("x"), held.pop("topk_probs")
        return experts(
            x,
            Routing(inputs.routing.topk_ids, probs, problem.E),
            replace(inputs.weights, **held),
            problem.activation,
            backend=backend,
            **options_of(problem, None),
        )

    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors.values()]

    assert all(leaf.dtype == torch.float64 for leaf in leaves)
    assert gradcheck(layer, leaves, fast_mode=True)
