"""The contract ``by_rank``: a token travels once to each rank, which adds up what it has for it.

Fewer rows than one for each slot: a token's slots on one rank share the way, and what comes back is
``D`` of their sum. One rank adds every slot in fp32 instead: bits depend on which experts share a
rank. They repeat, because the ranks' sums are added in rank order.
"""

from dataclasses import replace

import torch
from torch import Tensor

from samebits.activation import Activation
from samebits.arguments import require_type
from samebits.backends.call import check_weights
from samebits.errors import must
from samebits.experts import experts
from samebits.formats.weights import Parameters
from samebits.ops.permute import permute
from samebits.parallel.all_to_all import combine, dispatch_agreed, send
from samebits.parallel.departure import wrong_ids
from samebits.parallel.exchange import on_device, take
from samebits.parallel.ranks import Ranks
from samebits.problem import ProbPlacement
from samebits.routing import Routing

_PLAIN = Activation()


def experts_by_rank(
    x: Tensor,
    routing: Routing,
    weights: Parameters,
    activation: Activation = _PLAIN,
    *,
    ranks: Ranks,
    placement: ProbPlacement = ProbPlacement.FC2_OUTPUT,
    backend: str = "auto",
    num_valid_tokens: Tensor | None = None,
) -> Tensor:
    """Return each token's weighted sum over its experts, added up rank by rank; a collective.

    Args:
        x: ``(T, H)``, this rank's tokens.
        routing: Their global ids and probabilities.
        weights: Parameters of the experts ``ranks.held``, quantised or not; at least one.
        activation: See ``samebits.experts``.
        ranks: Who holds what.
        placement: See ``samebits.experts``.
        backend: See ``samebits.experts``.
        num_valid_tokens: See ``samebits.experts``.

    Returns:
        ``(T, H)`` in the dtype of ``x``; differentiable.

    Raises:
        TypeError: See ``samebits.experts``.
        ValueError: See ``samebits.experts``.
        UnsupportedError: See ``samebits.experts``.

    Determinism: repeatable; bits depend on which experts share a rank.
    """
    require_type("x", x, Tensor)
    require_type("routing", routing, Routing)
    require_type("ranks", ranks, Ranks)
    check_weights(weights)
    require_type("activation", activation, Activation)
    placement = ProbPlacement(placement)
    ids, probs = routing.topk_ids.to(torch.int64), routing.topk_probs
    if weights.down.shape[0] != len(ranks.held) or not ranks.held:
        rule = f"hold the experts {ranks.held} of this rank, at least one"
        raise ValueError(must("weights", rule, weights.down.shape[0]))
    bounds = on_device(ranks.bounds, ids.device, torch.int64)
    owner = torch.searchsorted(bounds, ids, right=True) - 1
    owner = torch.where((ids >= 0) & (ids < ranks.num_experts), owner, -1)
    earlier = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril(-1)
    repeated = ((owner[:, :, None] == owner[:, None, :]) & earlier).any(2)
    # As if each rank were one expert, chosen by the token's first slot there.
    whole = replace(ranks, bounds=tuple(range(ranks.size + 1)))
    to_ranks = Routing(torch.where(repeated, -1, owner), torch.ones_like(probs))
    # The ranks' own calls of ``experts`` compare nothing.
    agreement = f"by_rank|{placement}|{activation.key}|{backend}|{probs.dtype}|{ranks.bounds}"
    wrong = wrong_ids(ids, ranks.num_experts, num_valid_tokens)
    placed = ProbPlacement.FC2_OUTPUT
    sent = dispatch_agreed(x, to_ranks, whole, agreement, wrong, placed, num_valid_tokens)
    route, topk = sent.route, ids.shape[1]
    # With 1 added, what is no row has id -1.
    there = route.go(take(ids + 1, route.slots // topk, 0)) - 1
    with_probs = send(permute(probs, route.inverse, topk), route)
    partial = experts(
        sent.rows,
        Routing(
            there.index_select(0, sent.order),
            with_probs.index_select(0, sent.order),
            ranks.num_experts,
        ),
        weights,
        activation,
        placement=placement,
        backend=backend,
        expert_start=ranks.held.start,
    )
    return combine(partial, sent)
