from itertools import product
from pathlib import Path

import pytest
import torch

from rank_processes import Processes
from samebits import ProbPlacement
from training_programs import Setting, merged, refused, reloaded, trained

pytestmark = pytest.mark.distributed

FC1, FC2, OUT = ProbPlacement.FC1_INPUT, ProbPlacement.FC2_INPUT, ProbPlacement.FC2_OUTPUT


def nothing(results: list[list[str]]) -> bool:
    differing = [line for lines in results for line in lines]
    assert differing == []
    return True


def test_z_computed_again(two_ranks: Processes) -> None:
    settings = [
        Setting(placement=placement, dtype=dtype, recompute=True, capacity=capacity)
        for (placement, capacity), dtype in product(
            [(FC1, None), (FC2, 18), (OUT, None)], [torch.float32, torch.bfloat16]
        )
    ]

    assert nothing(two_ranks.run(trained, settings))


def test_gradients_into_main_grad_and_later(two_ranks: Processes) -> None:
    settings = [
        Setting(placement=p, dtype=d, main_grad=main, delayed=late, recompute=again, capacity=c)
        for (p, d, again, c), (main, late) in product(
            [(FC1, torch.bfloat16, False, 18), (OUT, torch.float32, True, None)],
            [(True, False), (False, True), (True, True)],
        )
    ]
    settings += [
        Setting(main_grad=True, attributes=("grad_added_to_main_grad",)),
        Setting(main_grad=True, delayed=True, attributes=("grad_added_to_main_grad",)),
        Setting(main_grad=True, orientation="in_out", placement=FC2),
        Setting(delayed=True, orientation="in_out", frozen=("down", "gate_up_bias")),
    ]

    assert nothing(two_ranks.run(trained, settings))


def test_ranks_without_tokens_or_experts_wait_for_nothing(four_ranks: Processes) -> None:
    settings = [
        Setting(main_grad=main, delayed=late, recompute=True)
        for main, late in [(True, False), (False, True), (True, True)]
    ]

    assert nothing(four_ranks.run(trained, settings))


def test_quantised_experts_and_adapters(two_ranks: Processes) -> None:
    settings = [
        Setting(kind=kind, dtype=torch.bfloat16, placement=placement, capacity=capacity)
        for kind, (placement, capacity) in product(
            ["quantised", "adapted", "adapted quantised"], [(FC1, None), (OUT, 18)]
        )
    ]
    settings.append(Setting(kind="shared adapter", recompute=True))

    assert nothing(two_ranks.run(trained, settings))
    assert nothing(two_ranks.run(merged))


def test_a_checkpoint_of_quantised_experts_and_adapters(
    four_ranks: Processes, tmp_path: Path
) -> None:
    assert nothing(four_ranks.run(reloaded, str(tmp_path)))


def test_checkpointing_and_autocast(two_ranks: Processes) -> None:
    settings = [
        Setting(checkpointed=kind, recompute=again, autocast=autocast)
        for kind, again, autocast in [
            ("reentrant", False, False),
            ("non-reentrant", True, False),
            ("", False, True),
            ("reentrant", True, True),
        ]
    ]
    settings.append(Setting(checkpointed="non-reentrant", main_grad=True, delayed=True))

    assert nothing(two_ranks.run(trained, settings))


def test_frozen_parameters_and_other_inputs(two_ranks: Processes) -> None:
    settings = [
        Setting(frozen=("gate_up", "gate_up_bias", "down", "down_bias")),
        Setting(frozen=("gate_up", "gate_up_bias", "down", "down_bias"), tokens_wanted=False),
        Setting(stride=2),
        Setting(dtype=torch.float16, placement=FC2),
    ]

    assert nothing(two_ranks.run(trained, settings))


def test_what_is_refused(two_ranks: Processes) -> None:
    for normed, without, plain in two_ranks.run(refused):
        assert normed == (
            "weight_gradients over ranks takes no norm_scale, whose gradient is summed over them; "
            "hint: weight_gradients=None"
        )
        assert without.startswith("gate_up.main_grad must be a tensor (5, 48, 32) in torch.float32")
        assert "main_grad must be a DTensor with placements (Shard(dim=0),)" in plain
