"""From a drop-in's arguments to the operator: options, operands, shapes."""

from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from samebits.activation import Activation
from samebits.errors import UnsupportedError, must
from samebits.ops.activation import HALVES, SWIGLU, validate
from samebits.ops.activation.contract import PLAIN_STORAGE, Storage, backward, run
from samebits.ops.activation.operands import Backward, Operands, Wanted, wide_dtype

Scalar = float | Tensor

QUICK_ALPHA = 1.702


class Option(NamedTuple):
    """An activation, and the run-time values of its limit and offset where they are tensors."""

    activation: Activation
    scalars: Tensor | None = None


PLAIN = Option(SWIGLU)
RELU2 = Option(Activation(kind="relu2", gated=False))


@lru_cache(maxsize=1024)
def _of_numbers(alpha: float, limit: float | None, offset: float) -> Option:
    return Option(Activation(alpha=alpha, limit=limit, linear_offset=offset))


# The run-time tensor replaces these values; they only say which options there are.
_PLACEHOLDERS = {
    (alpha, limited, shifted): Activation(
        alpha=alpha, limit=1.0 if limited else None, linear_offset=1.0 if shifted else 0.0
    )
    for alpha in (1.0, QUICK_ALPHA)
    for limited in (False, True)
    for shifted in (False, True)
}


def _as_tensor(y: Tensor, value: Scalar, name: str) -> Tensor:
    """Return ``value`` as a 0-d tensor beside ``y``, by the one conversion that cannot go stale."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(must(name, "be a number or have one element", tuple(value.shape)))
        if value.requires_grad:
            raise UnsupportedError(f"{name} has no gradient; detach it")
        value = value.reshape(())
    wide = wide_dtype(y.dtype)
    return (y.new_ones((), dtype=wide) * value).to(wide)


def option_of(
    y: Tensor, clamp_value: Scalar | None, linear_offset: Scalar = 0.0, alpha: float = 1.0
) -> Option:
    """Return the activation of a drop-in: its key alone, or with run-time scalars.

    Scalars where a value is a tensor, or may change under a compiled function.

    Determinism: pure function of its arguments.
    """
    tensors = isinstance(clamp_value, Tensor) or isinstance(linear_offset, Tensor)
    if not tensors and not torch.compiler.is_compiling():
        return _of_numbers(alpha, clamp_value, linear_offset)
    limited = clamp_value is not None
    # An offset of 0 is exact, so an unknown one needs no case of its own.
    shifted = alpha == QUICK_ALPHA
    scalars = torch.stack(
        (
            _as_tensor(y, 1.0 if clamp_value is None else clamp_value, "clamp_value"),
            _as_tensor(y, linear_offset, "linear_offset"),
        )
    )
    return Option(_PLACEHOLDERS[alpha, limited, shifted], scalars)


def _row_weights(y: Tensor, weights: Tensor | None) -> Tensor | None:
    """Return one factor per row of ``y`` flattened to two dimensions."""
    if weights is None:
        return None
    rows = y.shape[:-1].numel()
    if weights.dim() == 0 or weights.shape[-1] != 1:
        rule = "have shape (…, 1), one weight per row of y"
        raise ValueError(must("weights", rule, tuple(weights.shape)))
    if weights.shape[:-1].numel() != rows:
        weights = weights.expand(*y.shape[:-1], 1)
    return weights.reshape(rows)


def _operands(y: Tensor, option: Option, bias: Tensor | None, weights: Tensor | None) -> Operands:
    """Return validated operands with ``y`` flattened to rows."""
    if y.dim() == 0:
        raise ValueError(must("y", "have at least one dimension", "a scalar"))
    if bias is not None and bias.dim() != 1:
        # One bias for each row or group of rows: added here, with the operator's one rounding.
        wide = wide_dtype(y.dtype)
        y, bias = (y.to(wide) + bias.to(wide)).to(y.dtype), None
    probs = _row_weights(y, weights)
    operands = Operands(y.reshape(-1, y.shape[-1]), bias, row_probs=probs, scalars=option.scalars)
    validate(operands, option.activation, HALVES)
    return operands


def apply(
    y: Tensor,
    option: Option,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    storage: Storage = PLAIN_STORAGE,
) -> Tensor:
    """Return the activation of ``y``, ``(…, 2F)`` or ``(…, F)``; differentiable.

    Determinism: elementwise; gradients that are sums add in a fixed order.
    """
    operands = _operands(y, option, bias, weights)
    h = run(operands, option.activation.key, HALVES.key, storage)
    return h.reshape(*y.shape[:-1], h.shape[-1])


def back(
    g: Tensor,
    y: Tensor,
    option: Option,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
) -> Backward:
    """Return the gradients for ``g``, with rows flattened.

    Determinism: repeatable; every sum has one order.
    """
    operands = _operands(y, option, bias, weights)
    columns = y.shape[-1] // option.activation.columns
    if g.shape != (*y.shape[:-1], columns):
        expected = (*y.shape[:-1], columns)
        raise ValueError(must("g", f"have shape {expected}", tuple(g.shape)))
    if g.dtype not in (y.dtype, torch.float32):
        raise TypeError(must("g", f"be {y.dtype} (as y) or fp32", g.dtype))
    wanted = Wanted(dp=weights is not None)
    key = option.activation.key
    return backward(g.reshape(-1, columns), operands, key, HALVES.key, wanted)


def weighted_back(g: Tensor, y: Tensor, weights: Tensor, option: Option) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``y`` and ``weights``, each in its shape and dtype.

    Determinism: repeatable; every sum has one order.
    """
    result = back(g, y, option, weights=weights)
    assert result.dp is not None
    dp = result.dp.to(weights.dtype)
    if dp.numel() == weights.numel():
        dp = dp.reshape(weights.shape)
    else:
        dp = dp.reshape(*y.shape[:-1], 1).sum_to_size(weights.shape)
    return result.dz.view(y.shape), dp


