"""Tokens to the ranks of their experts in transformers' expert-parallel plans, with our bits.

transformers (from 5.24) asks an ``EPImplementation``, by name, how tokens reach the experts::

    register_expert_parallel()
    DistributedConfig(tp_size=2, ep_size=2, ep_implementation="samebits")

==============================  ===================================================
transformers                    samebits
==============================  ===================================================
``ep_mesh``                     ``Ranks``: ``num_experts`` of each rank, in rank order
``tp_mesh``                     ranks that share a batch: each takes a slice of it
``top_k_index``                 global ids
==============================  ===================================================

Its own implementations run with ``experts_implementation="samebits"`` too, ids ``num_experts`` of
their convention being dropped slots; they add in their order, hence with other bits.
"""

import importlib
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from samebits.errors import UnsupportedError
from samebits.integrations.transformers.plugin import NAME, parameters_of
from samebits.integrations.transformers.translation import (
    ATTRIBUTE,
    Translation,
    is_current,
)
from samebits.integrations.transformers.verify import translate
from samebits.parallel import Ranks, parallel_experts
from samebits.routing import Routing

_MODULE = "transformers.distributed.expert_parallel"


def register_expert_parallel() -> None:
    """Enter the name ``samebits`` into transformers' expert-parallel implementations; idempotent.

    Raises:
        ImportError: transformers is absent or has no such interface (it came with 5.24).

    Determinism: no arithmetic.
    """
    try:
        module = importlib.import_module(_MODULE)
        interface = module.EPImplementationInterface
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"expert parallelism needs transformers >= 5.24 with {_MODULE}: {error}"
        ) from error
    interface.register(NAME, ExchangedExperts)


class ExchangedExperts:
    """Run the experts of one module for the tokens of all ranks; called by transformers.

    Args:
        experts: The experts module, with ``num_experts`` of this rank.
        ep_mesh: The ranks over which experts are spread.
        tp_mesh: The ranks that hold the same batch.
    """

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        group = ep_mesh.get_group()
        held: Any = experts.num_experts
        bounds = tuple(held * rank for rank in range(dist.get_world_size(group) + 1))
        self.experts, self.tp_mesh = experts, tp_mesh
        self.ranks = Ranks(group, bounds)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return each token's weighted sum over its experts; a collective.

        Args:
            hidden_states: ``(T, H)``; the same on the ranks of ``tp_mesh``.
            top_k_index: ``(T, K)``, global ids.
            top_k_weights: ``(T, K)``.

        Returns:
            ``(T, H)`` in the dtype of ``hidden_states``; differentiable.

        Raises:
            UnsupportedError: The module cannot be translated, or has a norm that all experts share.

        Determinism: see ``samebits.parallel.parallel_experts``.
        """
        translation = self._translation()
        weights = parameters_of(self.experts, translation, hidden_states.dtype)
        given = (hidden_states, top_k_index, top_k_weights.float())
        x, ids, probs = (self._slice(tensor) for tensor in given)
        out = parallel_experts(
            x, Routing(ids.long(), probs), weights, translation.activation, ranks=self.ranks
        )
        return self._whole(out.to(hidden_states.dtype), hidden_states)

    def _translation(self) -> Translation:
        module, name = self.experts, type(self.experts).__name__
        translation: Translation | None = getattr(module, ATTRIBUTE, None)
        if translation is None or not is_current(module, translation):
            translation = translate(module)
            setattr(module, ATTRIBUTE, translation)
        if translation.norm is not None:
            raise UnsupportedError(
                f"{name}: a norm that all experts share is not spread over ranks"
            )
        return translation

    def _slice(self, tensor: Tensor) -> Tensor:
        """Return this rank's tokens of a batch that the ranks of ``tp_mesh`` share."""
        if self.tp_mesh.size() == 1:
            return tensor
        shared = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
        return shared.redistribute(placements=[Shard(0)]).to_local()

    def _whole(self, out: Tensor, like: Tensor) -> Tensor:
        """Return the tokens of all ranks of ``tp_mesh``; a collective."""
        if self.tp_mesh.size() == 1:
            return out
        shape, strides = like.shape, (like.shape[1], 1)
        sliced = DTensor.from_local(
            out.contiguous(), self.tp_mesh, [Shard(0)], run_check=False, shape=shape, stride=strides
        )
        return sliced.full_tensor()
