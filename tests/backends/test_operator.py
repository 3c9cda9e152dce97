"""The operator boundary of a layer: what it refuses and what it promises to torch."""

import pytest
import torch

from samebits.errors import UnsupportedError
from samebits.experts import experts
from samebits.testing.cases import CASES
from samebits.testing.inputs import make_inputs

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("backend", ["reference", "grouped"])
def test_second_derivatives_are_refused(backend: str) -> None:
    inputs = make_inputs(CASES["swiglu"], 4)
    x = inputs.x.requires_grad_()
    out = experts(x, inputs.routing, inputs.weights, backend=backend)

    with pytest.raises(UnsupportedError, match="no second derivatives"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_operators_pass_opcheck() -> None:
    problem = CASES["gpt-oss-whole"]
    inputs = make_inputs(problem, 4)
    weights = inputs.weights
    tensors = (
        inputs.x,
        inputs.routing.topk_ids,
        inputs.routing.topk_probs,
        weights.gate_up,
        weights.down,
        weights.gate_up_bias,
        weights.down_bias,
        None,
        None,
    )
    options = f"{problem.activation.key}|fc2_output|{problem.layout.key}|||grouped"

    torch.library.opcheck(
        torch.ops.samebits.experts_forward.default, (*tensors, options, problem.E, 0, True)
    )
