from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from module_programs import (
    copied,
    load,
    load_weights_of_the_whole,
    norm_scale,
    refusals,
    router_gradients,
    save,
    spread_layer,
    with_fsdp,
    with_tensor_parallel,
)
from rank_processes import Processes
from samebits import ProbPlacement

pytestmark = pytest.mark.distributed


def nothing(results: list[list[str]]) -> bool:
    return [line for lines in results for line in lines] == []


def test_a_layer_and_its_gradients_have_the_bits_of_one_rank(two_ranks: Processes) -> None:
    for placement, dtype in product(ProbPlacement, [torch.float32, torch.bfloat16]):
        assert nothing(two_ranks.run(spread_layer, placement, dtype))


def test_activation_checkpointing_exchanges_again(two_ranks: Processes) -> None:
    run = partial(spread_layer, checkpointed=True)

    assert nothing(two_ranks.run(run, ProbPlacement.FC1_INPUT, torch.float32))


def test_more_ranks_than_two_and_one_without_tokens(four_ranks: Processes) -> None:
    assert nothing(four_ranks.run(spread_layer, ProbPlacement.FC2_OUTPUT, torch.float32))


@pytest.mark.parametrize("placement", list(ProbPlacement))
def test_shares_of_the_router_add_up(two_ranks: Processes, placement: ProbPlacement) -> None:
    assert nothing(two_ranks.run(router_gradients, placement))


def test_a_scale_that_all_experts_share_gets_the_sum(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(norm_scale))


def test_a_deep_copy_is_spread_too(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(copied))


def test_with_fsdp(four_ranks: Processes) -> None:
    assert nothing(four_ranks.run(with_fsdp, torch.float32))


def test_with_tensor_parallelism_of_the_rest(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(with_tensor_parallel))


def test_a_checkpoint_of_one_degree_loads_on_another(four_ranks: Processes, tmp_path: Path) -> None:
    for saved, loaded in ((2, 4), (4, 1)):
        folder = str(tmp_path / f"{saved}")
        four_ranks.run(save, folder, saved)

        assert nothing(four_ranks.run(load, folder, loaded))


def test_weights_of_the_whole_layer_can_be_copied_in(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(load_weights_of_the_whole))


def test_refusals(two_ranks: Processes) -> None:
    kinds = "ExpertParallel spreads Experts, QuantizedExperts, LoRAExperts of samebits.nn"
    for messages in two_ranks.run(refusals):
        assert messages == [
            f"{kinds}, not Router",
            f"{kinds}, not ParallelExperts",
            "expert_start must be 0 where ranks hold the experts, got 1",
            f"{kinds}, not OwnExperts",
        ]
