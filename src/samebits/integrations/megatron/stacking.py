"""The parameters of single experts as one stacked tensor, without a copy where memory allows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def in_memory_order(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters last to first where only so they are a view; as they are otherwise.

    Megatron-LM's buffers of parameters and gradients begin with the last one.

    Determinism: exact.
    """
    backwards = list(reversed(parameters))
    if stacked_view(parameters) is None and stacked_view(backwards) is not None:
        return backwards
    return list(parameters)


def repoint(parameters: Sequence[Tensor]) -> None:
    """Move parameters of one shape into one buffer; each stays the same object, with its values.

    A later owner of their memory (a distributed optimizer's buffer) may move them again.

    Determinism: exact.
    """
    if stacked_view(parameters) is not None:
        return
    buffer = torch.stack([parameter.data for parameter in parameters])
    for index, parameter in enumerate(parameters):
        parameter.data = buffer[index]


def stacked_view(parameters: Sequence[Tensor]) -> Tensor | None:
    """Return ``(E, …)`` over the memory of E tensors, or None where they are not evenly spaced.

    Determinism: exact.
    """
    first = parameters[0].detach()
    size, step = first.element_size(), first.numel()
    if len(parameters) > 1:
        distance = parameters[1].data_ptr() - parameters[0].data_ptr()
        if distance % size or distance < step * size:
            return None
        step = distance // size
    for index, parameter in enumerate(parameters):
        same = (
            parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and parameter.data_ptr() == first.data_ptr() + index * step * size
            and parameter.shape == first.shape
            and parameter.stride() == first.stride()
            and parameter.dtype == first.dtype
        )
        if not same:
            return None
    shape, stride = (len(parameters), *first.shape), (step, *first.stride())
    return first.as_strided(shape, stride, first.storage_offset())


def stacked(parameters: Sequence[Tensor]) -> Tensor:
    """Return ``(E, …)``, differentiable in each of E tensors: a view where possible, else a copy.

    Determinism: exact.
    """
    view = stacked_view(parameters)
    if view is None:
        return torch.stack(list(parameters))
    joined: Tensor = _Joined.apply(view, *parameters)  # type: ignore[no-untyped-call]
    return joined


class _Joined(torch.autograd.Function):
    """Give the gradient of a stacked view to the tensors whose memory it is."""

    @staticmethod
    def forward(ctx: Any, view: Tensor, *parameters: Tensor) -> Tensor:
        # Saved for their versions alone: the view has that of the first.
        ctx.save_for_backward(*parameters)
        # No gradient (it is in a buffer, or comes later) is no gradient of zeros.
        ctx.set_materialize_grads(False)
        return view.view_as(view)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        parameters = ctx.saved_tensors  # raises where one was written to since
        (grad,) = grads
        return (None, *(grad.unbind(0) if grad is not None else [None] * len(parameters)))
