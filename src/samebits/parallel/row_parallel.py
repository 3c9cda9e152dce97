"""The contract ``row_parallel``: each expert cut along F, its partial sums added over the ranks.

Less travels than without splitting a sum (``tensor_parallel_experts``): one ``(T, H)`` tensor in
fp32 each way, and no weights. But the second projection, dx and dp are sums over ranks of sums over
F / W, each rounded where one rank rounds nothing: bits depend on the number of ranks. They repeat,
because the ranks' terms are added in rank order.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samebits.activation import Activation
from samebits.arguments import require_type
from samebits.errors import UnsupportedError, must
from samebits.experts import experts
from samebits.parallel.ranks import require_rank
from samebits.problem import ProbPlacement
from samebits.routing import Routing
from samebits.weights import ExpertWeights, Layout, split_gate_up

_PLAIN = Activation()


def row_parallel_part(weights: ExpertWeights, rank: int, size: int) -> ExpertWeights:
    """Return the columns of ``rank`` of ``size`` of each expert, gate and up as halves; copies.

    ``down_bias`` stays on rank 0: added on each, it would count ``size`` times.

    Raises:
        ValueError: F is no multiple of ``size``, or there is no such rank.
        UnsupportedError: The weights have a post-expert norm, which needs the whole sum.
    """
    require_type("weights", weights, ExpertWeights)
    require_rank(rank, size)
    if weights.norm is not None:
        raise UnsupportedError("a post-expert norm needs the sum over all of F, here cut")
    columns = weights.down.shape[2]
    if columns % size:
        raise ValueError(must("down", f"have F that is a multiple of {size}", columns))

    def part(tensor: Tensor) -> Tensor:
        halves = split_gate_up(tensor, weights.layout, 1) if weights.gated else (tensor,)
        return torch.cat([half.chunk(size, 1)[rank] for half in halves], 1)

    bias = weights.gate_up_bias
    return replace(
        weights,
        gate_up=part(weights.gate_up),
        down=weights.down.chunk(size, 2)[rank].clone(),
        gate_up_bias=None if bias is None else part(bias),
        down_bias=weights.down_bias if rank == 0 else None,
        layout=Layout(),
    )


def row_parallel_experts(
    x: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    activation: Activation = _PLAIN,
    *,
    group: dist.ProcessGroup,
    placement: ProbPlacement = ProbPlacement.FC2_OUTPUT,
    backend: str = "auto",
    num_valid_tokens: Tensor | None = None,
) -> Tensor:
    """Return each token's weighted sum over its experts, each rank with its columns of them.

    A collective, with the same tokens, routing and wishes for gradients on every rank.

    Args:
        x: ``(T, H)``, the same on every rank.
        routing: The same on every rank.
        weights: This rank's columns (``row_parallel_part``).
        activation: See ``samebits.experts``.
        group: The ranks.
        placement: See ``samebits.experts``.
        backend: See ``samebits.experts``.
        num_valid_tokens: See ``samebits.experts``.

    Returns:
        ``(T, H)`` in the dtype of ``x``, the same on every rank; differentiable.

    Raises:
        TypeError: See ``samebits.experts``.
        ValueError: See ``samebits.experts``.
        UnsupportedError: See ``samebits.experts``.

    Determinism: repeatable; bits depend on the number of ranks.
    """
    require_type("group", group, dist.ProcessGroup)
    require_type("routing", routing, Routing)
    wide = torch.promote_types(weights.down.dtype, torch.float32)
    partial = experts(
        summed_backward(x, group),
        replace(routing, topk_probs=summed_backward(routing.topk_probs, group)),
        weights,
        activation,
        placement=placement,
        backend=backend,
        out_dtype=wide,
        num_valid_tokens=num_valid_tokens,
    )
    out: Tensor = _SumForward.apply(partial, group)  # type: ignore[no-untyped-call]
    return out.to(x.dtype)


def sum_in_rank_order(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks, in fp32 (fp64 for fp64), rounded once; a collective.

    Determinism: repeatable; the same on every rank.
    """
    mine = tensor.contiguous()
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    wide = torch.promote_types(mine.dtype, torch.float32)
    total = torch.zeros(mine.shape, dtype=wide, device=mine.device)
    for term in every:
        total = total + term
    return total.to(mine.dtype)


def summed_backward(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``tensor``, whose gradient is the sum over the ranks; a collective in the backward.

    Determinism: see ``sum_in_rank_order``.
    """
    return _SumBackward.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call]


class _SumForward(torch.autograd.Function):
    """Sum over the ranks; every rank's term has the gradient of the sum."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return sum_in_rank_order(tensor, group)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _SumBackward(torch.autograd.Function):
    """The tensor; its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return sum_in_rank_order(grads[0], ctx.group), None
