"""Rows to the ranks of their experts and back, for callers that bring their own expert code.

``parallel_experts`` is the layer as a whole, and sends less: see ``combine``.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samebits.arguments import require_type
from samebits.errors import UnsupportedError, must
from samebits.ops.permute import combine as combine_rows
from samebits.ops.permute import permute
from samebits.parallel.departure import depart, wrong_ids
from samebits.parallel.ranks import Ranks
from samebits.parallel.route import Route
from samebits.problem import ProbPlacement
from samebits.routing import Routing


@dataclass(frozen=True, eq=False)
class Dispatched:
    """Rows of this rank's experts, from the tokens of all ranks, for ``grouped_experts``."""

    # (A, H), sorted by expert, then by source rank, then by slot.
    rows: Tensor
    # (E + 1,) int64; rows from ``offsets[E]`` on exist only with a capacity and mean nothing.
    offsets: Tensor
    # (A,) probability of each row; None where the rows are multiplied by it already.
    row_probs: Tensor | None
    # Place of each row among the arrivals, and the way back.
    order: Tensor
    route: Route


def dispatch(
    x: Tensor,
    routing: Routing,
    ranks: Ranks,
    *,
    placement: ProbPlacement = ProbPlacement.FC2_OUTPUT,
    num_valid_tokens: Tensor | None = None,
) -> Dispatched:
    """Send each token to the ranks of its experts; a collective, and so is its backward.

    Args:
        x: ``(T, H)``, this rank's tokens.
        routing: Their global ids and probabilities.
        ranks: Who holds what.
        placement: ``FC1_INPUT`` multiplies the probability into the rows, rounded once.
        num_valid_tokens: ``(1,)`` int32; tokens from there on are not sent.

    Returns:
        The rows that arrived; differentiable in ``x`` and the probabilities. Run the backward on
        every rank, those without rows too.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Shapes disagree, or the ranks disagree (exact mode).

    Determinism: the rows of an expert, in their order, do not depend on the number of ranks.
    """
    require_type("x", x, Tensor)
    require_type("routing", routing, Routing)
    require_type("ranks", ranks, Ranks)
    if routing.num_experts not in (None, ranks.num_experts):
        rule = f"be N = {ranks.num_experts}, as ranks say"
        raise ValueError(must("num_experts", rule, routing.num_experts))
    wrong = wrong_ids(routing.topk_ids, ranks.num_experts, num_valid_tokens)
    return dispatch_agreed(
        x, routing, ranks, "dispatch", wrong, ProbPlacement(placement), num_valid_tokens
    )


def dispatch_agreed(
    x: Tensor,
    routing: Routing,
    ranks: Ranks,
    agreement: str,
    wrong: ValueError | None,
    placement: ProbPlacement,
    num_valid_tokens: Tensor | None,
) -> Dispatched:
    """See ``dispatch``; ``agreement`` and ``wrong`` as in ``depart``.

    Determinism: see ``dispatch``.
    """
    ids, probs = routing.topk_ids, routing.topk_probs
    if x.dim() != 2 or x.shape[0] != ids.shape[0]:
        rule = f"have shape (T, H) with T = topk_ids.shape[0] = {ids.shape[0]}"
        raise ValueError(must("x", rule, tuple(x.shape)))
    leaving = depart(
        ranks,
        ids,
        num_valid_tokens=num_valid_tokens,
        wishes=0,
        agreement=f"{agreement}|{placement}|H={x.shape[1]}|{x.dtype}|{probs.dtype}|{ranks.bounds}"
        f"|{ranks.capacity}|{ranks.transport}",
        wrong=wrong,
    )
    on_input = placement == ProbPlacement.FC1_INPUT
    rows = permute(x, leaving.metadata.inverse, leaving.topk, probs if on_input else None)
    route = leaving.route()
    arrivals = send(rows, route)
    ordered, order = route.ids.sort(stable=True)
    bounds = torch.arange(len(ranks.held) + 1, device=x.device)
    row_probs = None
    if not on_input:
        sent = permute(probs.reshape(-1, 1), route.inverse, 1)
        row_probs = send(sent, route)[:, 0].index_select(0, order)
    return Dispatched(
        arrivals.index_select(0, order),
        torch.searchsorted(ordered, bounds),
        row_probs,
        order,
        route,
    )


def combine(
    rows: Tensor,
    dispatched: Dispatched,
    topk_probs: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Send each row's result back to its token and add them up; a collective, backward too.

    For the bits of one rank, forward and backward, give it fp32 rows that ``grouped_experts`` has
    multiplied by ``row_probs`` (``out_dtype=torch.float32``), and no ``topk_probs``.

    Args:
        rows: ``(A, H)``, in the order of ``dispatched.rows``.
        dispatched: What ``dispatch`` returned.
        topk_probs: ``(T, K)``, factors where the rows are not weighted yet; None means 1. The
            gradient of a row is then rounded after its probability, which one rank does not do.
        out_dtype: Of the sums; None means that of ``rows``.

    Returns:
        ``(T, H)``; differentiable in ``rows`` and ``topk_probs``.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``rows`` are not as many as arrived, or ``out_dtype`` is no float dtype.

    Determinism: each token's terms by ascending expert, ties by slot, in fp32 from +0.0.
    """
    require_type("dispatched", dispatched, Dispatched)
    require_type("rows", rows, Tensor)
    route, order = dispatched.route, dispatched.order
    if rows.dim() != 2 or rows.shape[0] != order.shape[0]:
        rule = f"have shape (A, H) with A = {order.shape[0]} rows that arrived"
        raise ValueError(must("rows", rule, tuple(rows.shape)))
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise ValueError(must("out_dtype", "be None or a float dtype", out_dtype))
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    sums = _travel(rows.index_select(0, inverse), route, False)
    if out_dtype is not None and out_dtype != rows.dtype:
        wide = torch.promote_types(rows.dtype, torch.float32)
        sums = combine_rows(sums, route.inverse, route.topk, topk_probs, out_dtype=wide)
        return sums.to(out_dtype)
    return combine_rows(sums, route.inverse, route.topk, topk_probs)


def send(rows: Tensor, route: Route) -> Tensor:
    """Return the arrivals for ``rows``; a collective, backward too.

    Determinism: exact copies.
    """
    return _travel(rows, route, True)


def _travel(rows: Tensor, route: Route, outward: bool) -> Tensor:
    # A part of the graph even where this rank wants no gradient: others wait for its backward.
    anchor = torch.empty(0, device=rows.device, requires_grad=torch.is_grad_enabled())
    return _Travel.apply(rows, anchor, route, outward)  # type: ignore[no-any-return, no-untyped-call]


class _Travel(torch.autograd.Function):
    """One way forward, the other way backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, _anchor: Tensor, route: Route, outward: bool) -> Tensor:
        ctx.route, ctx.outward = route, outward
        return route.go(rows) if outward else route.back(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError("dispatch and combine are differentiable once, not twice")
        grad = grads[0].contiguous()
        return (ctx.route.back(grad) if ctx.outward else ctx.route.go(grad)), None, None, None
