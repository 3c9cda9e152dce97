"""Experts modules each of whose experts is cut over ranks; made by ``ExpertTensorParallel``."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.errors import UnsupportedError
from samebits.nn.experts import Experts
from samebits.parallel.modules import check_tokens, local_part, parts_of
from samebits.parallel.ranks import Ranks
from samebits.parallel.stages import COLUMNS
from samebits.parallel.tensor import tensor_parallel_experts
from samebits.parallel.tensor_weights import TensorParallelWeights
from samebits.routing import Routing
from samebits.weights import ExpertWeights


def check_cuttable(module: Experts, size: int) -> None:
    """Raise unless every expert of ``module`` can be cut over ``size`` ranks.

    Raises:
        UnsupportedError: An option or a size has no bits that do not depend on the ranks, or the
            layout no rows that are neighbours for each rank.
    """
    hidden, columns, layout = module.hidden_size, module.intermediate_size, module.layout
    reason = None
    if module.norm is not None:
        reason = "a post-expert norm takes its mean over all of H, here cut"
    elif module.weight_gradients is not None:
        reason = "weight_gradients are for whole experts; products of cut ones round on their own"
    elif module.backend != "auto":
        reason = f"cut experts have products of their own, not those of backend {module.backend}"
    elif size > 1 and columns % (COLUMNS * size):
        reason = f"F = {columns} is no multiple of {COLUMNS} * {size}: sums of dp end there"
    elif hidden % size:
        reason = f"H = {hidden} is no multiple of {size}, and a rank holds H / {size} of down"
    elif size > 1 and module.activation.gated:
        block = layout.interleave
        if block is None or (columns // size) % block:
            reason = (
                f"with layout {layout.key} a rank's rows of gate_up are no neighbours\n"
                f"hint: layout=Layout(interleave={COLUMNS}), to which load_weights converts"
            )
    if reason is not None:
        raise UnsupportedError(reason)


@dataclass(frozen=True, eq=False)
class CutOver:
    """The ranks over which each expert is cut; copies of a module keep them."""

    group: dist.ProcessGroup

    def __deepcopy__(self, _memo: object) -> "CutOver":
        return self  # a group of processes has no copies


class TensorParallelExperts(Experts):
    """``samebits.nn.Experts`` each of whose experts is cut over ranks, and maybe spread besides.

    Parameters are DTensors of the whole layer: ``gate_up`` and its bias sharded along F, ``down``
    and its bias along H, and all of them by expert where experts are spread.
    """

    cut_over: CutOver
    # The ranks over which experts are spread; None where each rank has a part of every expert.
    ranks: Ranks | None

    def local_weights(self) -> TensorParallelWeights:
        """Return this rank's part of the parameters, as this rank computes with it."""
        local = {
            n: local_part(t, self.cut_over.group) for n, t in self.weights.named_tensors().items()
        }
        return TensorParallelWeights(layout=self.layout, part_layout=self.layout, **local)

    def forward(
        self,
        x: Tensor,
        routing: Routing,
        *,
        expert_start: int = 0,
        out_dtype: torch.dtype | None = None,
        num_valid_tokens: Tensor | None = None,
    ) -> Tensor:
        """Return each token's weighted sum over its experts; a collective.

        Args:
            x: ``(T, H)``, the same on the ranks over which an expert is cut; a plain tensor.
            routing: Their global ids and probabilities; likewise.
            expert_start: 0: the ranks say who holds what.
            out_dtype: See ``samebits.experts``.
            num_valid_tokens: See ``samebits.experts``.

        Returns:
            ``(T, H)``; see ``tensor_parallel_experts``.

        Raises:
            TypeError: ``x`` is a DTensor.
            ValueError: See ``tensor_parallel_experts``.
            UnsupportedError: An option was set that cut experts do not have.

        Determinism: see ``tensor_parallel_experts``.
        """
        check_tokens(x, expert_start)
        check_cuttable(self, dist.get_world_size(self.cut_over.group))
        return tensor_parallel_experts(
            x,
            routing,
            self.local_weights(),
            self.activation,
            group=self.cut_over.group,
            ranks=self.ranks,
            placement=self.placement,
            out_dtype=out_dtype,
            num_valid_tokens=num_valid_tokens,
            recompute=self.recompute,
        )

    @torch.no_grad()
    def load_weights(self, weights: ExpertWeights) -> None:
        """Copy this rank's part of ``weights``, those of the whole layer; see ``Experts``.

        Determinism: exact, for equal dtypes.
        """
        super().load_weights(parts_of(self, weights))
