"""Experts modules spread over a mesh axis: ``parallelize_module(model, mesh["ep"], plan)``."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from samebits.arguments import require_type
from samebits.errors import UnsupportedError, must
from samebits.nn.experts import Experts
from samebits.parallel.layer import parallel_experts
from samebits.parallel.ranks import Capacity, Ranks
from samebits.parallel.row_parallel import summed_backward
from samebits.routing import Routing
from samebits.weights import ExpertWeights

# The one parameter that every expert shares.
_SHARED = "norm_scale"


class ParallelExperts(Experts):
    """``samebits.nn.Experts`` whose experts are spread over ranks; made by ``ExpertParallel``.

    Parameters are DTensors of the whole layer, sharded by expert (the norm's scale is replicated,
    and its gradient summed over the ranks in rank order).
    """

    ranks: Ranks

    def forward(
        self,
        x: Tensor,
        routing: Routing,
        *,
        expert_start: int = 0,
        out_dtype: torch.dtype | None = None,
        num_valid_tokens: Tensor | None = None,
    ) -> Tensor:
        """Return each token's weighted sum over its experts, wherever they are; a collective.

        Args:
            x: ``(T, H)``, this rank's tokens; a plain tensor.
            routing: Their global ids and probabilities.
            expert_start: 0: the ranks say who holds what.
            out_dtype: See ``samebits.experts``.
            num_valid_tokens: See ``samebits.experts``.

        Returns:
            ``(T, H)``; see ``parallel_experts``.

        Raises:
            TypeError: ``x`` is a DTensor.
            ValueError: See ``parallel_experts``.
            UnsupportedError: See ``parallel_experts``.

        Determinism: see ``parallel_experts``.
        """
        if expert_start != 0:
            raise ValueError(
                must("expert_start", "be 0 where ranks hold the experts", expert_start)
            )
        if isinstance(x, DTensor):
            rule = "be this rank's tokens as a plain tensor (hint: to_local)"
            raise TypeError(must("x", rule, "a DTensor"))
        return parallel_experts(
            x,
            routing,
            self._local_weights(),
            self.activation,
            ranks=self.ranks,
            placement=self.placement,
            backend=self.backend,
            out_dtype=out_dtype,
            num_valid_tokens=num_valid_tokens,
        )

    def _local_weights(self) -> ExpertWeights:
        """Return the parameters of this rank's experts."""
        weights = self.weights
        local: dict[str, Any] = {
            name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for name, tensor in weights.named_tensors().items()
        }
        if _SHARED in local and torch.is_grad_enabled():
            local[_SHARED] = summed_backward(local[_SHARED], self.ranks.group)
        return dataclasses.replace(weights, **local)

    @torch.no_grad()
    def load_weights(self, weights: ExpertWeights) -> None:
        """Copy this rank's part of ``weights``, those of the whole layer, into the parameters.

        Args:
            weights: Plain tensors, the same on every rank; see ``samebits.nn.Experts``.

        Raises:
            TypeError: ``weights`` is no ``ExpertWeights``.
            ValueError: See ``samebits.nn.Experts``.

        Determinism: exact, for equal dtypes.
        """
        require_type("weights", weights, ExpertWeights)

        def part(tensor: Tensor, name: str) -> Tensor:
            own = getattr(self, name)
            if not isinstance(own, DTensor) or tensor.shape != getattr(self.weights, name).shape:
                return tensor
            return distribute_tensor(tensor, own.device_mesh, own.placements, src_data_rank=None)

        given = weights.to_layout(self.layout) if weights.layout != self.layout else weights
        parts: dict[str, Any] = {n: part(t, n) for n, t in given.named_tensors().items()}
        super().load_weights(dataclasses.replace(given, **parts))


class ExpertParallel(ParallelStyle):
    """Spread the experts of a ``samebits.nn.Experts`` over a mesh axis, in contiguous ranges.

    Args:
        capacity: None exchanges counts, exactly; see ``Capacity`` for buffers of a fixed size.
    """

    def __init__(self, *, capacity: Capacity | None = None) -> None:
        super().__init__()
        if capacity is not None:
            require_type("capacity", capacity, Capacity)
        self.capacity = capacity

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not Experts:
            raise UnsupportedError(
                f"ExpertParallel spreads samebits.nn.Experts, not {type(module).__name__}"
            )
        if device_mesh.ndim != 1:
            rule = "have one dimension, the one over which experts are spread"
            raise ValueError(must("device_mesh", rule, device_mesh.ndim))
        for option in ("weight_gradients", "recompute"):
            if getattr(module, option):
                raise UnsupportedError(f"experts over ranks have no {option}")
        ranks = Ranks.of(device_mesh.get_group(), module.num_experts, capacity=self.capacity)
        ranks.agree(torch.device(device_mesh.device_type))
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                raise UnsupportedError(f"{name} is a DTensor already: apply ExpertParallel first")
            placement = Replicate() if name == _SHARED else Shard(0)
            spread = distribute_tensor(parameter.detach(), device_mesh, [placement])
            wanted = parameter.requires_grad
            module.register_parameter(name, nn.Parameter(spread, requires_grad=wanted))
        module.__class__ = ParallelExperts
        assert isinstance(module, ParallelExperts)
        module.ranks = ranks
        return module
