"""grouped on CPU: how rows are cut and summed, each way to multiply them, and the norm backward."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from samebits.backends import grouped
from samebits.backends.call import Call
from samebits.backends.grouped.host import Rows
from samebits.problem import DTYPES, Problem, ProbPlacement
from samebits.testing.inputs import Inputs, judge_all, make_inputs, run
from samebits.testing.numerics import assert_bitwise_equal
from samebits.weights import Orientation

pytestmark = pytest.mark.reference

SMALL = Problem(H=48, F=80, E=5, K=3, dtype="fp32")
# With a small eps the norm undoes FC2_INPUT's probability, whose gradient is then rounding noise.
BIASED = replace(SMALL, gate_up_bias="fp32", down_bias="fp32", norm_eps=0.5, grad=True)
STORAGE = pytest.mark.parametrize("storage", ["out_in", "in_out"])
# Rows for each expert on average: one, a few, a chunk's worth, more.
TOKENS = pytest.mark.parametrize("tokens", [1, 3, 21, 130])


def _call(inputs: Inputs) -> Call:
    weights, routing = inputs.weights, inputs.routing
    return Call(
        inputs.x,
        routing.topk_ids,
        routing.topk_probs,
        weights.gate_up,
        weights.down,
        weights.gate_up_bias,
        weights.down_bias,
        weights.norm_scale,
        inputs.num_valid_tokens,
    )


def _integers(inputs: Inputs, storage: Orientation) -> Inputs:
    """Return inputs whose sums are exact in fp32 in any order, and too long for 16 bits."""
    exact = inputs.map(lambda t: (t * 8).round().clamp(-9, 9))
    return replace(exact, weights=exact.weights.to_storage(storage))


@pytest.mark.parametrize("distribution", ["uniform", "zipf", "one", "dropped"])
@pytest.mark.parametrize("tokens", [0, 1, 7, 40, 300])
def test_chunks_hold_whole_experts_and_every_row_once(tokens: int, distribution: str) -> None:
    problem = replace(SMALL, E=12, K=4)
    call = _call(make_inputs(problem, tokens, distribution=distribution))

    rows = Rows(problem, call)
    chunks = list(rows.chunks())

    spans = [chunk.span for chunk in chunks]
    assert [s.start for s in spans] == [0, *(s.stop for s in spans)][: len(spans)]
    assert sum(s.stop - s.start for s in spans) == rows.total
    present = [expert for chunk in chunks for expert in chunk.present]
    assert present == sorted(set(present))
    assert all(len(chunk.tokens) <= 64 or len(chunk.present) == 1 for chunk in chunks)
    assert all(len(chunk.tokens) <= rows.longest for chunk in chunks)
    for chunk in chunks:
        ids = call.topk_ids.reshape(-1)[rows.slots[chunk.span]]
        assert_bitwise_equal(chunk.experts, ids)
        assert [(ids == expert).sum() for expert in chunk.present] == chunk.counts


@STORAGE
@TOKENS
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_bias_is_added_before_the_only_rounding(
    dtype: str, bias: bool, tokens: int, storage: Orientation
) -> None:
    kind = dtype if bias else None
    problem = replace(SMALL, dtype=dtype, gate_up_bias=kind, down_bias=kind)
    inputs = _integers(make_inputs(problem, tokens), storage)
    call = _call(inputs)

    _, z = grouped.forward(problem, call, save=True)

    rows = Rows(problem, call)
    ids = call.topk_ids.reshape(-1)[rows.slots]
    x = call.x[rows.slots // problem.K].double()
    exact = (call.gate_up[ids].double() @ x[:, :, None])[:, :, 0]
    if call.gate_up_bias is not None:
        exact += call.gate_up_bias[ids].double()
    assert_bitwise_equal(z, exact.to(DTYPES[dtype]))


def test_a_token_sums_its_experts_in_ascending_order() -> None:
    problem = replace(SMALL, E=40, K=9)
    call = _call(make_inputs(problem, 17))
    # With K = 1 each slot is its own token, among the same rows: its term, not summed.
    slots = call._replace(
        x=call.x.repeat_interleave(9, 0),
        topk_ids=call.topk_ids.reshape(-1, 1),
        topk_probs=call.topk_probs.reshape(-1, 1),
    )
    terms = grouped.forward(replace(problem, K=1), slots, save=False)[0].view(17, 9, -1)

    out, _ = grouped.forward(problem, call, save=False)

    order = call.topk_ids.argsort(dim=1, stable=True)[:, :, None].expand_as(terms)
    ascending = terms.gather(1, order).unbind(1)
    assert_bitwise_equal(out, _sum(ascending))
    assert not torch.equal(out, _sum(ascending[::-1]))


def _sum(terms: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(terms[0])
    for term in terms:
        total += term
    return total


@STORAGE
@TOKENS
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_gradient_within_budget(dtype: str, tokens: int, storage: Orientation) -> None:
    problem = replace(SMALL, dtype=dtype, gate_up_bias=dtype, down_bias=dtype, grad=True)
    inputs = make_inputs(problem, tokens)
    inputs = replace(inputs, weights=inputs.weights.to_storage(storage))

    judgements = judge_all(problem, inputs, run(problem, inputs, "grouped"))

    assert not {name: str(j) for name, j in judgements.items() if not j.passed}


@STORAGE
@pytest.mark.parametrize("sizes", [(1, 4), (4, 1), (1, 8), (8, 1), (8, 2), (12, 4)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_sizes_that_the_grouped_product_of_torch_refuses(
    dtype: str, sizes: tuple[int, int], storage: Orientation
) -> None:
    problem = replace(SMALL, H=sizes[0], F=sizes[1], dtype=dtype, grad=True)
    inputs = make_inputs(problem, 2)
    inputs = replace(inputs, weights=inputs.weights.to_storage(storage))

    judgements = judge_all(problem, inputs, run(problem, inputs, "grouped"))

    assert not {name: str(j) for name, j in judgements.items() if not j.passed}


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("placement", list(ProbPlacement))
def test_gradients_through_the_norm(placement: ProbPlacement, dtype: str) -> None:
    probs = "fp64" if dtype == "fp64" else "fp32"
    problem = replace(BIASED, placement=placement, dtype=dtype, probs=probs)
    inputs = make_inputs(problem, 9, distribution="dropped")

    judgements = judge_all(problem, inputs, run(problem, inputs, "grouped"))

    assert "d_norm_scale" in judgements
    assert not {name: str(j) for name, j in judgements.items() if not j.passed}


class _Largest(TorchDispatchMode):
    """Record the size of the largest storage that is not one of those given."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in self._known:
            self.bytes = max(self.bytes, out.untyped_storage().nbytes())
        return out


@STORAGE
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_weights_are_not_copied(dtype: str, storage: Orientation) -> None:
    problem = replace(SMALL, H=256, F=256, dtype=dtype)
    inputs = make_inputs(problem, 2)
    call = _call(replace(inputs, weights=inputs.weights.to_storage(storage)))

    with _Largest(*call[:5]) as largest:
        grouped.forward(problem, call, save=False)

    one_expert = call.down[0].numel() * call.down.element_size()
    assert 0 < largest.bytes < one_expert


def test_an_expert_without_rows_has_no_gradient() -> None:
    problem = replace(SMALL, E=40, gate_up_bias="fp32", down_bias="fp32", grad=True)
    inputs = make_inputs(problem, 4)
    bounds = Rows(problem, _call(inputs)).bounds
    idle = [expert for expert, (start, stop) in enumerate(pairwise(bounds)) if start == stop]

    results = run(problem, inputs, "grouped")

    assert idle
    for name in ("d_gate_up", "d_down", "d_gate_up_bias", "d_down_bias"):
        assert not results[name][idle].any()
