"""Kinds of faults that users reported elsewhere: rounding, narrow dtypes, rows that do not exist.

Letters and numbers in the names are those of the project's list of faults.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from samebits import Activation, ExpertWeights, Problem, ProbPlacement, Routing, experts
from samebits.testing.cases import CASES
from samebits.testing.inputs import make_inputs, run
from samebits.testing.numerics import assert_bitwise_equal, unit_roundoff

pytestmark = pytest.mark.reference

BOTH = pytest.mark.parametrize("backend", ["reference", "grouped"])
RELU = Activation(kind="relu", gated=False)


def _one_expert(x: Tensor, weights: ExpertWeights, backend: str, **options: Any) -> Tensor:
    routing = Routing(torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1))
    return experts(x, routing, weights, backend=backend, **options)


def _through(size: int, dtype: torch.dtype) -> ExpertWeights:
    """Return weights that hand x to gate and up as it is, and h to the output as it is."""
    eye = torch.eye(size, dtype=dtype)
    return ExpertWeights(
        gate_up=torch.eye(2 * size, dtype=dtype)[None],
        down=torch.cat([eye, torch.zeros_like(eye)])[None],
    )


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_r1_the_activation_is_rounded_once(backend: str, dtype: torch.dtype) -> None:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate, up = x.float().chunk(2, -1)

    out = _one_expert(x, _through(64, dtype), backend)

    expected = (gate * (1.0 / (1.0 + torch.exp(-gate))) * up).to(dtype)
    # A sum starts from +0.0: no zero of the output is negative.
    assert_bitwise_equal(out[:, :64], expected + 0.0)


@BOTH
def test_r2_small_results_far_below_zero_keep_their_precision(backend: str) -> None:
    gate = torch.arange(-10.0, -1.75, 0.25).bfloat16()
    x = torch.stack([gate, torch.ones_like(gate)], 1)

    out = _one_expert(x, _through(1, torch.bfloat16), backend)[:, 0].double()

    exact = gate.double() * torch.sigmoid(gate.double())
    assert ((out - exact) / exact).abs().max() <= unit_roundoff(torch.bfloat16)


@BOTH
def test_r4_an_output_beyond_fp16_is_infinite_unless_scaled_before(backend: str) -> None:
    weights = ExpertWeights(
        gate_up=torch.full((1, 1, 1), 100.0).half(), down=torch.full((1, 1, 1), 1000.0).half()
    )
    x, ids = torch.ones(1, 1).half(), torch.zeros(1, 1, dtype=torch.int64)
    small = Routing(ids, torch.full((1, 1), 0.01))

    def out(placement: ProbPlacement) -> float:
        return float(experts(x, small, weights, RELU, placement=placement, backend=backend))

    # y = 1e5 is rounded to fp16 before p = 0.01 scales it (CONTRACT section 5, point 4).
    assert out(ProbPlacement.FC2_OUTPUT) == float("inf")
    assert out(ProbPlacement.FC2_INPUT) == 1000.0


@BOTH
def test_r7_fp32_products_are_not_narrowed(backend: str) -> None:
    x = torch.full((3, 8), 1.0 + 2.0**-12)
    weights = ExpertWeights(gate_up=torch.eye(8)[None], down=torch.eye(8)[None])

    assert_bitwise_equal(_one_expert(x, weights, backend, activation=RELU), x)


SENTINELS = replace(CASES["gpt-oss-whole"], K=1)


@BOTH
@pytest.mark.parametrize("sentinel", [-1, 5])
def test_e5_a_dropped_slot_is_as_if_it_did_not_exist(backend: str, sentinel: int) -> None:
    inputs = make_inputs(SENTINELS, 16)
    kept = torch.arange(16) % 2 == 0
    routing = inputs.routing
    ids = routing.topk_ids.masked_fill(~kept[:, None], sentinel)
    probs = routing.topk_probs.masked_fill(~kept[:, None], float("nan"))
    x = inputs.x.masked_fill(~kept[:, None], float("inf"))
    marked = replace(inputs, x=x, routing=Routing(ids, probs, 5))
    alone = replace(
        inputs,
        x=inputs.x[kept],
        routing=Routing(routing.topk_ids[kept], routing.topk_probs[kept], 5),
        dout=inputs.dout[kept],
    )

    found, expected = (run(SENTINELS, given, backend) for given in (marked, alone))

    for quantity in ("out", "d_x", "d_topk_probs"):
        value = expected.pop(quantity)
        assert_bitwise_equal(found[quantity][kept], value, quantity)
        assert_bitwise_equal(found[quantity][~kept], torch.zeros_like(value), quantity)
    for quantity, value in expected.items():
        assert_bitwise_equal(found[quantity], value, quantity)


@BOTH
@pytest.mark.parametrize("name", ["gpt-oss-whole", "bf16-gpt-oss"])
def test_e3_a_second_backward_is_like_the_first(backend: str, name: str) -> None:
    problem = CASES[name]
    inputs = make_inputs(problem, 17, distribution="dropped")
    first = run(problem, inputs, backend)
    # Memory of another call, which may come back uncleaned.
    run(problem, inputs.map(lambda t: torch.full_like(t, float("nan"))), backend)

    for quantity, value in run(problem, inputs, backend).items():
        assert_bitwise_equal(value, first[quantity], quantity)


@BOTH
def test_e8_no_tokens_pass_compiled_code(backend: str) -> None:
    problem = Problem(H=48, F=80, E=3, K=2, dtype="fp32", grad=True)
    inputs = make_inputs(problem, 0)
    routing, weights = inputs.routing, inputs.weights.map(lambda t: t.requires_grad_())

    def call(x: Tensor) -> Tensor:
        return experts(x, routing, weights, backend=backend)

    torch._dynamo.reset()
    out = torch.compile(call, fullgraph=True, backend="aot_eager")(inputs.x)

    assert out.shape == (0, 48)
    for grad in torch.autograd.grad(out.sum(), [weights.gate_up, weights.down]):
        assert (grad == 0).all()
