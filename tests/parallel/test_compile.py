import pytest

from compile_programs import (
    broken,
    compiled,
    cut,
    inference,
    inference_beside_training,
    overflowing,
)
from rank_processes import Processes
from samebits import ProbPlacement

pytestmark = pytest.mark.distributed

FC1, FC2, OUT = ProbPlacement.FC1_INPUT, ProbPlacement.FC2_INPUT, ProbPlacement.FC2_OUTPUT


def nothing(results: list[list[str]]) -> bool:
    differing = [line for lines in results for line in lines]
    assert differing == []
    return True


@pytest.mark.parametrize(
    ("placement", "backend", "routed", "ranks"),
    [
        pytest.param(OUT, "inductor", False, (0, 1), marks=pytest.mark.slow),
        (FC2, "aot_eager", False, (1,)),
        (FC1, "aot_eager", True, (0, 1)),
    ],
)
def test_one_graph_with_the_bits_of_eager(
    two_ranks: Processes,
    placement: ProbPlacement,
    backend: str,
    routed: bool,
    ranks: tuple[int, ...],
) -> None:
    assert nothing(two_ranks.run(compiled, placement, backend, routed, ranks))


def test_slots_that_do_not_fit_are_counted(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(overflowing))


def test_one_graph_of_inference_where_counts_are_exchanged(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(inference, FC2))


def test_inference_beside_gradients_raises_on_every_rank(two_ranks: Processes) -> None:
    for message in two_ranks.run(inference_beside_training):
        assert message.startswith("a rank is in inference mode, or compiled without gradients")


def test_a_break_leaves_the_values_right(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(broken))


def test_experts_that_are_cut(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(cut))
