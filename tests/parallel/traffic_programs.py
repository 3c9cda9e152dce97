"""What each rank runs to count what travels: the formulas of the documentation, measured."""

from collections import Counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from rank_programs import Case, draw, over_ranks, ranks_of
from samebits import Layout
from tensor_programs import run


class Traffic:
    """Count the bytes that this rank gets from others, by collective; call as a context."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()

    def __enter__(self) -> "Traffic":
        gather, exchange, rank = dist.all_gather, dist.all_to_all_single, dist.get_rank()

        def all_gather(every: list[Tensor], mine: Tensor, **options: Any) -> Any:
            self.bytes["gathered"] += sum(t.nbytes for t in every)
            return gather(every, mine, **options)

        def all_to_all_single(
            out: Tensor,
            given: Tensor,
            received: list[int] | None = None,
            sent: list[int] | None = None,
            **options: Any,
        ) -> Any:
            if received is None or sent is None:
                self.bytes["traded"] += out.nbytes
            else:
                width = out.nbytes // max(out.shape[0], 1)
                self.bytes["arrived"] += (sum(received) - received[rank]) * width
            return exchange(out, given, received, sent, **options)

        self._patches = [
            mock.patch.object(dist, "all_gather", all_gather),
            mock.patch.object(dist, "all_to_all_single", all_to_all_single),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


def spread_experts(capacity: int | None) -> dict[str, int]:
    """Return the bytes of a step where every slot goes to the other rank of two."""
    size, rank = dist.get_world_size(), dist.get_rank()
    case = Case(tokens=(8,) * size, bounds=(0, 2, 4), topk=1, capacity=capacity)
    given = draw(case, torch.device("cpu"))
    given["topk_ids"] = torch.tensor([2] * 8 + [0] * 8)[:, None]
    world = dist.group.WORLD
    assert world is not None
    with Traffic() as traffic:
        over_ranks(case, given, ranks_of(case, world, torch.device("cpu")))
    assert rank < size
    return dict(traffic.bytes)


def cut_experts(case: Case) -> dict[str, int]:
    """Return the bytes of a step of experts that are cut over all ranks."""
    world = dist.group.WORLD
    assert world is not None
    with Traffic() as traffic:
        run(case, draw(case, torch.device("cpu")), Layout(), world)
    return dict(traffic.bytes)
