"""Windows of ranks on a CPU: files that every process maps stand for the memory of GPUs."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from rank_programs import (
    Case,
    draw,
    part,
    ranks_of,
    repeated_calls,
    same_bits,
    same_bits_composed,
    weights_of,
)
from samebits import Routing
from samebits.nn import Experts
from samebits.parallel import Capacity, ExpertParallel, Ranks, parallel_experts, window


def mapped(group: dist.ProcessGroup, _device: torch.device, size: int) -> window.Memory:
    """Return files of every rank as memory; a collective."""
    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(folder, group=group, group_src=0)

    def of_rank(rank: int) -> Tensor:
        name = str(Path(folder[0]) / str(rank))
        return torch.from_file(name, shared=True, size=size, dtype=torch.uint8)

    own = of_rank(dist.get_rank(group))
    # Whatever is read before it was written is NaN, and no expert.
    own.fill_(255)
    dist.barrier(group)
    ranks = range(dist.get_world_size(group))
    return window.Memory([of_rank(rank) for rank in ranks], lambda: dist.barrier(group))


@contextmanager
def in_files() -> Iterator[None]:
    """Open windows in files, and forget them at the end."""
    window.window_of.cache_clear()
    with patch.object(window, "open_memory", mapped):
        try:
            yield
        finally:
            window.window_of.cache_clear()


def through_windows(cases: list[Case]) -> list[str]:
    """Return what differs from the one-rank run, in layers and in their parts."""
    with in_files():
        wrong = same_bits(cases)
        whole = [case for case in cases if case.wanted is None]
        wrong += repeated_calls(whole[:3])
        # The expert code of a caller wants experts.
        wrong += same_bits_composed([c for c in whole if len(set(c.bounds)) == len(c.bounds)])
    return wrong


def inference_first() -> list[str]:
    """Return what differs where a window is opened in inference mode, and then serves training."""
    group, device = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    case = Case(tokens=(9, 4), bounds=(0, 2, 6), transport="window")
    mine = part(case, draw(case, device), dist.get_rank())
    routing = Routing(mine["topk_ids"], mine["topk_probs"])
    ranks = ranks_of(case, group, device)
    with in_files():
        with torch.inference_mode():
            parallel_experts(mine["x"], routing, weights_of(mine), ranks=ranks)
        return same_bits([case])


def refused() -> list[str]:
    """Return the errors of windows with a capacity, and twice on a CPU."""
    group, size = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    module = Experts(num_experts=4, hidden_size=8, intermediate_size=8)
    parallelize_module(module, init_device_mesh("cpu", (size,)), ExpertParallel(transport="window"))
    ids, probs = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)

    def call() -> Tensor:
        out: Tensor = module(torch.zeros(2, 8), Routing(ids, probs))
        return out

    def with_capacity() -> Ranks:
        return Ranks.of(group, 4, capacity=Capacity(2, "cpu"), transport="window")

    def style_with_capacity() -> ExpertParallel:
        return ExpertParallel(capacity=Capacity(2, "cpu"), transport="window")

    messages = []
    for attempt in (with_capacity, style_with_capacity, call, call):
        try:
            attempt()
        except NotImplementedError as error:
            messages.append(str(error))
    return messages
