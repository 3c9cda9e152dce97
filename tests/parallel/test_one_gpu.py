"""A group of one rank over NCCL: what is recorded, waited for and repeated on a GPU."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from rank_programs import Case, overflow, repeated_calls, same_bits_composed
from samebits import ProbPlacement
from samebits.backends import passes

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def cases(*, capacity: int | None = None) -> list[Case]:
    return [
        Case(
            tokens=(200,),
            bounds=(0, 6),
            hidden=256,
            columns=192,
            placement=placement,
            dtype=torch.bfloat16,
            backend="fused",
            capacity=capacity,
        )
        for placement in ProbPlacement
    ]


@pytest.mark.usefixtures("world", "unpoisoned_memory")
def test_calls_again_have_the_bits_of_one_rank() -> None:
    passes.forget()

    assert repeated_calls(cases(), "cuda") == []
    assert repeated_calls(cases(capacity=600)[:1], "cuda") == []
    # Whatever came three times with its shapes was recorded and played.
    assert [found for found in passes.passes() if isinstance(found, str)] == []
    assert len(passes.passes()) > 3


@pytest.mark.usefixtures("world")
def test_the_parts_one_by_one_and_what_does_not_fit() -> None:
    assert same_bits_composed(cases()[2:], "cuda") == []
    assert overflow("cuda", "auto") == []
