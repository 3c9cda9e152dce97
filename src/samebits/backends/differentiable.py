"""A layer for autograd: its operators tied together, its gradients brought to where they go."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from samebits.arguments import require_type
from samebits.autograd import refuse_second_derivatives
from samebits.backends import operator
from samebits.backends.call import DIFFERENTIABLE, INPUTS, PARAMETERS, Call
from samebits.backends.options import Options
from samebits.errors import UnsupportedError, must
from samebits.weight_gradients import Destination

_PLAIN = (Tensor, torch.nn.Parameter)
# What the operators take: tensors, the options' text, N and the first expert held here.
_OPERANDS = INPUTS + 3
# Inputs are in the order of Call; ids, the count and scales have no gradient.
_PLACES = tuple(Call._fields.index(name) for name in DIFFERENTIABLE)


class _Experts(torch.autograd.Function):
    """Tie the two operators together; saves the inputs and, unless it is recomputed, ``z``."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        out: Tensor
        text, num_experts, expert_start = options = arguments[INPUTS:_OPERANDS]
        save = not arguments[_OPERANDS + 1]
        ctx.direct = is_direct(arguments[:INPUTS])
        if ctx.direct:
            call = Call(*arguments[:INPUTS])
            out, z = operator.compute(
                call, Options.parse(text), num_experts, expert_start, save=save
            )
            # What a hook of the caller's keeps is his: it may be z itself.
            ctx.kept = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        else:
            out, z = torch.ops.samebits.experts_forward(*arguments[:_OPERANDS], save)
            ctx.kept = True
        ctx.save_for_backward(*arguments[:INPUTS], z)
        ctx.options, ctx.destination = options, arguments[_OPERANDS]
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        *tensors, z = ctx.saved_tensors
        if ctx.direct and z.numel() and not z.untyped_storage().nbytes():
            raise RuntimeError(
                "a backward that failed gave back what this one needs; hint: run the forward again"
            )
        wanted = [ctx.needs_input_grad[place] for place in _PLACES]
        arguments = (*tensors, z, douts[0], *ctx.options)
        result: list[Tensor | None] = [None] * (_OPERANDS + 2)
        grads: Sequence[Tensor | None]
        direct = ctx.direct and is_direct(arguments[: INPUTS + 2])
        spend = (
            direct and not ctx.kept and not torch._C._autograd._get_current_graph_task_keep_graph()
        )
        if ctx.destination is not None:
            grads = delivered(ctx.destination, arguments, wanted, direct=direct, spend=spend)
        elif direct:
            grads = operator.compute_backward((*arguments, wanted), {}, spend=spend)
        else:
            grads = torch.ops.samebits.experts_backward(*arguments, wanted)
        for place, want, grad in zip(_PLACES, wanted, grads, strict=True):
            result[place] = grad if want else None
        return tuple(result)


def is_direct(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether nothing has to see an operator: no compiler, no mode, no other tensor.

    Determinism: no arithmetic.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and all(t is None or (type(t) in _PLAIN and not t.is_meta) for t in tensors)
    )


def delivered(
    destination: Destination,
    arguments: tuple[Any, ...],
    wanted: list[bool],
    *,
    direct: bool,
    spend: bool,
) -> list[Tensor | None]:
    """Return what autograd gets, with the parameters' gradients brought to their destination.

    Args:
        destination: Where those gradients go.
        arguments: Those of ``samebits::experts_backward`` but the last.
        wanted: Which of ``DIFFERENTIABLE`` are wanted.
        direct: No operator has to be seen.
        spend: See ``operator.compute_backward``; only with ``direct``.

    Returns:
        One for each of ``DIFFERENTIABLE``: a gradient, a placeholder, or None.

    Raises:
        ValueError: A buffer is missing or does not fit.

    Determinism: the chosen backend's.
    """
    names = [n for n, want in zip(DIFFERENTIABLE, wanted, strict=True) if want and n in PARAMETERS]
    if not destination.policy.delayed:
        if direct:
            buffers = destination.open(names)
            dx, dprobs, *_ = operator.compute_backward((*arguments, wanted), buffers, spend=spend)
            destination.close(buffers)
        else:
            dx, dprobs = _into_main_grad(destination, arguments, names, wanted)
        held = dict(zip(Call._fields, arguments, strict=False))
        places = [destination.placeholder(n, held[n]) if n in names else None for n in PARAMETERS]
        return [dx, dprobs, *places]
    if names:
        destination.defer(
            names, lambda: _later(destination, arguments, names), arguments[: INPUTS + 2]
        )
    now = [want and name not in names for name, want in zip(DIFFERENTIABLE, wanted, strict=True)]
    if not any(now):
        return [None] * len(DIFFERENTIABLE)
    dx, dprobs, *_ = torch.ops.samebits.experts_backward(*arguments, now)
    return [dx, dprobs, *[None] * len(PARAMETERS)]


