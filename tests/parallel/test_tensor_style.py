from pathlib import Path

import pytest
import torch

from rank_processes import Processes
from samebits import Activation, Layout, ProbPlacement
from tensor_module_programs import (
    Cut,
    converted,
    copied,
    cut_bits,
    cut_values,
    load,
    one_differs,
    refusals,
    save,
    with_fsdp,
)

pytestmark = pytest.mark.distributed

FC1, FC2, OUT = ProbPlacement.FC1_INPUT, ProbPlacement.FC2_INPUT, ProbPlacement.FC2_OUTPUT


def nothing(results: list[list[str]]) -> bool:
    differing = [line for lines in results for line in lines]
    assert differing == []
    return True


def test_bits_do_not_depend_on_how_often_an_expert_is_cut(two_ranks: Processes) -> None:
    cuts = [
        Cut((1, 2), FC1, torch.bfloat16),
        Cut((1, 2), FC2, layout=Layout(interleave=1, up_first=True), recompute=True),
        Cut((1, 2), OUT, orientation="in_out", checkpointed=True),
        Cut((1, 2), activation=Activation(kind="relu", gated=False), bias=False),
        Cut((2, 1), FC1, capacity=10),
    ]

    assert nothing(two_ranks.run(cut_bits, cuts))


def test_experts_are_spread_and_cut(four_ranks: Processes) -> None:
    cuts = [
        Cut((2, 2), FC1, torch.bfloat16),
        Cut((2, 2), FC2, cut_first=True, orientation="in_out"),
        Cut((2, 2), OUT, capacity=10, cut_first=True, named=False),
        Cut((2, 2), FC1, layout=Layout(interleave=16), recompute=True, capacity=10),
        Cut((4, 1), OUT, layout=Layout()),
        Cut((1, 4), OUT),
    ]

    assert nothing(four_ranks.run(cut_bits, cuts))
    for placement in ProbPlacement:
        assert nothing(four_ranks.run(cut_values, Cut((2, 2), placement)))


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2, 2)], ids=str)
def test_with_fsdp(four_ranks: Processes, sizes: tuple[int, ...]) -> None:
    assert nothing(four_ranks.run(with_fsdp, sizes))


def test_checkpoints_know_no_degrees(four_ranks: Processes, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    four_ranks.run(save, folder, Cut((2, 2)))

    for other in (Cut((1, 4)), Cut((4, 1), cut_first=True), "spread", "plain"):
        assert nothing(four_ranks.run(load, folder, other)), other


def test_weights_of_another_layout_are_converted(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(converted))


def test_a_deep_copy_is_cut_too(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(copied))


def test_one_rank_with_other_experts_ends_all_of_them(four_ranks: Processes) -> None:
    # Rank 3, which shares an axis with 1 and with 2; 0 has to hear of it from one of them.
    for rank, message in enumerate(four_ranks.run(one_differs)):
        rule = "experts must be made alike on every rank"
        assert message.startswith(f"{rule}, got others on ranks [{1 - rank % 2}] than here")
        assert ("unlike others along ep_dim" in message) == (rank in (1, 3))


def test_refusals(two_ranks: Processes) -> None:
    for rank, messages in enumerate(two_ranks.run(refusals)):
        neighbours = (
            "a rank's rows of gate_up are no neighbours\nhint: layout=Layout(interleave=64)"
        )
        dimensions = "two dimensions, one spreads and one cuts, or one without capacity and ep_dim"
        expected = [
            "F = 64 is no multiple of 64 * 2: sums of dp end there",
            "H = 7 is no multiple of 2, and a rank holds H / 2 of down",
            f"with layout halves {neighbours}, to which load_weights converts",
            f"with layout interleave=128 {neighbours}, to which load_weights converts",
            "a post-expert norm takes its mean over all of H, here cut",
            "weight_gradients are for whole experts; products of cut ones round on their own",
            "cut experts have products of their own, not those of backend grouped",
            f"device_mesh must have {dimensions}, got 1",
            f"device_mesh must have {dimensions}, got 1",
            "ep_dim must be one of (0, 1, 'ep', 'etp'), got 'dp'",
        ]
        assert messages[:10] == expected
        assert messages[10].startswith(
            f"experts must be made alike on every rank, got others on ranks [{1 - rank}] than here"
        )
        assert messages[11] == "expert_start must be 0 where ranks hold the experts, got 1"
