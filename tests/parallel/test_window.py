"""Rows that are written to the memory of other ranks; on a CPU, where files stand for it."""

from itertools import product

import pytest
import torch

from rank_processes import Processes
from rank_programs import Case
from samebits import ProbPlacement
from window_programs import inference_first, refused, through_windows

pytestmark = pytest.mark.distributed


def test_layers_and_their_parts_have_the_bits_of_one_rank(two_ranks: Processes) -> None:
    sizes = {"bounds": (0, 1, 6), "transport": "window"}
    cases = [
        Case(**sizes, tokens=tokens, placement=placement, dtype=dtype, wanted=wanted)
        for placement, (tokens, dtype, wanted) in product(
            ProbPlacement,
            [
                ((9, 4), torch.bfloat16, None),
                ((0, 30), torch.float32, None),
                ((9, 4), torch.bfloat16, ((), ())),
                ((9, 4), torch.float32, (("x",), ("gate_up",))),
            ],
        )
    ]

    assert [line for lines in two_ranks.run(through_windows, cases) for line in lines] == []


def test_more_ranks_and_some_without_tokens_or_experts(four_ranks: Processes) -> None:
    sizes = {"tokens": (3, 0, 8, 2), "transport": "window"}
    cases = [
        Case(**sizes, bounds=(0, 0, 4, 4, 6), placement=ProbPlacement.FC2_INPUT),
        Case(**sizes, bounds=(0, 2, 3, 5, 6), ids=-1),
        Case(**sizes, bounds=(0, 2, 3, 5, 6), wanted=((), (), (), ())),
    ]

    assert [line for lines in four_ranks.run(through_windows, cases) for line in lines] == []


def test_a_first_call_in_which_nobody_sends_a_row(two_ranks: Processes) -> None:
    case = Case(tokens=(3, 2), bounds=(0, 2, 4), ids=-1, transport="window")

    assert [line for lines in two_ranks.run(through_windows, [case]) for line in lines] == []


def test_inference_mode_before_training(two_ranks: Processes) -> None:
    assert two_ranks.run(inference_first) == [[], []]


def test_what_is_refused(two_ranks: Processes) -> None:
    capacity = "transport 'window' exchanges counts: it takes no capacity"
    device = "transport 'window' writes to GPUs of one host, not to cpu\nhint: transport='torch'"
    assert two_ranks.run(refused) == [[capacity, capacity, device, device]] * 2