def _into_main_grad(
    destination: Destination, arguments: tuple[Any, ...], names: list[str], wanted: list[bool]
) -> tuple[Tensor, Tensor]:
    buffers = destination.open(names)
    dx, dprobs = torch.ops.samebits.experts_backward_into(
        [buffer.tensor for buffer in buffers.values()],
        *arguments,
        wanted,
        [buffer.accumulate for buffer in buffers.values()],
    )
    destination.close(buffers)
    return dx, dprobs


def _later(destination: Destination, arguments: tuple[Any, ...], names: list[str]) -> None:
    """Compute the gradients of the parameters alone, and bring them to their destination."""
    wanted = [name in names for name in DIFFERENTIABLE]
    if destination.policy.main_grad:
        _into_main_grad(destination, arguments, names, wanted)
        destination.fill_placeholders(names)
        return
    grads = torch.ops.samebits.experts_backward(*arguments, wanted)
    for name, grad in zip(DIFFERENTIABLE, grads, strict=True):
        if name in names:
            destination.owners[name].add(grad)


def run(
    call: Call,
    options: Options,
    num_experts: int,
    expert_start: int,
    destination: Destination | None = None,
    *,
    recompute: bool = False,
) -> Tensor:
    """Run one call through the operator; differentiable once.

    Args:
        call: Validated tensors.
        options: Everything else.
        num_experts: N.
        expert_start: First expert held here.
        destination: Where the gradients of the parameters go; None gives them to autograd.
        recompute: Keep the inputs alone; the backward computes z again.

    Returns:
        ``(T, H)``.

    Raises:
        UnsupportedError: A derivative is asked for that is not the plain reverse one.
        ValueError: A parameter's gradient has nowhere to go.

    Determinism: the chosen backend's.
    """
    if destination is not None:
        require_type("weight_gradients", destination, Destination)
    tensors = {name: t for name in DIFFERENTIABLE if (t := getattr(call, name)) is not None}
    eager = not torch.compiler.is_compiling()
    dual = eager and forward_ad._current_level >= 0
    if dual and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors.values()):
        raise UnsupportedError("a layer has no forward-mode derivatives; hint: torch.autograd.grad")
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values()):
        if eager and torch._C._are_functorch_transforms_active():
            raise UnsupportedError(
                "a layer has no gradients under torch.func transforms; hint: torch.autograd.grad"
            )
        if call.out is not None:
            raise UnsupportedError(
                "a layer has no gradients through out; hint: torch.no_grad(), or no out"
            )
        if destination is not None:
            check_destination(destination, tensors)
        text = options._replace(recompute=recompute).text()
        arguments = (*call[:INPUTS], text, num_experts, expert_start)
        out: Tensor
        out = _Experts.apply(*arguments, destination, recompute)  # type: ignore[no-untyped-call]
        return out
    arguments = (*call[:INPUTS], options.text(), num_experts, expert_start)
    if call.out is not None:
        torch.ops.samebits.experts_into(call.out, *arguments)
        return call.out
    out, _ = torch.ops.samebits.experts_forward(*arguments, False)
    return out


def check_destination(destination: Destination, tensors: dict[str, Tensor]) -> None:
    """Raise unless the gradients of the differentiable ``tensors`` of a call can be delivered.

    Raises:
        UnsupportedError: The code is compiled.
        ValueError: An owner or a buffer is missing, or one has no such name.

    Determinism: no arithmetic.
    """
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "weight_gradients is not for compiled code; hint: compile around the layer, not it"
        )
    unknown = sorted(destination.owners.keys() - set(PARAMETERS))
    if unknown:
        raise ValueError(must("owners", f"be named as {', '.join(PARAMETERS)}", unknown))
    destination.check([n for n in PARAMETERS if n in tensors and tensors[n].requires_grad])
