"""The operator boundary of the activation: what torch.compile and autograd see. Imports torch only.

Options enter as the keys of Activation and Layout; a limit or an offset that must stay a tensor
(``samebits.functional`` inside a compiled function) enters as ``scalars``. No Python float does.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from samebits.activation import Activation
from samebits.errors import UnsupportedError
from samebits.ops.activation.operands import Backward, Operands, Wanted, wide_dtype
from samebits.weights import Layout

_TENSORS = (
    "Tensor z, Tensor? bias, Tensor? offsets, Tensor? row_probs, Tensor? num_rows, Tensor? scalars"
)
_OPTIONS = "str activation, str layout"
torch.library.define("samebits::activation_forward", f"({_TENSORS}, {_OPTIONS}) -> Tensor")
torch.library.define(
    "samebits::activation_backward",
    f"(Tensor dh, {_TENSORS}, {_OPTIONS}, bool dp, bool h, bool dbias)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)


def _neighbours(rows: Tensor) -> Tensor:
    """Return ``rows`` with the elements of a row side by side: one copy at most."""
    return rows if rows.shape[-1] == 1 or rows.stride(-1) == 1 else rows.contiguous()


def _unpack(arguments: tuple[Any, ...]) -> tuple[Operands, Activation, Layout]:
    z, *rest = arguments[:6]
    # Side operands are small, and expanded ones have strides that the kernels do not take.
    rest = [None if tensor is None else tensor.contiguous() for tensor in rest]
    operands = Operands(_neighbours(z), *rest)
    return operands, Activation.parse(arguments[6]), Layout.parse(arguments[7])


def _device_of(z: Tensor) -> AbstractContextManager[None]:
    """Return a context in which kernels start on the device of ``z``."""
    if z.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(z.device)


@torch.library.impl("samebits::activation_forward", "cpu")
def _forward_cpu(*arguments: Any) -> Tensor:
    from samebits.ops.activation import reference

    return reference.forward(*_unpack(arguments))


@torch.library.impl("samebits::activation_forward", "cuda")
def _forward_cuda(*arguments: Any) -> Tensor:
    from samebits.ops.activation import kernel

    with _device_of(arguments[0]):
        return kernel.launch_activation_forward(*_unpack(arguments))


@torch.library.register_fake("samebits::activation_forward")  # type: ignore[untyped-decorator]
def _forward_fake(*arguments: Any) -> Tensor:
    z, activation = arguments[0], Activation.parse(arguments[6])
    h: Tensor = z.new_empty(z.shape[0], z.shape[1] // activation.columns)
    return h


def _pack(result: Backward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # An operator has a fixed number of results: an empty tensor stands for one not wanted.
    dz, *optional = result
    dp, h, dbias = (dz.new_empty(0) if value is None else value for value in optional)
    return dz, dp, h, dbias


@torch.library.impl("samebits::activation_backward", "cpu")
def _backward_cpu(dh: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from samebits.ops.activation import reference

    wanted = Wanted(*arguments[8:])
    return _pack(reference.backward(dh, *_unpack(arguments[:8]), wanted))


@torch.library.impl("samebits::activation_backward", "cuda")
def _backward_cuda(dh: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from samebits.ops.activation import kernel

    wanted = Wanted(*arguments[8:])
    operands, activation, layout = _unpack(arguments[:8])
    with _device_of(dh):
        result = kernel.launch_activation_backward(
            _neighbours(dh), operands, activation, layout, wanted
        )
    return _pack(result)


@torch.library.register_fake("samebits::activation_backward")  # type: ignore[untyped-decorator]
def _backward_fake(dh: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    operands, wanted = Operands(*arguments[:6]), Wanted(*arguments[8:])
    z, bias = operands.z, operands.bias
    result = Backward(
        dz=z.new_empty(z.shape),
        dp=z.new_empty(z.shape[0], dtype=wide_dtype(z.dtype)) if wanted.dp else None,
        h=z.new_empty(dh.shape) if wanted.h else None,
        dbias=bias.new_empty(bias.shape) if wanted.dbias and bias is not None else None,
    )
    return _pack(result)


def backward(
    dh: Tensor, operands: Operands, activation: str, layout: str, wanted: Wanted
) -> Backward:
    """Return the gradients through the operator; see ``activate_backward``.

    Determinism: repeatable; every sum has one order.
    """
    dz, dp, h, dbias = torch.ops.samebits.activation_backward(
        dh, *operands, activation, layout, *wanted
    )
    return Backward(
        dz,
        dp if wanted.dp else None,
        h if wanted.h else None,
        dbias if wanted.dbias else None,
    )


class Storage(NamedTuple):
    """How ``z`` waits for the backward."""

    # Kept in fp8 (e4m3), saturated: gradients are then those of the rounded z.
    fp8: bool = False
    # Marked for a trainer that moves activations to the host (``activation_offloading``).
    offload: bool = False


PLAIN_STORAGE = Storage()


class _Activate(torch.autograd.Function):
    """Tie the two operators together; saves the inputs, nothing else."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        operands, (activation, layout, fp8, offload) = Operands(*arguments[:6]), arguments[6:]
        kept = operands.z
        if fp8:
            # Older casts do not saturate: a value past the range would come back as NaN.
            bound = torch.finfo(torch.float8_e4m3fn).max
            kept = kept.clamp(-bound, bound).to(torch.float8_e4m3fn)
        if offload:
            for tensor in (kept, operands.bias):
                if tensor is not None:
                    tensor.activation_offloading = True  # type: ignore[attr-defined]
        ctx.save_for_backward(kept, *operands[1:])
        ctx.options = (activation, layout, operands.z.dtype)
        return torch.ops.samebits.activation_forward(*operands, activation, layout)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        # Grad mode is on here only for create_graph: the terms of z would be lost without a word.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UnsupportedError("the activation is differentiable once, not twice")
        activation, layout, dtype = ctx.options
        kept, *rest = ctx.saved_tensors
        operands = Operands(kept.to(dtype), *rest)
        _, bias_grad, _, probs_grad, *_ = ctx.needs_input_grad
        wanted = Wanted(dp=probs_grad, dbias=bias_grad)
        result = backward(dh, operands, activation, layout, wanted)
        dp = result.dp
        if dp is not None and operands.row_probs is not None:
            dp = dp.to(operands.row_probs.dtype)
        return (result.dz, result.dbias, None, dp, *([None] * 6))


def run(
    operands: Operands, activation: str, layout: str, storage: Storage = PLAIN_STORAGE
) -> Tensor:
    """Return ``h`` through the operator; differentiable once. Arguments are validated already.

    Determinism: elementwise.
    """
    differentiable = (operands.z, operands.bias, operands.row_probs)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiable):
        apply = cast("Callable[..., Tensor]", _Activate.apply)
        return apply(*operands, activation, layout, *storage)
    return torch.ops.samebits.activation_forward(*operands, activation, layout)  # type: ignore[no-any-return]
