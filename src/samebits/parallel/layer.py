"""The expert layer over ranks: each token's weighted sum over experts that other ranks may hold."""

from typing import Any

import torch
from torch import Tensor

from samebits.activation import Activation
from samebits.arguments import require_bool, require_type
from samebits.autograd import refuse_second_derivatives
from samebits.backends.call import DIFFERENTIABLE, INPUTS, PARAMETERS, Call, check_weights
from samebits.backends.differentiable import check_destination
from samebits.backends.options import Options
from samebits.errors import must
from samebits.experts import checked
from samebits.formats.weights import Parameters
from samebits.parallel.exchanged import BACKWARD, EVERYTHING, PROBS, Exchanged, X, set_out
from samebits.parallel.held import HeldExperts, Local
from samebits.parallel.ranks import Ranks
from samebits.parallel.traced import can_trace, trace
from samebits.problem import ProbPlacement
from samebits.routing import Routing
from samebits.weight_gradients import Destination

_PLAIN = Activation()


def parallel_experts(
    x: Tensor,
    routing: Routing,
    weights: Parameters,
    activation: Activation = _PLAIN,
    *,
    ranks: Ranks,
    placement: ProbPlacement = ProbPlacement.FC2_OUTPUT,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
    num_valid_tokens: Tensor | None = None,
    weight_gradients: Destination | None = None,
    recompute: bool = False,
) -> Tensor:
    """Return each token's weighted sum over its experts, wherever they are; a collective.

    Every rank calls it with its own tokens (any number, 0 too) and its own experts, and runs its
    backward if another does: collectives are the same on every rank whatever it wants a gradient
    of, but for ``norm_scale``, which all train or none. With a capacity, either all ranks record
    gradients or none.

    Args:
        x: ``(T, H)``, this rank's tokens.
        routing: Their global ids and probabilities; ``num_experts`` None means N.
        weights: Parameters of the experts ``ranks.held``, quantised or not; may be none.
        activation: See ``samebits.experts``.
        ranks: Who holds what.
        placement: See ``samebits.experts``.
        backend: See ``samebits.experts``.
        out_dtype: See ``samebits.experts``.
        num_valid_tokens: See ``samebits.experts``.
        weight_gradients: See ``samebits.experts``; what is delayed needs no collective.
        recompute: See ``samebits.experts``; the rows that arrived are kept, and not sent again.

    Returns:
        ``(T, H)``; differentiable in ``x``, the probabilities and every parameter. Gradients of
        the experts' matrices and biases are sums over the tokens of all ranks; that of
        ``norm_scale``, which every rank has, is the share of the experts held here.

    Raises:
        TypeError: See ``samebits.experts``.
        ValueError: See ``samebits.experts``; or the ranks disagree about the layer (exact mode).
        UnsupportedError: See ``samebits.experts``; or one rank is in inference mode, or compiled
            without gradients, and another wants some (exact mode).

    Determinism: output and all gradients but that of ``norm_scale`` have the bits of
    ``samebits.experts`` on one rank that has all experts and the tokens of the ranks in rank order
    (``reference`` adds the terms of dx in autograd's order there, and in the contract's here).
    """
    require_type("ranks", ranks, Ranks)
    check_weights(weights)
    require_type("routing", routing, Routing)
    if routing.num_experts not in (None, ranks.num_experts):
        rule = f"be N = {ranks.num_experts}, as ranks say"
        raise ValueError(must("num_experts", rule, routing.num_experts))
    if weights.down.shape[0] != len(ranks.held):
        rule = f"hold the {len(ranks.held)} experts {ranks.held}"
        raise ValueError(must("weights", rule, weights.down.shape[0]))
    call, options, _ = checked(
        x,
        Routing(routing.topk_ids, routing.topk_probs, ranks.num_experts),
        weights,
        activation,
        placement=placement,
        backend=backend,
        expert_start=ranks.held.start,
        out_dtype=out_dtype,
        num_valid_tokens=num_valid_tokens,
    )
    require_bool("recompute", recompute)
    if weight_gradients is not None:
        require_type("weight_gradients", weight_gradients, Destination)
        if torch.is_grad_enabled():
            check_destination(weight_gradients, _tensors_of(call))
    # What follows a layer may sum this gradient over the ranks: all want it, or none.
    scale = call.norm_scale
    trained = scale is not None and scale.requires_grad and torch.is_grad_enabled()
    local = HeldExperts(options, recompute, weight_gradients)
    agreement = "gradient of norm_scale" if trained else ""
    return run_over_ranks(call, options, ranks, local, agreement)


