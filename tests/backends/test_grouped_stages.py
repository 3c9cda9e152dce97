"""The stages of the grouped backend on a GPU, in the interpreter: every way through them."""

from dataclasses import replace

import pytest

from samebits.backends.call import Call
from samebits.backends.grouped import device
from samebits.ops.grouped_gemm import tuning
from samebits.ops.indirect_gemm.tuning import Config
from samebits.problem import Problem, ProbPlacement
from samebits.testing.cases import CASES
from samebits.testing.inputs import Inputs, exact, make_inputs, plain
from samebits.testing.numerics import assert_within_budget

pytestmark = [
    pytest.mark.interpret,
    # Rows past the last expert's hold whatever memory held; they are multiplied, never stored.
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
]


def _on_gpu(name: str) -> Problem:
    return replace(CASES[name], grad=False, device="sm_80")


# One case for each way through the stages; activations and layouts have tests of their own.
NAMES = (
    "gpt-oss-whole",
    "interleave-16",
    "relu2",
    "local-experts",
    "counted",
    "odd-sizes",
    "tiny-sizes",
    *map(str, ProbPlacement),
)
TILE = Config(block_r=16, block_n=32, block_k=32, num_warps=4, num_stages=2, programs=3)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "config_of", lambda *_: TILE)


def _call(inputs: Inputs) -> Call:
    weights, routing = inputs.weights, inputs.routing
    return Call(
        inputs.x, routing.topk_ids, routing.topk_probs, weights.gate_up, weights.down,
        weights.gate_up_bias, weights.down_bias, weights.norm_scale, inputs.num_valid_tokens,
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_output_within_budget(name: str) -> None:
    problem = replace(CASES[name], grad=False)
    inputs = make_inputs(problem, 5, distribution="dropped", valid_tokens=4)

    out, z = device.forward(_on_gpu(name), _call(inputs), save=False)

    oracle = exact(problem, inputs)["out"]
    assert_within_budget(out, plain(problem, inputs)["out"], oracle, out.dtype)
    assert z.shape[0] == 0


def test_training_keeps_the_first_projection_and_no_tokens_are_legal() -> None:
    problem = _on_gpu("gpt-oss-whole")
    inputs = make_inputs(problem, 5)

    out, z = device.forward(problem, _call(inputs), save=True)
    nothing, _ = device.forward(problem, _call(make_inputs(problem, 0)), save=False)

    assert z.shape == (5 * problem.K, 2 * problem.F)
    assert bool(out.isfinite().all())
    assert bool(z.isfinite().all())
    assert nothing.shape == (0, problem.H)


def test_what_it_cannot_do_has_a_reason() -> None:
    base = _on_gpu("swiglu")
    reasons = {
        "its kernels compute bf16, fp16 and fp32": replace(base, dtype="fp64"),
        "its kernels need sm_80 or newer, not sm_75": replace(base, device="sm_75"),
        "it has kernels for NVIDIA GPUs and for cpu, not for mps": replace(base, device="mps"),
    }

    assert device.why_not(base) is None
    assert {reason: device.why_not(problem) for reason, problem in reasons.items()} == {
        reason: reason for reason in reasons
    }
