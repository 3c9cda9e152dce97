"""The layer over ranks for ``torch.compile``: one operator for each pass, its collectives inside.

With a capacity what a compiler sees has static shapes, and the route travels from pass to pass as
tensors. Without one the number of arrivals is known to a run alone: only what keeps nothing for a
backward is an operator then.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from samebits.autograd import laid_out
from samebits.backends.call import DIFFERENTIABLE, INPUTS, Call
from samebits.backends.operator import outside_autocast
from samebits.backends.options import Options
from samebits.parallel.departure import INFERENCE
from samebits.parallel.exchanged import EVERYTHING, Exchanged, set_out
from samebits.parallel.held import HeldExperts
from samebits.parallel.ranks import Capacity, Ranks
from samebits.parallel.route import Route


class _Way(NamedTuple):
    """The tensors of a ``Route`` through buffers; none of them shares memory."""

    slots: Tensor
    inverse: Tensor
    # (W, E + 1).
    offsets: Tensor
    # (R,) and (W * C,).
    places: Tensor
    rows: Tensor


# The first five are in every call.
_TENSORS = ", ".join(
    f"Tensor{'?' if place > 4 else ''} {name}" for place, name in enumerate(Call._fields[:INPUTS])
)
_RANKS = "str options, str group, int[] bounds, int capacity, str transport"
_WAY = ", ".join(f"Tensor way_{name}" for name in _Way._fields)
# What a forward returns: the output, the arrivals, z, and the way.
_OUTPUTS = 3 + len(_Way._fields)
torch.library.define(
    "samebits::parallel_inference",
    f"({_TENSORS}, Tensor(a!)? overflow, {_RANKS}, str agreement) -> Tensor",
)
torch.library.define(
    "samebits::parallel_forward",
    f"({_TENSORS}, Tensor(a!)? overflow, {_RANKS}, str agreement, bool recompute)"
    f" -> ({', '.join(['Tensor'] * _OUTPUTS)})",
)
torch.library.define(
    "samebits::parallel_backward",
    f"({_TENSORS}, Tensor rows, Tensor z, {_WAY}, Tensor dout, {_RANKS}, bool[] wanted)"
    f" -> ({', '.join('Tensor' for _ in DIFFERENTIABLE)})",
)


def can_trace(ranks: Ranks, wishes: int, recorded: bool) -> bool:
    """Return whether a call can be operators.

    Args:
        ranks: Who holds what.
        wishes: What this rank wants of the others; 0 where it records no gradients.
        recorded: Whether a tensor of the call requires a gradient: autograd has to see one.

    Determinism: no arithmetic.
    """
    return not wishes or (recorded and ranks.capacity is not None)


def trace(call: Call, ranks: Ranks, local: HeldExperts, save: bool, agreement: str) -> Tensor:
    """Return the output of a call over ranks, as operators; see ``run_over_ranks``.

    Determinism: see ``parallel_experts``.
    """
    capacity = 0 if ranks.capacity is None else ranks.capacity.rows
    overflow = None if ranks.capacity is None else ranks.capacity.overflow
    name, bounds = ranks.group.group_name, list(ranks.bounds)
    about = (local.options.text(), name, bounds, capacity, ranks.transport)
    tensors = (*call[:INPUTS], overflow)
    if not save:
        return torch.ops.samebits.parallel_inference(*tensors, *about, agreement)  # type: ignore[no-any-return]
    return _Traced.apply(*tensors, about, agreement, local.recompute)  # type: ignore[no-any-return, no-untyped-call]


class _Traced(torch.autograd.Function):
    """Tie the two operators together."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        overflow, about, agreement, recompute = arguments[INPUTS:]
        found = torch.ops.samebits.parallel_forward(
            *arguments[:INPUTS], overflow, *about, agreement, recompute
        )
        ctx.save_for_backward(*arguments[:INPUTS], *found[1:])
        ctx.about = about
        out: Tensor = found[0]
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        places = [Call._fields.index(name) for name in DIFFERENTIABLE]
        wanted = [ctx.needs_input_grad[place] for place in places]
        grads = torch.ops.samebits.parallel_backward(
            *ctx.saved_tensors, douts[0], *ctx.about, wanted
        )
        result: list[Tensor | None] = [None] * (INPUTS + 4)
        for place, want, grad in zip(places, wanted, grads, strict=True):
            result[place] = grad if want else None
        return tuple(result)


def _call_of(arguments: tuple[Any, ...], others: int) -> tuple[Call, tuple[Any, ...]]:
    """Return the call, and the last arguments; between them is the count of what did not fit."""
    return Call(*arguments[:INPUTS]), arguments[len(arguments) - others :]


@lru_cache(maxsize=64)
def _ranks(group: dist.ProcessGroup, bounds: tuple[int, ...], transport: str) -> Ranks:
    return Ranks(group, bounds, transport=transport)


