"""Experts modules spread over a mesh axis: ``parallelize_module(model, mesh["ep"], plan)``."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
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
from samebits.parallel.ranks import Capacity, Ranks, require_alike, require_transport

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
        transport: What moves rows; see ``Ranks``.
    """

    def __init__(self, *, capacity: Capacity | None = None, transport: str = "torch") -> None:
        super().__init__()
        if capacity is not None:
            require_type("capacity", capacity, Capacity)
        require_transport(transport, capacity)
        self.capacity, self.transport = capacity, transport

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _require_kind(module)
        if isinstance(module, LoRAExperts):
            _require_kind(module.base)
        if device_mesh.ndim != 1:
            rule = "have one dimension, the one over which experts are spread"
            raise ValueError(must("device_mesh", rule, device_mesh.ndim))
        held: Any = module
        require_whole(module)
        ranks = Ranks.of(
            device_mesh.get_group(),
            held.num_experts,
            capacity=self.capacity,
            transport=self.transport,
        )
        device = torch.device(device_mesh.device_type)
        ranks.agree(device)
        agree(module, ranks.group, device)
        spread(module, device_mesh, ranks)
        return module


def _require_kind(module: nn.Module) -> None:
    if type(module) not in _SPREAD:
        kinds = ", ".join(kind.__name__ for kind in _SPREAD)
        actual = type(module).__name__
        raise UnsupportedError(f"ExpertParallel spreads {kinds} of samebits.nn, not {actual}")


def agree(
    module: nn.Module, group: dist.ProcessGroup, device: torch.device, *, besides: str = ""
) -> None:
    """Raise on every rank of ``group`` if their modules differ; a collective, waits for the device.

    Args:
        module: The experts, not spread yet.
        group: The ranks.
        device: Where the group communicates.
        besides: What else has to be alike.

    Raises:
        ValueError: Another rank has other sizes, dtypes or options.
    """
    held = [(n, *t.shape, t.dtype) for n, t in module.named_parameters()]
    shown = ", ".join(text for text in (module.extra_repr(), besides) if text)
    require_alike("experts", f"{module!r} {held} {besides}", shown, group, device)


def require_whole(module: nn.Module) -> None:
    """Raise if a parameter or buffer of ``module`` is spread already.

    Raises:
        UnsupportedError: One is a DTensor.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, DTensor):
            raise UnsupportedError(f"{name} is a DTensor already: spread experts first")


def spread(module: nn.Module, mesh: DeviceMesh, ranks: Ranks) -> None:
    """Make ``module``, in place, one whose experts are spread, as its parameters then are."""
    held: Any = module
    if isinstance(module, LoRAExperts):
        spread(module.base, mesh, ranks)
    alone = {n for n, p in module.named_parameters(recurse=False) if len(p) != held.num_experts}

    def placements_of(name: str) -> list[Placement]:
        return [Replicate() if name == "norm_scale" or name in alone else Shard(0)]

    spread_tensors(module, mesh, placements_of)
    held.__class__ = _SPREAD[type(module)]
    held.ranks = ranks


def spread_tensors(
    module: nn.Module, mesh: DeviceMesh, placements_of: Callable[[str], list[Placement]]
) -> None:
    """Replace the parameters and buffers of ``module`` itself by DTensors."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        whole = distribute_tensor(parameter.detach(), mesh, placements_of(name))
        wanted = parameter.requires_grad
        module.register_parameter(name, nn.Parameter(whole, requires_grad=wanted))
    for name, buffer in list(module.named_buffers(recurse=False)):
        module.register_buffer(name, distribute_tensor(buffer, mesh, placements_of(name)))
