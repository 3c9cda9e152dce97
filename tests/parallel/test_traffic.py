"""What travels is what docs/parallel.md says."""

import pytest
import torch

from rank_processes import Processes
from rank_programs import Case
from samebits import ProbPlacement
from traffic_programs import cut_experts, spread_experts

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("capacity", [None, 8])
def test_rows_of_spread_experts(two_ranks: Processes, capacity: int | None) -> None:
    # 8 slots: rows out, results back, gradients of outputs out, dx back; and dp.
    tokens, hidden, size = 8, 48, 4

    for counted in two_ranks.run(spread_experts, capacity):
        rows = 4 * tokens * hidden * size
        assert rows <= counted["arrived"] <= rows + 3 * tokens * size


@pytest.mark.parametrize("placement", list(ProbPlacement))
def test_what_cut_experts_gather(two_ranks: Processes, placement: ProbPlacement) -> None:
    case = Case(tokens=(11,), bounds=(0, 4), columns=256, placement=placement, dtype=torch.bfloat16)
    tokens, experts, hidden, columns, ranks = 11, 4, case.hidden, 256, 2
    rows = tokens * case.topk

    forward = rows * columns + tokens * hidden
    on_input = placement == ProbPlacement.FC1_INPUT
    backward = 3 * rows * columns + (rows if on_input else tokens) * hidden
    # Sums of dp are in fp32; a bias of down takes part in them.
    sums = 0 if on_input else rows * columns // 64 * 4 + experts * hidden * 2

    for counted in two_ranks.run(cut_experts, case):
        assert counted == {
            "gathered": (forward + backward) * 2 + sums,
            "traded": 3 * experts * hidden * columns // ranks * 2,
        }
