import time
from itertools import pairwise, product

import pytest
import torch

from rank_processes import Processes, Program
from rank_programs import (
    Case,
    disagree,
    gradients_that_exist,
    ids_out_of_range,
    leave,
    leave_before_rows,
    overflow,
    ranks_that_are_refused,
    repeated_calls,
    same_bits,
    same_bits_composed,
    same_bits_with_room,
    soak,
    without_experts,
)
from samebits import Activation, ProbPlacement
from samebits.formats import FP8, MXFP4, NVFP4
from samebits.parallel import Capacity, Ranks, expert_bounds

pytestmark = pytest.mark.distributed

EVEN, UNEVEN = (0, 3, 6), (0, 1, 6)
FC1, FC2, OUT = ProbPlacement.FC1_INPUT, ProbPlacement.FC2_INPUT, ProbPlacement.FC2_OUTPUT


DEEP_EP = (
    "DeepEP is no transport here: it is built against NVSHMEM for one cluster, and its combine "
    "adds a token's rows up on the way, in its own order\nhint: transport='torch'"
)


def nothing(results: list[list[str]]) -> bool:
    return [line for lines in results for line in lines] == []


def test_outputs_and_gradients_have_the_bits_of_one_rank(two_ranks: Processes) -> None:
    cases = [
        Case(tokens=(9, 4), bounds=bounds, placement=placement, dtype=dtype, backend=backend)
        for placement, (bounds, dtype, backend) in product(
            ProbPlacement,
            [
                (EVEN, torch.float32, "grouped"),
                (UNEVEN, torch.bfloat16, "grouped"),
                (UNEVEN, torch.float32, "reference"),
            ],
        )
    ]

    assert nothing(two_ranks.run(same_bits, cases))


@pytest.mark.parametrize("tokens", [(0, 7), (7, 0), (0, 0)], ids=str)
def test_ranks_without_tokens(two_ranks: Processes, tokens: tuple[int, ...]) -> None:
    cases = [
        Case(tokens=tokens, bounds=EVEN, placement=placement, capacity=capacity)
        for placement, capacity in product(ProbPlacement, [None, 21])
    ]

    assert nothing(two_ranks.run(same_bits, cases))


def test_ranks_without_experts_and_one_expert_for_all(two_ranks: Processes) -> None:
    cases = [
        Case(tokens=(5, 6), bounds=bounds, placement=placement, capacity=capacity, ids=ids)
        for bounds, (placement, capacity), ids in product(
            [(0, 0, 4), (0, 4, 4)], [(FC1, None), (FC2, 18), (OUT, None)], ["random", 1]
        )
    ]

    assert nothing(two_ranks.run(same_bits, cases))


def test_rows_that_arrive_beyond_those_that_were_sent(two_ranks: Processes) -> None:
    cases = [
        Case(tokens=tokens, bounds=bounds, placement=placement, dtype=dtype)
        for placement, (tokens, bounds, dtype) in product(
            ProbPlacement,
            [((9, 4), EVEN, torch.bfloat16), ((0, 7), UNEVEN, torch.float32)],
        )
    ]
    cases.append(Case(tokens=(3, 2), bounds=(0, 0, 4), ids=1))

    assert nothing(two_ranks.run(same_bits_with_room, cases))


def test_calls_again_with_other_tokens(two_ranks: Processes) -> None:
    cases = [
        Case(tokens=(9, 4), bounds=UNEVEN, placement=placement, capacity=capacity)
        for placement, capacity in [(FC1, None), (FC2, None), (OUT, None), (OUT, 27)]
    ]

    assert nothing(two_ranks.run(repeated_calls, cases))


def test_quantised_experts(two_ranks: Processes) -> None:
    cases = [
        Case(
            tokens=(5, 6),
            bounds=bounds,
            placement=placement,
            capacity=capacity,
            dtype=torch.bfloat16,
            weight_format=weight_format,
        )
        for weight_format, (bounds, placement, capacity) in product(
            [FP8, MXFP4, NVFP4], [(UNEVEN, FC1, None), ((0, 0, 4), FC2, 18), (EVEN, OUT, None)]
        )
    ]

    assert nothing(two_ranks.run(same_bits, cases))


def test_options(two_ranks: Processes) -> None:
    cases = [
        Case(tokens=(3, 5), bounds=EVEN, topk=1),
        Case(tokens=(3, 5), bounds=EVEN, topk=6, dtype=torch.bfloat16),
        *(
            Case(
                tokens=(3, 5), bounds=EVEN, probs=torch.bfloat16, dtype=torch.bfloat16, placement=p
            )
            for p in ProbPlacement
        ),
        Case(tokens=(3, 5), bounds=EVEN, dtype=torch.bfloat16, out_dtype=torch.float32),
        Case(tokens=(3, 5), bounds=EVEN, activation=Activation(kind="relu", gated=False)),
        Case(tokens=(3, 5), bounds=EVEN, dtype=torch.float64, probs=torch.float64),
        Case(tokens=(3, 5), bounds=EVEN, dtype=torch.float16, placement=FC1),
        # More than the shortest message of counts holds.
        Case(tokens=(3, 5), bounds=(0, 300, 600), hidden=8, columns=8),
    ]

    assert nothing(two_ranks.run(same_bits, cases))