def _ranks_of(
    group: str, bounds: list[int], capacity: int, transport: str, overflow: Tensor | None
) -> Ranks:
    name: Any = group
    found = _ranks(_resolve_process_group(name), tuple(bounds), transport)
    if overflow is None:
        return found
    room = Capacity(capacity, "meta")
    room.overflow = overflow
    return Ranks(found.group, found.bounds, room)


@torch.library.impl("samebits::parallel_inference", "CompositeExplicitAutograd")
def _inference(*arguments: Any) -> Tensor:
    call, (text, group, bounds, capacity, transport, agreement) = _call_of(arguments, 6)
    options = Options.parse(text)
    ranks = _ranks_of(group, bounds, capacity, transport, arguments[INPUTS])
    with outside_autocast(call.x.device):
        route, rows = set_out(call, options.placement, ranks, INFERENCE, agreement)
        layer = Exchanged(route, options, HeldExperts(options))
        return layer.forward(call, rows, save=False)[0]


@torch.library.register_fake("samebits::parallel_inference")  # type: ignore[untyped-decorator]
def _inference_fake(*arguments: Any) -> Tensor:
    call, (text, *_) = _call_of(arguments, 6)
    out_dtype = Options.parse(text).out_dtype
    return call.x.new_empty(call.x.shape, dtype=call.x.dtype if out_dtype is None else out_dtype)


@torch.library.impl("samebits::parallel_forward", "CompositeExplicitAutograd")
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    call, (text, group, bounds, capacity, transport, agreement, recompute) = _call_of(arguments, 7)
    options = Options.parse(text)
    ranks = _ranks_of(group, bounds, capacity, transport, arguments[INPUTS])
    with outside_autocast(call.x.device):
        route, rows = set_out(call, options.placement, ranks, EVERYTHING, agreement)
        layer = Exchanged(route, options, HeldExperts(options, recompute))
        out, z = layer.forward(call, rows, save=True)
    assert route.places is not None
    assert route.rows is not None
    # The first three are parts of others.
    parts = route.slots.clone(), route.inverse.clone(), route.offsets.contiguous().clone()
    return out, rows, z, *_Way(*parts, route.places, route.rows)


@torch.library.register_fake("samebits::parallel_forward")  # type: ignore[untyped-decorator]
def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    call, (text, _, bounds, capacity, _, _, recompute) = _call_of(arguments, 7)
    size, total = len(bounds) - 1, call.topk_ids.shape[0] * call.topk_ids.shape[1]
    arriving, held = size * capacity, call.down.shape[0]
    out_dtype = Options.parse(text).out_dtype
    integers = call.topk_ids.new_empty(0, dtype=torch.int32)
    longs = integers.new_empty(0, dtype=torch.int64)
    way = _Way(
        integers.new_empty(total),
        integers.new_empty(total),
        integers.new_empty(size, held + 1),
        longs.new_empty(total),
        longs.new_empty(arriving),
    )
    return (
        call.x.new_empty(call.x.shape, dtype=call.x.dtype if out_dtype is None else out_dtype),
        call.x.new_empty(arriving, call.x.shape[1]),
        call.x.new_empty(arriving if held and not recompute else 0, call.gate_up.shape[1]),
        *way,
    )


@torch.library.impl("samebits::parallel_backward", "CompositeExplicitAutograd")
def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    call, (rows, z) = Call(*arguments[:INPUTS]), arguments[INPUTS : INPUTS + 2]
    way = _Way(*arguments[INPUTS + 2 : INPUTS + _OUTPUTS - 1])
    dout, text, group, bounds, capacity, transport, wanted = arguments[INPUTS + _OUTPUTS - 1 :]
    options, ranks = Options.parse(text), _ranks_of(group, bounds, capacity, transport, None)
    sizes, topk = [capacity] * ranks.size, call.topk_ids.shape[1]
    route = Route(
        ranks, way.slots, way.inverse, topk, sum(sizes), EVERYTHING, sizes, sizes, way.offsets,
        way.places, way.rows,
    )  # fmt: skip
    layer = Exchanged(route, options, HeldExperts(options))
    with outside_autocast(call.x.device):
        grads = layer.backward(call, rows, z, dout, dict(zip(DIFFERENTIABLE, wanted, strict=True)))
    found = []
    for name, want in zip(DIFFERENTIABLE, wanted, strict=True):
        grad, like = getattr(grads, name), getattr(call, name)
        missing = not want or grad is None or like is None
        found.append(call.x.new_empty(0) if missing else laid_out(grad, like))
    return tuple(found)


@torch.library.register_fake("samebits::parallel_backward")  # type: ignore[untyped-decorator]
def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    call, wanted = Call(*arguments[:INPUTS]), arguments[-1]
    tensors = [getattr(call, name) for name in DIFFERENTIABLE]
    return tuple(
        torch.empty_like(t) if want and t is not None else call.x.new_empty(0)
        for t, want in zip(tensors, wanted, strict=True)
    )