def run_over_ranks(
    call: Call, options: Options, ranks: Ranks, local: Local, agreement: str
) -> Tensor:
    """Return the output of a validated call over ranks; a collective. See ``parallel_experts``.

    Args:
        call: This rank's tokens, and what ``local`` computes with.
        options: Everything else.
        ranks: Who holds what.
        local: What a rank computes on its arrivals.
        agreement: What all ranks must have given alike besides.

    Raises:
        ValueError: The ranks disagree, or an id is out of range (exact mode).
        UnsupportedError: See ``parallel_experts``.

    Determinism: see ``parallel_experts``.
    """
    wishes = _wishes_of(call, ranks)
    given = ",".join(n for n in PARAMETERS if getattr(call, n) is not None)
    room = "counts" if ranks.capacity is None else ranks.capacity.rows
    agreement = (
        f"{options.text()}|H={call.x.shape[1]}|{call.gate_up.shape[1]} columns|{given}"
        f"|{call.x.dtype}|{call.topk_probs.dtype}|{ranks.bounds}|{room}|{ranks.transport}|{agreement}"
    )
    if torch.compiler.is_compiling() and isinstance(local, HeldExperts):
        recorded = any(t.requires_grad for t in _tensors_of(call).values())
        if can_trace(ranks, wishes, recorded):
            return trace(call, ranks, local, bool(wishes), agreement)
    route, rows = set_out(call, options.placement, ranks, wishes, agreement)
    layer = Exchanged(route, options, local)
    if not route.wishes:
        return layer.forward(call, rows, save=False)[0]
    # Part of the graph even where nothing here has a gradient: others wait for this backward.
    anchor = torch.empty(0, device=call.x.device, requires_grad=True)
    with torch.enable_grad():
        out: Tensor = _ParallelExperts.apply(layer, anchor, rows, *call[:INPUTS])  # type: ignore[no-untyped-call]
    return out


def _wishes_of(call: Call, ranks: Ranks) -> int:
    """Return what this rank wants of the others, as bits."""
    if not torch.is_grad_enabled():
        return 0
    if ranks.capacity is not None:
        # Nobody learns of the others' wishes there.
        return EVERYTHING
    wanted = {n for n, t in _tensors_of(call).items() if t.requires_grad}
    wishes = BACKWARD if wanted else 0
    wishes |= X if "x" in wanted else 0
    return wishes | (PROBS if "topk_probs" in wanted else 0)


def _tensors_of(call: Call) -> dict[str, Tensor]:
    return {n: t for n in DIFFERENTIABLE if (t := getattr(call, n)) is not None}


class _ParallelExperts(torch.autograd.Function):
    """Tie the two passes together; saves the inputs, the arrivals and ``z``."""

    @staticmethod
    def forward(ctx: Any, layer: Exchanged, _anchor: Tensor, rows: Tensor, *tensors: Any) -> Tensor:
        call = Call(*tensors)
        out, z = layer.forward(call, rows, save=True)
        ctx.save_for_backward(*tensors, rows, z)
        ctx.layer = layer
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        *tensors, rows, z = ctx.saved_tensors
        call = Call(*tensors)
        places = {n: Call._fields.index(n) + 3 for n in DIFFERENTIABLE}
        wanted = {n: bool(ctx.needs_input_grad[place]) for n, place in places.items()}
        grads = ctx.layer.backward(call, rows, z, douts[0], wanted)
        result: list[Tensor | None] = [None] * (INPUTS + 3)
        for name, place in places.items():
            result[place] = getattr(grads, name) if wanted[name] else None
        return tuple(result)