def test_tokens_that_are_not_valid(two_ranks: Processes) -> None:
    cases = [
        Case(tokens=(7, 5), bounds=EVEN, placement=placement, valid=valid, capacity=capacity)
        for (placement, capacity), valid in product(
            [(FC1, None), (FC2, 21), (OUT, None)], [(4, 5), (0, 3)]
        )
    ]

    assert nothing(two_ranks.run(same_bits, cases))


def test_more_ranks(four_ranks: Processes) -> None:
    cases = [
        Case(
            tokens=(3, 0, 8, 2),
            bounds=expert_bounds(6, 4),
            placement=placement,
            capacity=capacity,
            dtype=torch.bfloat16,
        )
        for placement, capacity in product(ProbPlacement, [None, 24])
    ]

    # Experts with a few rows, whose products are others on a CPU, beside experts with fewer.
    sizes = {"tokens": (13, 5, 2, 5), "bounds": (0, 3, 4, 7, 9), "hidden": 8, "columns": 8}
    cases.append(Case(**sizes, topk=2, placement=FC2))

    assert nothing(four_ranks.run(same_bits, cases))
    assert nothing(four_ranks.run(soak, 1, 10))


def test_reference_has_the_bits_of_degree_one_in_every_gradient(two_ranks: Processes) -> None:
    case = Case(tokens=(9, 4), bounds=UNEVEN, backend="reference", dtype=torch.bfloat16)

    assert nothing(two_ranks.run(without_experts, case))


def test_dispatch_and_combine_around_grouped_experts(two_ranks: Processes) -> None:
    cases = [
        Case(tokens=(9, 4), bounds=UNEVEN, placement=p, capacity=capacity, dtype=torch.bfloat16)
        for p, capacity in product(ProbPlacement, [None, 30])
    ]

    assert nothing(two_ranks.run(same_bits_composed, cases))


def test_ranks_that_want_other_gradients_do_not_wait_for_one_another(two_ranks: Processes) -> None:
    wanted = [
        (("x",), ()),
        (("topk_probs",), ("gate_up",)),
        ((), ("down_bias",)),
        ((), ()),
    ]
    for placement, (first, second) in product((FC1, OUT), wanted):
        case = Case(tokens=(4, 3), bounds=EVEN, placement=placement, wanted=(first, second))

        assert nothing(two_ranks.run(same_bits, [case]))
        assert two_ranks.run(gradients_that_exist, case) == [list(first), list(second)]


def test_soak_of_random_routings(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(soak, 0, 40))


def test_slots_that_do_not_fit_are_never_silent(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(overflow))


def test_ranks_that_disagree_raise_everywhere(two_ranks: Processes) -> None:
    for rank, message in enumerate(two_ranks.run(disagree)):
        assert f"must be alike on every rank, got another one on ranks [{1 - rank}]" in message


def test_ids_out_of_range_on_one_rank_raise_everywhere(two_ranks: Processes) -> None:
    assert two_ranks.run(ids_out_of_range) == [
        "topk_ids of another rank are out of range; it says which",
        "topk_ids must be in [0, N) with N = 4, or -1 or N for a dropped slot, got 9",
    ]


@pytest.mark.parametrize("program", [leave, leave_before_rows])
def test_a_killed_rank_ends_the_others(program: Program) -> None:
    processes = Processes(2, timeout=10)
    try:
        processes.run(same_bits, [])
        start = time.monotonic()
        (survived, error), (_, gone) = processes.outcomes(program, 1)
    finally:
        processes.close()

    assert not survived
    assert "RuntimeError" in error or "DistBackendError" in error
    assert gone == "the process is gone"
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("experts", "ranks", "bounds"),
    [(8, 2, (0, 4, 8)), (5, 2, (0, 3, 5)), (4, 3, (0, 2, 4, 4)), (1, 3, (0, 1, 1, 1))],
)
def test_bounds_are_those_of_dtensor(experts: int, ranks: int, bounds: tuple[int, ...]) -> None:
    chunks = [len(chunk) for chunk in torch.arange(experts).chunk(ranks)]

    assert expert_bounds(experts, ranks) == bounds
    assert [b - a for a, b in pairwise(bounds)][: len(chunks)] == chunks


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="group must be a ProcessGroup, got str"):
        Ranks("world", (0, 4))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows must be >= 1, got 0"):
        Capacity(0, "cpu")
    with pytest.raises(ValueError, match="num_experts must be >= 1, got 0"):
        expert_bounds(0, 2)


def test_what_ranks_refuse(two_ranks: Processes) -> None:
    for rank, messages in enumerate(two_ranks.run(ranks_that_are_refused)):
        assert messages == [
            "bounds must ascend from 0, 2 + 1 of them for a group of 2 ranks, got (0, 4)",
            "bounds must ascend from 0, 2 + 1 of them for a group of 2 ranks, got (0, 5, 4)",
            "unknown transport 'nvshmem'; expected one of 'deep_ep', 'torch', 'window'",
            DEEP_EP,
            f"weights must hold the 2 experts range({2 * rank}, {2 * rank + 2}), got 4",
        ]
