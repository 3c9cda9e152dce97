"""The operator boundary of a layer: what it refuses and what it promises to torch."""

import pytest
import torch

from samebits import Activation, Layout, ProbPlacement
from samebits.backends import operator
from samebits.backends.call import DIFFERENTIABLE, INPUTS, Call
from samebits.backends.options import Options
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


@pytest.mark.parametrize("backend", ["grouped", "reference"])
def test_operators_pass_opcheck(backend: str) -> None:
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
        *[None] * (INPUTS - 7),
    )
    options = f"{problem.activation.key}|fc2_output|{problem.layout.key}|||{backend}|||"
    call = (*tensors, options, problem.E, 0)
    _, z = torch.ops.samebits.experts_forward(*call, True)
    gradient = (*tensors, z, torch.rand_like(inputs.x), options, problem.E, 0)
    wanted = [name != "norm_scale" for name in DIFFERENTIABLE]
    buffers = [torch.zeros_like(t) for t in weights.named_tensors().values()]

    torch.library.opcheck(torch.ops.samebits.experts_forward.default, (*call, True))
    torch.library.opcheck(torch.ops.samebits.experts_backward.default, (*gradient, wanted))
    torch.library.opcheck(
        torch.ops.samebits.experts_backward_into.default,
        (buffers, *gradient, wanted, [True] * len(buffers)),
    )


@pytest.mark.parametrize("backend", ["grouped", "reference"])
def test_gradients_have_the_strides_that_the_compiler_is_told(backend: str) -> None:
    """Tensors in storage that no backend would choose: columns first, rows of a wider buffer."""
    tokens, topk, num_experts, hidden, columns = 5, 2, 3, 8, 6
    call = Call(
        x=torch.randn(tokens, 2 * hidden)[:, :hidden],
        topk_ids=torch.zeros(topk, tokens, dtype=torch.int64).T,
        topk_probs=torch.rand(topk, tokens).T,
        gate_up=torch.randn(num_experts, hidden, 2 * columns).transpose(1, 2),
        down=torch.randn(num_experts, columns, hidden).transpose(1, 2),
        gate_up_bias=torch.randn(2 * columns, num_experts).T,
        down_bias=torch.randn(hidden, num_experts).T,
        norm_scale=None,
        num_valid_tokens=None,
    )
    options = Options(Activation(), ProbPlacement.FC2_OUTPUT, Layout(), None, None, backend)
    _, z = torch.ops.samebits.experts_forward(*call[:INPUTS], options.text(), num_experts, 0, True)
    wanted = [getattr(call, name) is not None for name in DIFFERENTIABLE]
    arguments = (
        *call[:INPUTS],
        z,
        torch.rand(tokens, hidden),
        options.text(),
        num_experts,
        0,
        wanted,
    )

    gradients = torch.ops.samebits.experts_backward(*arguments)

    promised = operator._backward_fake(*arguments)
    assert [g.stride() for g in gradients] == [g.stride() for g in promised]
    assert gradients[1].stride() == (1, tokens)
