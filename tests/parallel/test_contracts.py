from itertools import product

import pytest
import torch

from contract_programs import by_rank_values, row_parallel_values
from rank_processes import Processes
from rank_programs import Case
from samebits import ExpertWeights, Layout, PostExpertNorm, ProbPlacement
from samebits.parallel import row_parallel_part

pytestmark = pytest.mark.distributed

LAYOUTS = [Layout(), Layout(interleave=1), Layout(up_first=True)]
DTYPES = {"dtype": torch.float64, "probs": torch.float64}


def nothing(results: list[list[str]]) -> bool:
    differing = [line for lines in results for line in lines]
    assert differing == []
    return True


def test_row_parallel_counts_every_term_once(two_ranks: Processes) -> None:
    cases = [
        (Case(tokens=(9,), bounds=(0, 4), placement=placement, **DTYPES), layout)
        for placement, layout in zip(ProbPlacement, LAYOUTS, strict=True)
    ]

    assert nothing(two_ranks.run(row_parallel_values, cases))


def test_by_rank_adds_every_slot_once(two_ranks: Processes) -> None:
    cases = [
        Case(tokens=tokens, bounds=(0, 2, 6), placement=placement, capacity=capacity, **DTYPES)
        for placement, tokens, capacity in product(ProbPlacement, [(9, 4), (0, 5)], [None, 9])
    ]

    assert nothing(two_ranks.run(by_rank_values, cases))


def test_refusals() -> None:
    gate_up, down = torch.zeros(2, 6, 4), torch.zeros(2, 4, 3)
    with pytest.raises(ValueError, match="F that is a multiple of 2, got 3"):
        row_parallel_part(ExpertWeights(gate_up=gate_up, down=down), 0, 2)
    with pytest.raises(ValueError, match="rank must be >= 0, got -1"):
        row_parallel_part(ExpertWeights(gate_up=gate_up, down=down), -1, 2)
    normed = ExpertWeights(
        gate_up=gate_up, down=down, norm=PostExpertNorm(eps=1e-5), norm_scale=torch.ones(4)
    )
    with pytest.raises(NotImplementedError, match="a post-expert norm needs the sum"):
        row_parallel_part(normed, 0, 1)
