"""What each rank of two runs where the ranks were not given the same: the errors they get."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from module_programs import HIDDEN, layer
from rank_programs import Case, draw, over_ranks, part, ranks_of, weights_of
from samebits import ExpertWeights, PostExpertNorm, ProbPlacement, Routing
from samebits.nn import Experts
from samebits.parallel import (
    Capacity,
    ExpertParallel,
    combine,
    dispatch,
    experts_by_rank,
    parallel_experts,
)

CASE = Case(tokens=(2, 2), bounds=(0, 2, 4))


def errors_of(*attempts: Callable[[], object]) -> list[str]:
    """Return the message of each attempt; empty where there was no error."""
    messages = []
    for attempt in attempts:
        try:
            attempt()
        except (TypeError, ValueError, NotImplementedError) as error:
            messages.append(str(error))
        else:
            messages.append("")
    return messages


def ids_that_are_no_experts() -> list[str]:
    """Return the errors of ``dispatch`` and ``experts_by_rank`` where rank 1 has an id of 9."""
    group = dist.group.WORLD
    assert group is not None
    ranks = ranks_of(CASE, group, torch.device("cpu"))
    mine = part(CASE, draw(CASE, torch.device("cpu")), ranks.rank)
    if ranks.rank == 1:
        mine["topk_ids"][0] = 9
    routing = Routing(mine["topk_ids"], mine["topk_probs"])
    return errors_of(
        lambda: dispatch(mine["x"], routing, ranks),
        lambda: experts_by_rank(mine["x"], routing, weights_of(mine), ranks=ranks),
    )


def placements_by_rank() -> list[str]:
    """Return the error of ``experts_by_rank`` where each rank has another placement."""
    group = dist.group.WORLD
    assert group is not None
    ranks = ranks_of(CASE, group, torch.device("cpu"))
    mine = part(CASE, draw(CASE, torch.device("cpu")), ranks.rank)
    placement = list(ProbPlacement)[ranks.rank]
    routing = Routing(mine["topk_ids"].clamp(min=0), mine["topk_probs"])
    x, weights = mine["x"], weights_of(mine)
    return errors_of(lambda: experts_by_rank(x, routing, weights, ranks=ranks, placement=placement))


def inference_beside_training() -> list[str]:
    """Return the error where rank 0 is in inference mode and rank 1 wants gradients."""
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cpu")
    given = draw(CASE, device)

    def call() -> None:
        with torch.inference_mode(dist.get_rank() == 0):
            over_ranks(CASE, given, ranks_of(CASE, group, device))

    return errors_of(call)


def frozen_scale_on_one_rank() -> list[str]:
    """Return the error where the scale that all experts share is trained on rank 0 only."""
    module = layer(ProbPlacement.FC2_OUTPUT, torch.float32, norm=PostExpertNorm(eps=1e-5))
    parallelize_module(module, init_device_mesh("cpu", (2,)), {"experts": ExpertParallel()})
    module.experts.norm_scale.requires_grad_(dist.get_rank() == 0)
    return errors_of(lambda: module(torch.zeros(3, HIDDEN)))


def numbers_of_experts() -> list[str]:
    """Return the error where rank 1 knows of more experts, in the layer and in ``dispatch``."""
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cpu")
    case = replace(CASE, bounds=(0, 2, 4 + 9 * dist.get_rank()))
    given, ranks = draw(case, device), ranks_of(case, group, device)
    mine = part(case, given, ranks.rank)
    routing = Routing(mine["topk_ids"], mine["topk_probs"])
    return errors_of(
        lambda: over_ranks(case, given, ranks),
        lambda: dispatch(mine["x"], routing, ranks),
    )


def other_parameters() -> list[str]:
    """Return the errors where rank 1 has wider experts, and where its experts have no biases."""
    group = dist.group.WORLD
    assert group is not None
    device, rank = torch.device("cpu"), dist.get_rank()
    case = replace(CASE, columns=40 + 8 * rank)
    mine = part(CASE, draw(CASE, device), rank)
    bare = ExpertWeights(gate_up=mine["gate_up"], down=mine["down"])
    weights, routing = (
        bare if rank else weights_of(mine),
        Routing(mine["topk_ids"], mine["topk_probs"]),
    )
    ranks = ranks_of(CASE, group, device)
    return errors_of(
        lambda: over_ranks(case, draw(case, device), ranks),
        lambda: parallel_experts(mine["x"], routing, weights, ranks=ranks),
    )


def with_a_capacity() -> list[str]:
    """Return the errors where rank 1 computes in another dtype, trains, or has an id of 9."""
    group = dist.group.WORLD
    assert group is not None
    device, rank = torch.device("cpu"), dist.get_rank()
    case = replace(CASE, capacity=6, backend="auto")
    ranks, mine = ranks_of(case, group, device), part(case, draw(case, device), rank)
    ids, x = mine["topk_ids"], mine["x"]

    def call(ids: Tensor) -> None:
        routing = Routing(ids, mine["topk_probs"])
        parallel_experts(x, routing, weights_of(mine), ranks=ranks)

    def in_bf16() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
            call(ids)

    def trained() -> None:
        with torch.set_grad_enabled(rank == 1):
            call(ids)

    return errors_of(in_bf16, trained, lambda: call(ids.clamp(min=9) if rank == 1 else ids))


def capacities() -> list[str]:
    """Return the error of a style whose capacity is another one on each rank."""
    style = ExpertParallel(capacity=Capacity(8 + dist.get_rank(), "cpu"))
    module = Experts(num_experts=4, hidden_size=8, intermediate_size=8)
    mesh = init_device_mesh("cpu", (2,))
    return errors_of(lambda: parallelize_module(module, mesh, style))


def refused_calls() -> list[str]:
    """Return the errors of what ``dispatch``, ``combine`` and ``experts_by_rank`` cannot do."""
    group = dist.group.WORLD
    assert group is not None
    ranks = ranks_of(CASE, group, torch.device("cpu"))
    mine = part(CASE, draw(CASE, torch.device("cpu")), ranks.rank)
    ids, probs = mine["topk_ids"], mine["topk_probs"]
    sent = dispatch(mine["x"], Routing(ids, probs), ranks)
    return errors_of(
        lambda: dispatch(mine["x"], Routing(ids, probs, 7), ranks),
        lambda: combine(sent.rows, sent, out_dtype=torch.int8),
        lambda: dispatch(mine["x"], Routing(ids, probs), ranks, num_valid_tokens=1),
        lambda: experts_by_rank([1.0], Routing(ids, probs), weights_of(mine), ranks=ranks),
    )
