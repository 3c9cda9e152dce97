"""What each rank runs of contracts with other bits: row_parallel, by_rank."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from rank_programs import (
    PARAMETERS,
    Case,
    Tensors,
    draw,
    found,
    leaves,
    one_rank,
    part,
    ranks_of,
    same,
    weights_of,
)
from samebits import Layout, Routing
from samebits.parallel import experts_by_rank, row_parallel_experts, row_parallel_part
from samebits.testing.numerics import judge

DEVICE = torch.device("cpu")


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def row_parallel(case: Case, layout: Layout) -> Tensors:
    given = draw(case, DEVICE)
    cut = row_parallel_part(
        weights_of(given, layout), dist.get_rank(), dist.get_world_size()
    ).named_tensors()
    tensors = leaves({n: t for n, t in given.items() if n not in PARAMETERS} | cut, None)
    held = {n: tensors[n] for n in cut}
    out = row_parallel_experts(
        tensors["x"],
        Routing(tensors["topk_ids"], tensors["topk_probs"]),
        replace(weights_of(given), **{n: held.get(n) for n in PARAMETERS}),
        case.activation,
        group=world(),
        placement=case.placement,
    )
    out.backward(given["dout"])
    return found(tensors, out)


def by_rank(case: Case) -> Tensors:
    ranks = ranks_of(case, world(), DEVICE)
    mine = part(case, draw(case, DEVICE), ranks.rank)
    tensors = leaves(mine, None)
    out = experts_by_rank(
        tensors["x"],
        Routing(tensors["topk_ids"], tensors["topk_probs"]),
        weights_of(tensors),
        case.activation,
        ranks=ranks,
        placement=case.placement,
    )
    out.backward(mine["dout"])
    return found(tensors, out)


def row_parallel_values(cases: list[tuple[Case, Layout]]) -> list[str]:
    """Return what is not that of one rank in fp64 but for the order of sums, or does not repeat."""
    rank, size, wrong = dist.get_rank(), dist.get_world_size(), []
    for case, layout in cases:
        mine, again = row_parallel(case, layout), row_parallel(case, layout)
        whole = one_rank(case, draw(case, DEVICE), layout)
        cut = row_parallel_part(weights_of(whole, layout), rank, size).named_tensors()
        wrong += judged(f"{case} {layout}", mine, {**whole, **cut})
        wrong += [f"{n} does not repeat" for n, t in mine.items() if not same(t, again[n])]
    return wrong


def by_rank_values(cases: list[Case]) -> list[str]:
    """Return the same for ``by_rank``."""
    wrong = []
    for case in cases:
        mine, again = by_rank(case), by_rank(case)
        expected = part(case, one_rank(case, draw(case, DEVICE)), dist.get_rank())
        wrong += judged(str(case), mine, expected)
        wrong += [f"{n} does not repeat" for n, t in mine.items() if not same(t, again[n])]
    return wrong


def judged(what: str, mine: Tensors, expected: Tensors) -> list[str]:
    return [f"{what}: {n}" for n, t in mine.items() if not close(t, expected[n])]


def close(one: Tensor, other: Tensor) -> bool:
    return judge(one, other, other, torch.float64).passed
