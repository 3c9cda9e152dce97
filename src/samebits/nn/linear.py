"""A linear layer each of whose rows has the same bits whatever the number of rows.

Matrix libraries choose their kernel, and with it the order of a sum, by the row count. Here every
product is taken over blocks of exactly ``BLOCK`` rows, the last one padded with zeros, so that a
matrix library always sees one shape; a row's place in its block does not matter to it. Measured on
CPU (torch 2.13, fp32, fp64 and bf16, H 48 … 7168): the rows of plain ``linear`` changed with T in
most shapes, those of blocks of 8, 16, 32 and 64 in none.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from samebits.backends.operator import autocast_dtype, outside_autocast
from samebits.errors import must

# Rows per product: the work of one token, against the number of products of many.
BLOCK = 16

torch.library.define(
    "samebits::project_forward", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
)
torch.library.define(
    "samebits::project_backward",
    "(Tensor dout, Tensor x, Tensor weight, bool[] wanted) -> (Tensor, Tensor, Tensor)",
)


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x · weightᵀ + bias``, row by row; differentiable once.

    Args:
        x: ``(T, H)``.
        weight: ``(N, H)`` in the dtype of ``x``.
        bias: ``(N,)`` in the dtype of ``x``, or None.

    Returns:
        ``(T, N)`` in the dtype of ``x``, rounded once.

    Raises:
        TypeError: An argument is no float tensor.
        ValueError: Shapes or dtypes disagree; the message names both.

    Determinism: bitwise repeatable; each row, and each row of the gradient of ``x``, independent of
    T and of the other rows.
    """
    require_floats("x", x)
    require_floats("weight", weight)
    if x.dim() != 2 or x.shape[1] != weight.shape[1]:
        rule = f"have shape (T, H) with H = weight.shape[1] = {weight.shape[1]}"
        raise ValueError(must("x", rule, tuple(x.shape)))
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise ValueError(must(name, f"have the dtype of x ({x.dtype})", tensor.dtype))
    tensors = (x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        out: Tensor = _Project.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return out
    return torch.ops.samebits.project_forward(x, weight, bias)  # type: ignore[no-any-return]


def require_floats(argument: str, value: object) -> None:
    """Raise ``TypeError`` unless ``value`` is a tensor of floats."""
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
        actual = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(must(argument, "be a float tensor", actual))


class RowLinear(torch.nn.Linear):
    """Apply ``torch.nn.Linear`` with the same bits for a row whatever the number of rows.

    Parameters, initialisation and state_dict are ``torch.nn.Linear``'s.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input · weightᵀ + bias``; ``input`` is ``(T, H)``.

        Determinism: see ``project``.
        """
        require_floats("input", input)
        dtype = autocast_dtype(input.device)
        if dtype is not None and input.dtype != torch.float64:
            bias = None if self.bias is None else self.bias.to(dtype)
            return project(input.to(dtype), self.weight.to(dtype), bias)
        return project(input, self.weight, self.bias)


def _blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, whole = x.shape[0], x.shape[0] // BLOCK * BLOCK
    out = x.new_empty(rows, weight.shape[0])
    for start in range(0, whole, BLOCK):
        out[start : start + BLOCK] = linear(x[start : start + BLOCK], weight, bias)
    if whole < rows:
        padded = x.new_zeros(BLOCK, x.shape[1])
        padded[: rows - whole] = x[whole:]
        out[whole:] = linear(padded, weight, bias)[: rows - whole]
    return out


@torch.library.impl("samebits::project_forward", "CompositeExplicitAutograd")
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with outside_autocast(x.device):
        # One memory layout, like one shape: strides are a reason for another kernel, too.
        return _blocks(x.contiguous(), weight.contiguous(), bias)


@torch.library.register_fake("samebits::project_forward")  # type: ignore[untyped-decorator]
def _forward_fake(x: Tensor, weight: Tensor, _bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.impl("samebits::project_backward", "CompositeExplicitAutograd")
def _backward(
    dout: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    none = x.new_empty(0)
    with outside_autocast(x.device):
        return (
            _blocks(dout.contiguous(), weight.T.contiguous(), None) if wanted[0] else none,
            dout.T @ x if wanted[1] else none,
            dout.sum(0) if wanted[2] else none,
        )


@torch.library.register_fake("samebits::project_backward")  # type: ignore[untyped-decorator]
def _backward_fake(
    _dout: Tensor, x: Tensor, weight: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (tuple(x.shape), tuple(weight.shape), (weight.shape[0],))
    x_like, weight_like, bias_like = (
        x.new_empty(shape if want else (0,)) for shape, want in zip(shapes, wanted, strict=True)
    )
    return x_like, weight_like, bias_like


class _Project(torch.autograd.Function):
    """Tie the two operators together; saves ``x`` and ``weight``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        out: Tensor = torch.ops.samebits.project_forward(x, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        wanted = list(ctx.needs_input_grad)
        grads = torch.ops.samebits.project_backward(douts[0], *ctx.saved_tensors, wanted)
        return tuple(grad if want else None for grad, want in zip(grads, wanted, strict=True))
