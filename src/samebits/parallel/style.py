"""Experts modules spread over a mesh axis: ``parallelize_module(model, mesh["ep"], plan)``."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from samebits.arguments import require_type
from samebits.errors import UnsupportedError, must
from samebits.nn.experts import Experts
from samebits.nn.lora import LoRAExperts
from samebits.nn.quantized import QuantizedExperts
from samebits.parallel.modules import (
    ParallelExperts,
    ParallelLoRAExperts,
    ParallelQuantizedExperts,
    SpreadModule,
)
from samebits.parallel.ranks import Capacity, Ranks

# How a module that is spread over ranks is called.
_SPREAD: dict[type[nn.Module], type[SpreadModule]] = {
    Experts: ParallelExperts,
    QuantizedExperts: ParallelQuantizedExperts,
    LoRAExperts: ParallelLoRAExperts,
}


class ExpertParallel(ParallelStyle):
    """Spread experts over a mesh axis, in contiguous ranges.

    For ``samebits.nn.Experts``, ``QuantizedExperts`` and ``LoRAExperts``.

    Args:
        capacity: None exchanges counts, exactly; see ``Capacity`` for buffers of a fixed size.
    """

    def __init__(self, *, capacity: Capacity | None = None) -> None:
        super().__init__()
        if capacity is not None:
            require_type("capacity", capacity, Capacity)
        self.capacity = capacity

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) not in _SPREAD:
            kinds = ", ".join(kind.__name__ for kind in _SPREAD)
            actual = type(module).__name__
            raise UnsupportedError(f"ExpertParallel spreads {kinds} of samebits.nn, not {actual}")
        if device_mesh.ndim != 1:
            rule = "have one dimension, the one over which experts are spread"
            raise ValueError(must("device_mesh", rule, device_mesh.ndim))
        held: Any = module
        require_whole(module)
        ranks = Ranks.of(device_mesh.get_group(), held.num_experts, capacity=self.capacity)
        ranks.agree(torch.device(device_mesh.device_type))
        spread(module, device_mesh, [Shard(0)], ranks)
        return module


def require_whole(module: nn.Module) -> None:
    """Raise if a parameter or buffer of ``module`` is spread already."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, DTensor):
            raise UnsupportedError(f"{name} is a DTensor already: spread experts first")


def spread(module: nn.Module, mesh: DeviceMesh, placements: list[Placement], ranks: Ranks) -> None:
    """Make ``module``, in place, one whose experts are spread, as its parameters then are."""
    held: Any = module
    if isinstance(module, LoRAExperts):
        spread(module.base, mesh, placements, ranks)
    owned = (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    for name, tensor in [item for items in owned for item in items]:
        shared = name == "norm_scale" or tensor.shape[0] != held.num_experts
        chosen = [Replicate()] * mesh.ndim if shared else placements
        whole = distribute_tensor(tensor.detach(), mesh, chosen)
        if isinstance(tensor, nn.Parameter):
            wanted = tensor.requires_grad
            module.register_parameter(name, nn.Parameter(whole, requires_grad=wanted))
        else:
            module.register_buffer(name, whole)
    held.__class__ = _SPREAD[type(module)]
    held.ranks = ranks
