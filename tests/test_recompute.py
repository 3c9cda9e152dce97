"""A backward that computes the first projection again: nothing kept but inputs, the same bits."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from samebits.backends import grouped, operator, reference
from samebits.errors import UnsupportedError
from samebits.experts import experts, grouped_experts
from samebits.nn import Experts
from samebits.testing.cases import CASES
from samebits.testing.inputs import Inputs, make_inputs, run_function
from samebits.testing.numerics import assert_bitwise_equal

pytestmark = pytest.mark.reference

PROBLEM = CASES["gpt-oss-whole"]
TOKENS = 9


@pytest.fixture
def inputs() -> Inputs:
    return make_inputs(PROBLEM, TOKENS, distribution="dropped")


@pytest.mark.parametrize("backend", ["reference", "grouped"])
def test_gradients_have_the_same_bits(inputs: Inputs, backend: str) -> None:
    layer = partial(experts, backend=backend)
    expected = run_function(PROBLEM, inputs, layer)

    for name, value in run_function(PROBLEM, inputs, partial(layer, recompute=True)).items():
        assert_bitwise_equal(value, expected[name], name)


def test_only_inputs_are_kept(inputs: Inputs) -> None:
    x = inputs.x.requires_grad_()
    kept: dict[bool, list[Tensor]] = {False: [], True: []}
    for recompute, tensors in kept.items():

        def pack(tensor: Tensor, tensors: list[Tensor] = tensors) -> Tensor:
            tensors.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            experts(x, inputs.routing, inputs.weights, recompute=recompute)

    rows, width = inputs.routing.topk_ids.numel(), inputs.weights.gate_up.shape[1]
    assert [tuple(t.shape) for t in kept[False]].count((rows, width)) == 1
    assert sum(t.numel() for t in kept[False]) - sum(t.numel() for t in kept[True]) == rows * width


def test_rows_that_were_sorted_recompute(inputs: Inputs) -> None:
    rows = inputs.x.requires_grad_()
    counts = torch.tensor([0] + [3] * 3 + [0] * (PROBLEM.E - 3))
    results = []
    for recompute in (False, True):
        out = grouped_experts(
            rows, counts.cumsum(0), inputs.weights, PROBLEM.activation, recompute=recompute
        )
        node: Any = out.grad_fn
        results.append((node.saved_tensors[-1].shape[0], *torch.autograd.grad(out.sum(), rows)))

    assert [kept for kept, _ in results] == [TOKENS, 0]
    assert_bitwise_equal(results[1][1], results[0][1], "rows")


def test_forward_and_backward_have_one_backend(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = {True: "it has no gradients", False: None}
    monkeypatch.setattr(grouped, "why_not", lambda problem: reasons[problem.grad])
    ran: list[bool] = []
    forward = reference.forward

    def noted(*arguments: Any, save: bool) -> tuple[Tensor, Tensor]:
        ran.append(save)
        return forward(*arguments, save=save)

    monkeypatch.setattr(reference, "forward", noted)
    x = inputs.x.requires_grad_()
    layer = partial(experts, x, inputs.routing, inputs.weights, recompute=True)

    layer()
    assert ran == [False]
    with pytest.raises(UnsupportedError, match="it has no gradients"):
        layer(backend="grouped")
    with torch.no_grad():
        layer(backend="grouped")


def test_a_compiled_step_recomputes(inputs: Inputs) -> None:
    layer = partial(experts, recompute=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    expected = run_function(PROBLEM, inputs, layer)

    for name, value in run_function(PROBLEM, inputs, compiled).items():
        assert_bitwise_equal(value, expected[name], name)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_it_is_a_truth_value(inputs: Inputs, value: Any) -> None:
    with pytest.raises(TypeError, match="recompute must be a bool"):
        experts(inputs.x, inputs.routing, inputs.weights, recompute=value)
    with pytest.raises(TypeError, match="recompute must be a bool"):
        Experts(num_experts=2, hidden_size=4, intermediate_size=4, recompute=value)


def test_a_module_has_the_option(inputs: Inputs) -> None:
    sizes = {"num_experts": PROBLEM.E, "hidden_size": PROBLEM.H, "intermediate_size": PROBLEM.F}
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        module = Experts(**sizes, recompute=recompute)  # type: ignore[arg-type]
        module(inputs.x.float(), inputs.routing).sum().backward()
        results.append(module.gate_up.grad)
        assert ("recompute=True" in repr(module)) == recompute

    assert_bitwise_equal(results[1], results[0], "gate_up")


def test_a_backward_after_one_that_failed_says_why(inputs: Inputs) -> None:
    x = inputs.x.requires_grad_()
    out = experts(x, inputs.routing, inputs.weights)
    node: Any = out.grad_fn
    # What a GPU's backward leaves where it fails after z was read.
    node.saved_tensors[-1].untyped_storage().resize_(0)

    with pytest.raises(RuntimeError, match="run the forward again"):
        out.sum().backward()


def test_what_is_kept_is_given_back_with_the_graph_alone(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent: list[bool] = []
    compute_backward = operator.compute_backward

    def noted(*arguments: Any, spend: bool) -> Any:
        spent.append(spend)
        return compute_backward(*arguments, spend=spend)

    monkeypatch.setattr(operator, "compute_backward", noted)
    x = inputs.x.requires_grad_()

    def layer(x: Tensor) -> Tensor:
        return experts(x, inputs.routing, inputs.weights)

    out = layer(x)
    torch.autograd.grad(out, x, inputs.dout, retain_graph=True)
    torch.autograd.grad(out, x, inputs.dout)
    # A hook of the caller's may hold what was saved.
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        hooked = layer(x)
    torch.autograd.grad(hooked, x, inputs.dout)
    checkpointed = checkpoint(layer, x, use_reentrant=False)
    torch.autograd.grad(checkpointed, x, inputs.dout)

    assert spent == [False, True, False, False]
