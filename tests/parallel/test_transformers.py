import pytest

from rank_processes import Processes

pytest.importorskip("transformers.distributed.expert_parallel", reason="needs transformers 5.24")

from transformers_programs import cut, own_batches, packing_is_refused, quantised, shared_batch

pytestmark = pytest.mark.distributed


def nothing(results: list[list[str]]) -> bool:
    differing = [line for lines in results for line in lines]
    assert differing == []
    return True


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_own_batches_have_the_bits_of_one_rank(two_ranks: Processes, name: str) -> None:
    assert nothing(two_ranks.run(own_batches, name))


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_a_shared_batch_has_the_bits_of_one_rank(two_ranks: Processes, name: str) -> None:
    assert nothing(two_ranks.run(shared_batch, name, "samebits"))


def test_quantised_experts_have_the_bits_of_one_rank(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(quantised))


def test_experts_that_are_spread_are_not_packed(two_ranks: Processes) -> None:
    for message in two_ranks.run(packing_is_refused):
        assert message.startswith("gate_up_proj of the module is a DTensor")


@pytest.mark.parametrize("how", ["all_to_all", "all_reduce"])
def test_their_exchanges_run_our_experts_on_every_rank(two_ranks: Processes, how: str) -> None:
    assert nothing(two_ranks.run(shared_batch, "gpt_oss", how))


def test_their_tensor_parallel_plan(two_ranks: Processes) -> None:
    assert nothing(two_ranks.run(cut))
