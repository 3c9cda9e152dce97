"""The hidden gradient in the interpreter: every layout, operand order and way to find rows."""

from dataclasses import replace

import pytest
import torch

from samebits.ops.hidden_gradient.kernel import launch_hidden_gradient, launch_probs_gradient
from samebits.ops.hidden_gradient.reference import hidden_gradient
from samebits.ops.indirect_gemm.tuning import Config
from samebits.ops.permute.kernel import launch_metadata, launch_permute
from samebits.routing import Permutation
from samebits.testing.cases import CASES
from samebits.testing.inputs import make_inputs
from samebits.testing.numerics import assert_bitwise_equal, assert_within_budget

pytestmark = [
    pytest.mark.interpret,
    # Rows past the last expert's hold whatever memory held; they are multiplied, never stored.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),
]

TILE = Config(block_r=16, block_n=64, block_k=32, num_warps=4, num_stages=2, programs=3)
CONFIGS = {
    "rows": TILE,
    "swapped": replace(TILE, swap=True),
    "pointers": replace(TILE, tma=False, block_n=128),
}
TOKENS = 7


def _run(name, config, *, gather):
    problem = CASES[name]
    inputs = make_inputs(problem, TOKENS, distribution="dropped")
    weights, routing = inputs.weights, inputs.routing
    z = torch.randn(
        TOKENS * problem.K, weights.gate_up.shape[1], generator=torch.Generator().manual_seed(1)
    )
    meta = launch_metadata(routing.topk_ids, problem.E, config.block_r)
    dy = inputs.dout if gather else launch_permute(inputs.dout, meta.inverse, problem.K, None)
    rows = launch_hidden_gradient(
        dy, weights.down, z, meta.slots, meta.tiles, routing.topk_probs, problem.activation,
        problem.layout, config, topk=problem.K, gather=gather,
        want_dz=True, want_h=True, want_partial=True,
    )  # fmt: skip
    dp = launch_probs_gradient(
        rows.partial, inputs.dout, weights.down_bias, routing.topk_ids, meta.inverse, 0
    )
    live = int(meta.offsets[-1])
    by_row = dp.reshape(-1)[meta.slots[:live].long()]
    return problem, inputs, z, (rows.dz[:live], rows.h[:live], by_row), dp


def _expected(problem, inputs, z):
    permutation = Permutation.of(inputs.routing.topk_ids, problem.E)
    return hidden_gradient(
        inputs.dout, z, permutation, problem.K, inputs.weights, problem.activation,
        inputs.routing.topk_probs,
    )  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("name", ["gpt-oss-whole", "interleave-16", "odd-sizes", "relu2"])
def test_rows_equal_the_reference(name, config) -> None:
    problem, inputs, z, values, dp = _run(name, config, gather=True)
    plain = _expected(problem, inputs, z)
    exact = _expected(problem, inputs.map(torch.Tensor.double), z.double())

    for what, value, loop, oracle in zip(("dz", "h", "dp"), values, plain, exact, strict=True):
        assert_within_budget(value, loop, oracle, torch.float32, what)
    dropped = (inputs.routing.topk_ids < 0) | (inputs.routing.topk_ids >= problem.E)
    assert dropped.any()
    assert_bitwise_equal(dp[dropped], torch.zeros(int(dropped.sum())))


def test_permuted_rows_and_tiles_change_no_bit() -> None:
    *_, expected, _ = _run("gpt-oss-whole", TILE, gather=True)
    *_, permuted, _ = _run("gpt-oss-whole", TILE, gather=False)
    *_, wide, _ = _run("gpt-oss-whole", replace(TILE, block_n=128), gather=True)

    for value, other in zip((*permuted, *wide), expected * 2, strict=True):
        assert_bitwise_equal(value, other)


def test_z_that_is_asked_for_early_changes_no_bit() -> None:
    *_, expected, _ = _run("swiglu", TILE, gather=False)
    *_, early, _ = _run("swiglu", replace(TILE, block_r=128), gather=False)

    for value, other in zip(early, expected, strict=True):
        assert_bitwise_equal(value, other)
