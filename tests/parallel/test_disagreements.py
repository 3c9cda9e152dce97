"""Ranks that were not given the same raise, all of them, and do not wait for one another."""

import pytest

from disagreement_programs import (
    capacities,
    frozen_scale_on_one_rank,
    ids_that_are_no_experts,
    inference_beside_training,
    numbers_of_experts,
    other_parameters,
    placements_by_rank,
    refused_calls,
    with_a_capacity,
)
from rank_processes import Processes

pytestmark = pytest.mark.distributed


def test_ids_that_are_no_experts(two_ranks: Processes) -> None:
    others = "topk_ids of another rank are out of range; it says which"
    mine = "topk_ids must be in [0, N) with N = 4, or -1 or N for a dropped slot, got 9"

    assert two_ranks.run(ids_that_are_no_experts) == [[others] * 2, [mine] * 2]


def test_placements_by_rank(two_ranks: Processes) -> None:
    for rank, (message,) in enumerate(two_ranks.run(placements_by_rank)):
        assert f"must be alike on every rank, got another one on ranks [{1 - rank}]" in message


def test_numbers_of_experts(two_ranks: Processes) -> None:
    for rank, messages in enumerate(two_ranks.run(numbers_of_experts)):
        for message in messages:
            assert f"must be alike on every rank, got another one on ranks [{1 - rank}]" in message


def test_inference_mode_beside_gradients(two_ranks: Processes) -> None:
    message = (
        "a rank is in inference mode, or compiled without gradients, and another wants some, for "
        "which all run a backward; hint: torch.no_grad in eager code there"
    )

    assert two_ranks.run(inference_beside_training) == [[message]] * 2


def test_a_shared_scale_that_one_rank_does_not_train(two_ranks: Processes) -> None:
    for rank, (message,) in enumerate(two_ranks.run(frozen_scale_on_one_rank)):
        assert f"must be alike on every rank, got another one on ranks [{1 - rank}]" in message


def test_other_parameters(two_ranks: Processes) -> None:
    for rank, messages in enumerate(two_ranks.run(other_parameters)):
        for message in messages:
            assert f"must be alike on every rank, got another one on ranks [{1 - rank}]" in message


def test_a_capacity_on_a_cpu_where_looking_costs_nothing(two_ranks: Processes) -> None:
    ids = (
        "topk_ids of another rank are out of range; it says which",
        "topk_ids must be in [0, N) with N = 4, or -1 or N for a dropped slot, got 9",
    )
    recorded = "gradients must be recorded on every rank or on none, with a capacity, got wishes"

    for rank, messages in enumerate(two_ranks.run(with_a_capacity)):
        dtype, gradients, last = messages
        assert f"must be alike on every rank, got another one on ranks [{1 - rank}]" in dtype
        assert gradients == f"{recorded} (0, 7) by rank"
        assert last == ids[rank]


def test_capacities(two_ranks: Processes) -> None:
    for rank, (message,) in enumerate(two_ranks.run(capacities)):
        assert message == (
            f"ranks must be made alike on every rank, got others on ranks [{1 - rank}] than here "
            f"(Ranks(bounds=(0, 2, 4), capacity=Capacity(rows={8 + rank})))"
        )


def test_what_dispatch_and_combine_refuse(two_ranks: Processes) -> None:
    assert (
        two_ranks.run(refused_calls)
        == [
            [
                "num_experts must be N = 4, as ranks say, got 7",
                "out_dtype must be None or a float dtype, got torch.int8",
                "num_valid_tokens must be a Tensor, got int",
                "x must be a Tensor, got list",
            ]
        ]
        * 2
    )
