"""Spread experts where users do what nobody planned."""

import pytest

from hostile_programs import (
    dropped,
    empty_first,
    groups_of_one,
    modes,
    one_raises,
    other_modules,
    scaled,
    second_derivatives,
    twice,
)
from rank_processes import Processes

pytestmark = pytest.mark.distributed


def nothing(results: list[list[str]]) -> bool:
    differing = [line for lines in results for line in lines]
    assert differing == []
    return True


def test_a_backward_twice(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(twice))


def test_second_derivatives_are_refused_on_every_rank(two_ranks: Processes) -> None:
    hint = "a layer has no second derivatives; hint: call backward without create_graph"

    assert two_ranks.run(second_derivatives) == [hint] * 2


def test_modes_without_gradients(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(modes))


@pytest.mark.parametrize("capacity", [None, 18])
def test_tokens_whose_slots_are_dropped(four_ranks: Processes, capacity: int | None) -> None:
    assert nothing(four_ranks.run(dropped, capacity))


def test_a_scaler_skips_a_step_on_every_rank(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(scaled))


def test_an_axis_of_one_rank(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(groups_of_one))


def test_modules_that_are_filled_later(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(empty_first))


def test_ranks_with_other_experts_raise_when_the_style_is_applied(two_ranks: Processes) -> None:
    for rank, messages in enumerate(two_ranks.run(other_modules)):
        rule = "experts must be made alike on every rank"
        start = f"{rule}, got others on ranks [{1 - rank}] than here ("
        assert [message.startswith(start) for message in messages] == [True] * 3
        assert messages[1] == f"{start}scaling={1.0 + rank})"


def test_a_rank_that_raises_ends_the_others() -> None:
    processes = Processes(2, timeout=6)
    try:
        (waited, seconds), (raised, _) = processes.run(one_raises)
    finally:
        processes.close()

    assert raised.startswith("ValueError: x must have shape")
    assert "Error" in waited
    assert seconds < 20
