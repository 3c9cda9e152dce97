"""The projection kernels in the interpreter: every layout, storage, tile and operand order."""

from dataclasses import replace

import pytest
import torch

from samebits.ops.indirect_gemm.kernel import launch_first_projection, launch_second_projection
from samebits.ops.indirect_gemm.reference import first_projection, second_projection
from samebits.ops.indirect_gemm.tuning import TABLE, Config, heuristic
from samebits.ops.permute.reference import tiles
from samebits.routing import Permutation
from samebits.testing.cases import CASES
from samebits.testing.inputs import make_inputs
from samebits.testing.numerics import assert_bitwise_equal, assert_within_budget

pytestmark = [
    pytest.mark.interpret,
    # Rows past the last expert's hold whatever memory held; they are multiplied, never stored.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),
]

NAMES = (
    "gpt-oss-whole",
    "interleave-16",
    "interleave-1-up-first",
    "odd-sizes",
    "tiny-sizes",
    "relu2",
    "situ",
)
CONFIGS = {
    "swapped": Config(
        block_r=16, block_n=32, block_k=32, num_warps=4, num_stages=2, swap=True, programs=3
    ),
    "rows": Config(
        block_r=32, block_n=64, block_k=16, num_warps=4, num_stages=2, programs=2, short=16
    ),
    "pointers": Config(
        block_r=16, block_n=32, block_k=16, num_warps=4, num_stages=2, tma=False, programs=5
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("orientation", ["out_in", "in_out"])
@pytest.mark.parametrize("name", NAMES)
def test_projections_equal_the_reference(name: str, orientation: str, config: Config) -> None:
    problem = replace(CASES[name], grad=False)
    inputs = make_inputs(problem, 9, distribution="dropped")
    weights = inputs.weights.to_storage(orientation)
    permutation = Permutation.of(inputs.routing.topk_ids, problem.E)
    slots = permutation.slots.int()
    table = tiles(permutation.offsets.int(), 9 * problem.K, config.block_r)
    probs = inputs.routing.topk_probs
    live = int(permutation.offsets[-1])

    h, z = launch_first_projection(
        inputs.x, slots, table, weights, problem.activation, probs, config,
        topk=problem.K, gather=True, save=True,
    )  # fmt: skip
    y = launch_second_projection(h, slots, table, weights.down, weights.down_bias, probs, config)

    assert z is not None
    wide = inputs.map(torch.Tensor.double)
    for value, plain, exact in zip(
        (h[:live], z[:live], y[:live]),
        _reference(inputs, permutation, problem),
        _reference(wide, permutation, problem),
        strict=True,
    ):
        assert_within_budget(value, plain, exact, torch.float32)


def test_a_bias_of_any_strides_is_read_by_its_strides() -> None:
    problem = replace(CASES["gpt-oss-whole"], grad=False)
    inputs = make_inputs(problem, 9)
    permutation = Permutation.of(inputs.routing.topk_ids, problem.E)
    slots, table = permutation.slots.int(), tiles(permutation.offsets.int(), 9 * problem.K, 32)
    strided = inputs.weights.map(lambda t: t if t.dim() == 3 else t.T.contiguous().T)
    assert not strided.down_bias.is_contiguous()

    results = []
    for weights in (inputs.weights, strided):
        h, _ = launch_first_projection(
            inputs.x, slots, table, weights, problem.activation, None, CONFIGS["rows"],
            topk=problem.K, gather=True, save=False,
        )  # fmt: skip
        results.append(
            (
                h,
                launch_second_projection(
                    h, slots, table, weights.down, weights.down_bias, None, CONFIGS["rows"]
                ),
            )
        )

    for value, expected in zip(*results, strict=True):
        assert_bitwise_equal(value, expected)


def test_tiles_follow_the_token_count_only_where_their_bits_were_compared() -> None:
    sizes = (1, 100, 1000, 10**6)

    assert len({heuristic(rows, 8, "sm_90") for rows in sizes}) > 1
    for device in ("sm_80", "sm_86", "sm_100", "sm_120"):
        ((first, second),) = {heuristic(rows, 8, device) for rows in sizes}
        assert first == second
        assert (first.block_r + first.block_n) * first.block_k * 2 * first.num_stages <= 99 * 1024
    assert all(entry.first.block_r == entry.second.block_r for entry in TABLE)


def _reference(inputs, permutation, problem):
    h, z = first_projection(
        inputs.x,
        permutation,
        problem.K,
        inputs.weights,
        problem.activation,
        inputs.routing.topk_probs,
    )
    return h, z, second_projection(h, permutation, inputs.weights, inputs.routing.topk_probs)
