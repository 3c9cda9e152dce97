"""What a layer adds up after its routed experts, behind one operator.

In fp32 (fp64 for fp64), each step rounded, one rounding to D at the end::

    out = D(scaling · (routed + Σ_k p_k · x) + shared)        # k over the slots of identity experts

An operator, because compilers contract products and sums, and a Python float may go stale.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits.autograd import recording
from samebits.problem import DTYPE_NAMES, DTYPES


class Parts(NamedTuple):
    """What is added up."""

    # (T, H), fp32 or fp64.
    routed: Tensor
    # (T, H), any float dtype: what identity experts return; None where there are none.
    x: Tensor | None
    # (T, K), as the router returned them.
    topk_ids: Tensor
    topk_probs: Tensor
    # (T, H) in the dtype of routed; None where there is none.
    shared: Tensor | None


def add_parts(parts: Parts, identity: range, scaling: str, dtype: torch.dtype) -> Tensor:
    """Return the output of a layer from its parts; differentiable once.

    Args:
        parts: See ``Parts``.
        identity: Ids of the identity experts.
        scaling: Factor of the routed sum, as text.
        dtype: D, the dtype of the output.

    Returns:
        ``(T, H)``.

    Determinism: bitwise repeatable; each row independent of T and of the other rows.
    """
    arguments = (*parts, identity.start, identity.stop, scaling, DTYPE_NAMES[dtype])
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in parts):
        out: Tensor = _AddParts.apply(*arguments)  # type: ignore[no-untyped-call]
        return out
    return torch.ops.samebits.add_parts_forward(*arguments)  # type: ignore[no-any-return]


def _compute(parts: Parts, start: int, stop: int, scaling: str, dtype: str) -> Tensor:
    total, wide = parts.routed, parts.routed.dtype
    if parts.x is not None:
        chosen = (parts.topk_ids >= start) & (parts.topk_ids < stop)
        probs = torch.where(chosen, parts.topk_probs.to(wide), 0.0)
        weight = torch.zeros_like(probs[:, 0])
        for column in probs.unbind(1):
            weight = weight + column
        # A weight of 0 would not keep an infinite or NaN token out.
        x = torch.where(chosen.any(1)[:, None], parts.x.to(wide), 0.0)
        total = total + weight[:, None] * x
    factor = float(scaling)
    if factor != 1.0:
        total = total * factor
    if parts.shared is not None:
        total = total + parts.shared
    return total.to(DTYPES[dtype])


_PARTS = "Tensor routed, Tensor? x, Tensor topk_ids, Tensor topk_probs, Tensor? shared"
_OPTIONS = "int start, int stop, str scaling, str dtype"
# Positions of the differentiable parts; topk_ids (2) has no gradient.
_DIFFERENTIABLE = (0, 1, 3, 4)
torch.library.define("samebits::add_parts_forward", f"({_PARTS}, {_OPTIONS}) -> Tensor")
torch.library.define(
    "samebits::add_parts_backward",
    f"(Tensor dout, {_PARTS}, {_OPTIONS}, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.impl("samebits::add_parts_forward", "CompositeExplicitAutograd")
def _forward(*arguments: Any) -> Tensor:
    out = _compute(Parts(*arguments[:5]), *arguments[5:])
    # An operator must not return its input.
    return out.clone() if out is arguments[0] else out


@torch.library.register_fake("samebits::add_parts_forward")  # type: ignore[untyped-decorator]
def _forward_fake(*arguments: Any) -> Tensor:
    routed: Tensor = arguments[0]
    return routed.new_empty(routed.shape, dtype=DTYPES[arguments[8]])


@torch.library.impl("samebits::add_parts_backward", "CompositeExplicitAutograd")
def _backward(dout: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    wanted = arguments[9]
    tensors = list(arguments[:5])
    chosen = [i for i, want in zip(_DIFFERENTIABLE, wanted, strict=True) if want]
    for i in chosen:
        tensors[i] = tensors[i].detach().requires_grad_()
    with recording():
        out = _compute(Parts(*tensors), *arguments[5:9])
        grads = torch.autograd.grad(
            out, [tensors[i] for i in chosen], dout, allow_unused=True, materialize_grads=True
        )
    by_place = dict(zip(chosen, grads, strict=True))
    # Copies, with the strides that the fake operator promises: parts may share one gradient, which
    # may be laid out as dout is, and an operator's results must not share memory.
    return tuple(
        torch.empty_like(arguments[i]).copy_(by_place[i]) if i in by_place else dout.new_empty(0)
        for i in _DIFFERENTIABLE
    )


@torch.library.register_fake("samebits::add_parts_backward")  # type: ignore[untyped-decorator]
def _backward_fake(dout: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(
        torch.empty_like(arguments[i]) if want else dout.new_empty(0)
        for i, want in zip(_DIFFERENTIABLE, arguments[9], strict=True)
    )


class _AddParts(torch.autograd.Function):
    """Tie the two operators together; saves the parts."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.save_for_backward(*arguments[:5])
        ctx.options = arguments[5:]
        out: Tensor = torch.ops.samebits.add_parts_forward(*arguments)
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
        grads = torch.ops.samebits.add_parts_backward(
            douts[0], *ctx.saved_tensors, *ctx.options, wanted
        )
        result: list[Tensor | None] = [None] * 9
        for place, want, grad in zip(_DIFFERENTIABLE, wanted, grads, strict=True):
            result[place] = grad if want else None
        return tuple(result)
