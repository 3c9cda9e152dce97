"""The projections of single slots in the interpreter: every layout, storage and placement."""

from dataclasses import replace

import pytest
import torch

from samebits.ops.slot_gemm.kernel import launch_slot_hidden, launch_token_output
from samebits.ops.slot_gemm.reference import slot_hidden, token_output
from samebits.ops.slot_gemm.tuning import Config, Tiles, heuristic
from samebits.problem import ProbPlacement
from samebits.testing.cases import CASES
from samebits.testing.inputs import make_inputs
from samebits.testing.numerics import assert_within_budget

pytestmark = pytest.mark.interpret

NAMES = {
    "gpt-oss-whole": ProbPlacement.FC2_OUTPUT,
    "interleave-16": ProbPlacement.FC1_INPUT,
    "interleave-1-up-first": ProbPlacement.FC2_INPUT,
    "biases": ProbPlacement.FC2_INPUT,
    "odd-sizes": ProbPlacement.FC2_OUTPUT,
    "relu2": ProbPlacement.FC1_INPUT,
    "situ": ProbPlacement.FC2_OUTPUT,
}
TILES = {
    "descriptors": Tiles(
        Config(block_n=32, block_k=32, num_warps=4, num_stages=2),
        Config(block_n=16, block_k=16, num_warps=4, num_stages=2),
        early=False,
    ),
    "pointers": Tiles(
        Config(block_n=64, block_k=16, num_warps=4, num_stages=2, tma=False),
        Config(block_n=32, block_k=32, num_warps=4, num_stages=2, tma=False),
        early=False,
    ),
}


@pytest.mark.parametrize(("name", "placement"), NAMES.items())
def test_both_launches_equal_the_reference(name: str, placement: ProbPlacement) -> None:
    problem = replace(CASES[name], H=24, F=32, E=5, K=3, grad=False)
    inputs = make_inputs(problem, 2, distribution="dropped")
    # Stored either way, read either way.
    turn = list(NAMES).index(name)
    weights = inputs.weights.to_storage(("out_in", "in_out")[turn % 2])
    tiles = list(TILES.values())[turn // 2 % 2]
    ids, probs = inputs.routing.topk_ids, inputs.routing.topk_probs
    kept = ((ids >= 0) & (ids < problem.E)).reshape(-1)

    h = launch_slot_hidden(
        inputs.x, ids, weights, problem.activation, probs, placement, tiles.hidden
    )
    out = launch_token_output(
        h, ids, weights.down, weights.down_bias, probs, placement,
        torch.empty(2, problem.H), tiles,
    )  # fmt: skip

    plain, wide = inputs, inputs.map(torch.Tensor.double)
    results = []
    for given in (plain, wide):
        w, p = given.weights, given.routing.topk_probs
        hidden = slot_hidden(given.x, ids, w, problem.activation, p, placement)
        results.append((hidden[kept], token_output(hidden, ids, w, p, placement)))
    for value, expected, exact in zip((h[kept], out), *results, strict=True):
        assert_within_budget(value, expected, exact, torch.float32)


def test_slots_of_other_experts_and_tokens_that_do_not_count_are_left_out() -> None:
    problem = replace(CASES["biases"], H=24, F=20, E=5, K=3, grad=False)
    inputs = make_inputs(problem, 3)
    ids, probs = inputs.routing.topk_ids, inputs.routing.topk_probs
    count = torch.tensor([2], dtype=torch.int32)
    far = ids + 5
    far[1] = torch.tensor([0, 2**32 + 5, 5 + problem.E])
    given = {"expert_start": 5, "num_valid_tokens": count}
    tiles, placement = TILES["descriptors"], ProbPlacement.FC2_OUTPUT
    broken = inputs.x.clone()
    broken[2] = torch.nan
    wild = probs.clone()
    wild[1:] = torch.nan

    h = launch_slot_hidden(
        broken, far, inputs.weights, problem.activation, wild, placement, tiles.hidden, **given
    )
    out = launch_token_output(
        h, far, inputs.weights.down, inputs.weights.down_bias, wild, placement,
        torch.empty(3, problem.H), tiles, **given,
    )  # fmt: skip

    hidden = slot_hidden(inputs.x, ids, inputs.weights, problem.activation, probs, placement)
    expected = token_output(hidden, ids, inputs.weights, probs, placement)
    wide = inputs.map(torch.Tensor.double)
    hidden = slot_hidden(wide.x, ids, wide.weights, problem.activation, probs.double(), placement)
    exact = token_output(hidden, ids, wide.weights, probs.double(), placement)
    assert_within_budget(out[:1], expected[:1], exact[:1], torch.float32)
    assert torch.equal(out[1:], torch.zeros_like(out[1:]))
    assert not out[1:].signbit().any()


def test_single_slots_are_for_few_tokens_where_bits_were_compared() -> None:
    assert heuristic(1, 8, 8, "sm_90", "bf16") is not None
    assert heuristic(1, 8, 128, "sm_90", "fp16") is not None
    assert heuristic(2, 8, 16, "sm_90", "bf16") is None
    assert heuristic(256, 8, 128, "sm_90", "bf16") is None
    assert heuristic(1, 8, 128, "sm_90", "fp32") is None
    assert heuristic(1, 17, 128, "sm_90", "bf16") is None
    for device in ("sm_80", "sm_86", "sm_100", "sm_120"):
        assert heuristic(1, 8, 128, device, "bf16") is None
