from dataclasses import replace
from itertools import product

import pytest
import torch

from rank_processes import Processes
from rank_programs import Case
from samebits import Activation, ExpertWeights, Layout, PostExpertNorm, ProbPlacement
from samebits.parallel import TensorParallelWeights
from tensor_programs import refusals, tensor_bits, tensor_values

pytestmark = pytest.mark.distributed

LAYOUTS = [Layout(), Layout(interleave=1), Layout(up_first=True)]


def cases(dtype: torch.dtype) -> list[tuple[Case, Layout]]:
    sizes = {"tokens": (11,), "bounds": (0, 4), "columns": 256, "dtype": dtype}
    made = [
        (Case(**sizes, placement=placement), layout)
        for placement, layout in zip(ProbPlacement, LAYOUTS, strict=True)
    ]
    made.append((Case(**sizes, activation=Activation(kind="relu", gated=False)), Layout()))
    made.append((Case(**{**sizes, "tokens": (0,)}), Layout()))
    return made


def nothing(results: list[list[str]]) -> bool:
    differing = [line for lines in results for line in lines]
    assert differing == []
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_the_number_of_ranks(
    two_ranks: Processes, dtype: torch.dtype
) -> None:
    assert nothing(two_ranks.run(tensor_bits, cases(dtype)))


def test_four_ranks(four_ranks: Processes) -> None:
    assert nothing(four_ranks.run(tensor_bits, cases(torch.float32)[:3]))


def test_values_are_those_of_experts(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(tensor_values, cases(torch.float64)))


def weights(columns: int, hidden: int) -> ExpertWeights:
    return ExpertWeights(
        gate_up=torch.zeros(2, 2 * columns, hidden), down=torch.zeros(2, hidden, columns)
    )


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"F that is a multiple of 64 \* 2 .*, got 64"):
        TensorParallelWeights.shard(weights(64, 8), 0, 2)
    with pytest.raises(ValueError, match="H that is a multiple of 2, got 7"):
        TensorParallelWeights.shard(weights(128, 7), 0, 2)
    with pytest.raises(ValueError, match="rank must be below size = 2, got 2"):
        TensorParallelWeights.shard(weights(128, 8), 2, 2)
    normed = ExpertWeights(
        gate_up=torch.zeros(2, 256, 8),
        down=torch.zeros(2, 8, 128),
        norm=PostExpertNorm(eps=1e-5),
        norm_scale=torch.ones(8),
    )
    with pytest.raises(NotImplementedError, match="a post-expert norm takes its mean"):
        TensorParallelWeights.shard(normed, 0, 2)
    part = TensorParallelWeights.shard(weights(128, 8), 0, 2)
    for name, wrong in (("down", 3), ("down_bias", [0.0]), ("part_layout", "halves")):
        with pytest.raises(TypeError, match=f"{name} must be a"):
            replace(part, **{name: wrong})


def test_arguments_that_do_not_fit(two_ranks: Processes) -> None:
    cut_over = "F = 128 cut over 2"
    expected = [
        "down must have shape (E, H / W, F) with H / W = 48 / 2, got (4, 48, 128)",
        "down must have F that is a multiple of 64 * 2 (sums of dp end there), got 64",
        f"gate_up must have shape (4, 128, 48), {cut_over}, got (3, 128, 48)",
        f"gate_up must have shape (4, 128, 48), {cut_over}, got (4, 96, 48)",
        f"down_bias must have shape (4, 24), {cut_over}, got (4, 48)",
        "gate_up_bias must be torch.float32 on cpu, as x, got torch.float64 on cpu",
        "topk_probs must be float32 or the dtype of x (torch.float32), got torch.float64",
        "num_valid_tokens must be an int32 tensor, got int",
        "x must be a Tensor, got list",
    ]

    assert two_ranks.run(refusals) == [expected] * 2


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_hold_gate_and_up_of_the_same_columns(layout: Layout) -> None:
    gate, up = torch.arange(256.0), torch.arange(256.0) + 1000
    halves = ExpertWeights(
        gate_up=torch.cat([gate, up])[None, :, None].expand(1, 512, 2).contiguous(),
        down=torch.zeros(1, 2, 256),
    )
    for rank, size in product(range(2), [2]):
        part = TensorParallelWeights.shard(halves.to_layout(layout), rank, size)

        columns = torch.arange(128.0) + 128 * rank
        assert torch.equal(part.gate_up[0, :, 0], torch.cat([columns, columns + 1000]))