def clamp_then_add(y: Tensor, bias: Tensor, clamp_value: Scalar) -> Tensor:
    """Return ``D(clamp(y) + bias)``; by masks, so that the gradient is 1 at the bound.

    Determinism: elementwise.
    """
    if not isinstance(clamp_value, Tensor) and not torch.compiler.is_compiling():
        legal = _of_numbers(1.0, clamp_value, 0.0).activation
        return cast("Tensor", _ClampThenAdd.apply(y, bias, legal.limit))  # type: ignore[no-untyped-call]
    wide = wide_dtype(y.dtype)
    limit = _as_tensor(y, clamp_value, "clamp_value")
    limit = torch.where((limit > 0) & torch.isfinite(limit), limit, float("nan"))
    gate, up = y.to(wide).chunk(2, -1)
    poison = limit - limit
    gate = torch.where(gate > limit, limit, gate) + poison
    up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    return (torch.cat((gate, up), -1) + bias.to(wide)).to(y.dtype)


class _ClampThenAdd(torch.autograd.Function):
    """``clamp_then_add`` of a number, in fewer passes over memory."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(y, bias)
        ctx.limit = limit
        wide = y.to(wide_dtype(y.dtype), copy=True)
        gate, up = wide.chunk(2, -1)
        gate.clamp_(max=limit)
        up.clamp_(-limit, limit)
        return wide.add_(bias).to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        y, bias = ctx.saved_tensors
        wide, dy = wide_dtype(y.dtype), grad.clone()
        (gate, up), (dgate, dup) = y.to(wide).chunk(2, -1), dy.chunk(2, -1)
        dgate.masked_fill_(gate > ctx.limit, 0.0)
        dup.masked_fill_(up.abs() > ctx.limit, 0.0)
        dbias = None
        if ctx.needs_input_grad[1]:
            dbias = grad.to(wide).sum_to_size(bias.shape).to(bias.dtype)
        return dy, dbias, None
