"""What each rank runs of experts that are cut: tensor parallel, beside one rank."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rank_programs import PARAMETERS, Case, Tensors, draw, found, leaves, one_rank, same
from samebits import ExpertWeights, Layout, Routing
from samebits.parallel import TensorParallelWeights, tensor_parallel_experts
from samebits.testing.numerics import judge


def cut(tensors: Tensors, layout: Layout, rank: int, size: int) -> TensorParallelWeights:
    weights = ExpertWeights(**{n: tensors[n] for n in PARAMETERS}, layout=layout)
    return TensorParallelWeights.shard(weights, rank, size)


def run(case: Case, given: Tensors, layout: Layout, group: dist.ProcessGroup) -> Tensors:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    part = cut(given, layout, rank, size)
    mine = {n: getattr(part, n) for n in PARAMETERS}
    tensors = leaves({**given, **mine}, None)
    out = tensor_parallel_experts(
        tensors["x"],
        Routing(tensors["topk_ids"], tensors["topk_probs"]),
        TensorParallelWeights(**{n: tensors[n] for n in PARAMETERS}, layout=layout),
        case.activation,
        group=group,
        placement=case.placement,
    )
    out.backward(given["dout"])
    return found(tensors, out)


def part_of(whole: Tensors, layout: Layout, rank: int, size: int) -> Tensors:
    part = cut(whole, layout, rank, size)
    return {**whole, **{n: getattr(part, n) for n in PARAMETERS}}


def tensor_bits(cases: list[tuple[Case, Layout]], place: str = "cpu") -> list[str]:
    """Return what differs between all ranks and one; on a GPU one is ``experts``."""
    device, rank, size = torch.device(place), dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    assert world is not None
    # Every rank makes every group.
    alone = [dist.new_group([r]) for r in range(size)][rank]
    wrong = []
    for case, layout in cases:
        given = draw(case, device)
        mine = run(case, given, layout, world)
        if place == "cpu":
            expected = part_of(run(case, given, layout, alone), Layout(), rank, size)
        else:
            expected = part_of(one_rank(case, given, layout), layout, rank, size)
        wrong += [
            f"{case} {layout}: {n} on rank {rank}"
            for n, t in mine.items()
            if not same(t, expected[n])
        ]
    return wrong


def tensor_values(cases: list[tuple[Case, Layout]]) -> list[str]:
    """Return what is not ``experts`` of the whole, in fp64 but for the order of sums."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    assert world is not None
    wrong = []
    for narrow, layout in cases:
        case = replace(narrow, dtype=torch.float64, probs=torch.float64)
        given = draw(case, torch.device("cpu"))
        mine = run(case, given, layout, world)
        expected = part_of(one_rank(case, given, layout), layout, rank, size)
        wrong += [f"{case} {layout}: {n}" for n, t in mine.items() if not close(t, expected[n])]
    return wrong


def refusals() -> list[str]:
    """Return the errors of calls whose arguments do not fit one another, on a group of two."""
    group = dist.group.WORLD
    assert group is not None
    case = Case(tokens=(3,), bounds=(0, 4), columns=128)
    given = draw(case, torch.device("cpu"))
    x, routing = given["x"], Routing(given["topk_ids"], given["topk_probs"])
    part = cut(given, Layout(), 0, 2)
    narrow = replace(part, gate_up=part.gate_up[:, :64], down=part.down[..., :64])

    def attempt(weights: TensorParallelWeights, **changes: Any) -> str:
        arguments = {"x": x, "routing": routing, "group": group} | changes
        try:
            tensor_parallel_experts(weights=weights, **arguments)
        except (TypeError, ValueError) as error:
            return str(error)
        return ""

    return [
        attempt(cut(given, Layout(), 0, 1)),
        attempt(narrow),
        attempt(replace(part, gate_up=part.gate_up[:3])),
        attempt(replace(part, gate_up=part.gate_up[:, :96])),
        attempt(replace(part, down_bias=torch.zeros(4, 48))),
        attempt(replace(part, gate_up_bias=torch.zeros(4, 128, dtype=torch.float64))),
        attempt(part, routing=replace(routing, topk_probs=routing.topk_probs.double())),
        attempt(part, num_valid_tokens=2),
        attempt(part, x=[1.0]),
    ]


def close(one: Tensor, other: Tensor) -> bool:
    return judge(one, other, other, torch.float64).passed
