"""Experts modules whose experts are spread over ranks; made by ``ExpertParallel``.

Parameters (of quantised experts: buffers) are DTensors of the whole layer, sharded by expert. What
all experts share (the norm's scale, a shared adapter) is replicated, and its gradient summed over
the ranks in rank order.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from samebits.arguments import require_type
from samebits.errors import UnsupportedError, must
from samebits.formats.weights import Parameters, QuantizedWeights
from samebits.nn.experts import Experts
from samebits.nn.lora import LoRAExperts
from samebits.nn.quantized import QuantizedExperts
from samebits.parallel.layer import parallel_experts
from samebits.parallel.owners import ShardedOwner, local_of
from samebits.parallel.ranks import Ranks
from samebits.parallel.row_parallel import summed_backward
from samebits.routing import Routing
from samebits.weight_gradients import Destination, Owner
from samebits.weights import ExpertWeights


class SpreadModule(nn.Module):
    """What modules over ranks have in common; their parameters are DTensors."""

    ranks: Ranks

    def local_weights(self) -> Parameters:
        """Return the parameters of this rank's experts, as this rank computes with them."""
        raise NotImplementedError

    def _options(self) -> dict[str, Any]:
        """Return what ``parallel_experts`` gets beside tokens, parameters and ranks."""
        held: Any = self
        return {
            "activation": held.activation,
            "placement": held.placement,
            "backend": held.backend,
        }

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
        check_tokens(x, expert_start)
        return parallel_experts(
            x,
            routing,
            self.local_weights(),
            ranks=self.ranks,
            out_dtype=out_dtype,
            num_valid_tokens=num_valid_tokens,
            **self._options(),
        )

    def _local(self, tensor: Tensor) -> Tensor:
        return local_part(tensor, self.ranks.group)


def local_part(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of a parameter; of a replicated one, with the sum as gradient.

    Determinism: exact; the sum in rank order.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    replicated = all(placement.is_replicate() for placement in tensor.placements)
    if replicated and tensor.requires_grad and torch.is_grad_enabled():
        return summed_backward(local, group)
    return local


def parts_of(module: Experts, weights: ExpertWeights) -> ExpertWeights:
    """Return ``weights`` of the whole layer, spread as the parameters of ``module`` are.

    Determinism: exact copies.
    """
    require_type("weights", weights, ExpertWeights)
    held = module.weights

    def part(tensor: Tensor, own: Tensor | None) -> Tensor:
        if not isinstance(own, DTensor) or tensor.shape != own.shape:
            return tensor
        return distribute_tensor(tensor, own.device_mesh, own.placements, src_data_rank=None)

    given = weights.to_layout(module.layout) if weights.layout != module.layout else weights
    named = given.named_tensors()
    parts: dict[str, Any] = {n: part(t, getattr(held, n)) for n, t in named.items()}
    return dataclasses.replace(given, **parts)


def check_tokens(x: Tensor, expert_start: int) -> None:
    """Raise unless ``x`` are a rank's tokens and ``expert_start`` leaves it to the ranks."""
    if expert_start != 0:
        raise ValueError(must("expert_start", "be 0 where ranks hold the experts", expert_start))
    if isinstance(x, DTensor):
        rule = "be this rank's tokens as a plain tensor (hint: to_local)"
        raise TypeError(must("x", rule, "a DTensor"))


class ParallelExperts(SpreadModule, Experts):
    """``samebits.nn.Experts`` whose experts are spread over ranks."""

    def local_weights(self) -> ExpertWeights:
        """Return the parameters of this rank's experts, as this rank computes with them."""
        if self.weight_gradients is None:
            return self.weights.map(self._local)
        if self.norm is not None:
            raise UnsupportedError(
                "weight_gradients over ranks takes no norm_scale, whose gradient is summed over "
                "them; hint: weight_gradients=None"
            )
        local: dict[str, Any] = {n: local_of(p) for n, p in self.named_parameters(recurse=False)}
        if self.orientation == "in_out":
            local |= {n: local[n].transpose(1, 2) for n in ("gate_up", "down")}
        return dataclasses.replace(self.weights, **local)

    def _options(self) -> dict[str, Any]:
        policy = self.weight_gradients
        destination: Destination | None = None if policy is None else policy.of(self._owners())
        return {
            **super()._options(),
            "weight_gradients": destination,
            "recompute": self.recompute,
        }

    def _owners(self) -> dict[str, Owner]:
        transposed = self.orientation == "in_out"
        return {
            name: ShardedOwner(parameter, transposed=transposed and name in ("gate_up", "down"))
            for name, parameter in self.named_parameters(recurse=False)
        }

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
        super().load_weights(parts_of(self, weights))


class ParallelQuantizedExperts(SpreadModule, QuantizedExperts):
    """``samebits.nn.QuantizedExperts`` whose experts are spread over ranks."""

    def local_weights(self) -> QuantizedWeights:
        """Return the parameters of this rank's experts, as this rank computes with them."""
        if self.row_format is not None:
            raise UnsupportedError("experts over ranks have no activations in 8 bits")
        vectors: dict[str, Any] = {
            name: None if tensor is None else self._local(tensor)
            for name in ("gate_up_bias", "down_bias", "norm_scale")
            for tensor in [getattr(self, name)]
        }
        return QuantizedWeights(
            gate_up=self._matrix("gate_up", self.hidden_size),
            down=self._matrix("down", self.intermediate_size),
            dtype=self.dtype,
            layout=self.layout,
            norm=self.norm,
            **vectors,
        )

    @property
    def weights(self) -> QuantizedWeights:
        """Those of this rank's experts: a format's bytes have no DTensor of numbers."""
        return self.local_weights()

    def _buffer(self, name: str) -> Tensor:
        return self._local(super()._buffer(name))


class ParallelLoRAExperts(SpreadModule, LoRAExperts):
    """``samebits.nn.LoRAExperts`` whose experts, and adapters of experts, are spread over ranks."""

    def local_weights(self) -> ExpertWeights:
        """Return the merged parameters of this rank's experts, differentiable in the adapters."""
        adapters = {n: self._local(p) for n, p in self.named_parameters(recurse=False)}
        return self._adapted(self._frozen().local_weights(), adapters)

    @property
    def weights(self) -> ExpertWeights:
        """Those of this rank's experts."""
        return self.local_weights()

    def _frozen(self) -> ParallelExperts | ParallelQuantizedExperts:
        base = self.base
        assert isinstance(base, ParallelExperts | ParallelQuantizedExperts)
        return base

    def _options(self) -> dict[str, Any]:
        base = self.base
        return {
            "activation": base.activation,
            "placement": base.placement,
            "backend": base.backend,
            "recompute": self._recompute,
        }

    def _store(self, weights: ExpertWeights) -> None:
        for name, tensor in self._frozen().local_weights().named_tensors().items():
            tensor.copy_(getattr(weights, name))
