"""Fused activations with the signatures of Megatron-LM's, on this library's operator.

Gate and up are the two halves of the last dimension, gate first. Everything between load and store
is fp32 with one rounding (CONTRACT section 5), and a clamp's gradient is 1 at the bound.

A clamp bound or an offset may be a number or a tensor with one element. Inside a compiled function
a number becomes a tensor in the graph: the operator never sees a Python float, which a later value
could leave stale in a compiled program. A bound that is not finite and > 0 raises; where it is
a tensor on a GPU, or a number in a compiled function on a GPU, the result is NaN instead.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from samebits.activation import Activation
from samebits.errors import UnsupportedError, must
from samebits.ops.activation import HALVES, SWIGLU, Operands, Wanted, validate
from samebits.ops.activation.contract import (
    PLAIN_STORAGE,
    Backward,
    Storage,
    backward,
    run,
    wide_dtype,
)

__all__ = [
    "bias_clamped_swiglu",
    "bias_clamped_swiglu_back",
    "bias_swiglu",
    "bias_swiglu_back",
    "bias_swiglu_impl",
    "clamped_swiglu",
    "clamped_swiglu_back",
    "clamped_weighted_swiglu",
    "clamped_weighted_swiglu_back",
    "swiglu",
    "swiglu_back",
    "weighted_bias_quick_geglu_impl",
    "weighted_bias_swiglu_impl",
    "weighted_squared_relu_impl",
    "weighted_swiglu",
    "weighted_swiglu_back",
]

Scalar = float | Tensor

_QUICK_ALPHA = 1.702


class _Option(NamedTuple):
    """An activation, and the run-time values of its limit and offset where they are tensors."""

    activation: Activation
    scalars: Tensor | None = None


_PLAIN = _Option(SWIGLU)
_RELU2 = _Option(Activation(kind="relu2", gated=False))


@lru_cache(maxsize=1024)
def _of_numbers(alpha: float, limit: float | None, offset: float) -> _Option:
    return _Option(Activation(alpha=alpha, limit=limit, linear_offset=offset))


# The run-time tensor replaces these values; they only say which options there are.
_PLACEHOLDERS = {
    (alpha, limited, shifted): Activation(
        alpha=alpha, limit=1.0 if limited else None, linear_offset=1.0 if shifted else 0.0
    )
    for alpha in (1.0, _QUICK_ALPHA)
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


def _option(
    y: Tensor, clamp_value: Scalar | None, linear_offset: Scalar = 0.0, alpha: float = 1.0
) -> _Option:
    tensors = isinstance(clamp_value, Tensor) or isinstance(linear_offset, Tensor)
    if not tensors and not torch.compiler.is_compiling():
        return _of_numbers(alpha, clamp_value, linear_offset)
    limited = clamp_value is not None
    # An offset of 0 is exact, so an unknown one needs no case of its own.
    shifted = alpha == _QUICK_ALPHA
    scalars = torch.stack(
        (
            _as_tensor(y, 1.0 if clamp_value is None else clamp_value, "clamp_value"),
            _as_tensor(y, linear_offset, "linear_offset"),
        )
    )
    return _Option(_PLACEHOLDERS[alpha, limited, shifted], scalars)


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


def _operands(y: Tensor, option: _Option, bias: Tensor | None, weights: Tensor | None) -> Operands:
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


def _apply(
    y: Tensor,
    option: _Option,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    storage: Storage = PLAIN_STORAGE,
) -> Tensor:
    operands = _operands(y, option, bias, weights)
    h = run(operands, option.activation.key, HALVES.key, storage)
    return h.reshape(*y.shape[:-1], h.shape[-1])


def _back(
    g: Tensor,
    y: Tensor,
    option: _Option,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
) -> Backward:
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


def _weighted_back(g: Tensor, y: Tensor, weights: Tensor, option: _Option) -> tuple[Tensor, Tensor]:
    result = _back(g, y, option, weights=weights)
    assert result.dp is not None
    dp = result.dp.to(weights.dtype)
    if dp.numel() == weights.numel():
        dp = dp.reshape(weights.shape)
    else:
        dp = dp.reshape(*y.shape[:-1], 1).sum_to_size(weights.shape)
    return result.dz.view(y.shape), dp


def swiglu(y: Tensor) -> Tensor:
    """Return ``silu(gate) * up``.

    Args:
        y: ``(…, 2F)``, gate then up; bf16, fp16 or fp32.

    Returns:
        ``(…, F)`` in ``y.dtype``; differentiable.

    Determinism: elementwise.
    """
    return _apply(y, _PLAIN)


def bias_swiglu(y: Tensor, bias: Tensor) -> Tensor:
    """Return ``swiglu(D(y + bias))``, added in fp32.

    Args:
        y: ``(…, 2F)``.
        bias: ``(2F,)``, or any shape that broadcasts to ``y``; dtype of ``y`` or fp32.

    Returns:
        ``(…, F)`` in ``y.dtype``; differentiable.

    Determinism: elementwise; the bias gradient adds its rows in a fixed order.
    """
    return _apply(y, _PLAIN, bias)


def weighted_swiglu(y: Tensor, weights: Tensor) -> Tensor:
    """Return ``swiglu(y) * weights`` with one rounding.

    Args:
        y: ``(…, 2F)``.
        weights: ``(…, 1)``, one factor per row.

    Returns:
        ``(…, F)`` in ``y.dtype``; differentiable.

    Determinism: elementwise; the weight gradient adds its columns in a fixed order.
    """
    return _apply(y, _PLAIN, weights=weights)


def clamped_swiglu(y: Tensor, clamp_value: Scalar) -> Tensor:
    """Return ``silu(min(gate, clamp_value)) * clamp(up, ±clamp_value)``.

    Args:
        y: ``(…, 2F)``.
        clamp_value: Bound, finite and > 0; a number or a tensor with one element.

    Returns:
        ``(…, F)`` in ``y.dtype``; differentiable in ``y``.

    Raises:
        ValueError: The bound is not finite and > 0 (module docstring).
        UnsupportedError: The bound is a tensor that requires a gradient.

    Determinism: elementwise.
    """
    return _apply(y, _option(y, clamp_value))


def bias_clamped_swiglu(y: Tensor, bias: Tensor, clamp_value: Scalar) -> Tensor:
    """Return ``clamped_swiglu(D(y + bias), clamp_value)``; see ``bias_swiglu``.

    Determinism: elementwise; the bias gradient adds its rows in a fixed order.
    """
    return _apply(y, _option(y, clamp_value), bias)


def clamped_weighted_swiglu(y: Tensor, weights: Tensor, clamp_value: Scalar) -> Tensor:
    """Return ``clamped_swiglu(y, clamp_value) * weights``; see ``weighted_swiglu``.

    Determinism: elementwise; the weight gradient adds its columns in a fixed order.
    """
    return _apply(y, _option(y, clamp_value), weights=weights)


def swiglu_back(g: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of ``swiglu`` to ``y``.

    Args:
        g: Gradient of the result, ``(…, F)``, dtype of ``y`` or fp32.
        y: ``(…, 2F)``.

    Returns:
        ``(…, 2F)`` in ``y.dtype``.

    Determinism: elementwise.
    """
    return _back(g, y, _PLAIN).dz.view(y.shape)


def bias_swiglu_back(g: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    """Return the gradient of ``bias_swiglu`` to ``y + bias``; see ``swiglu_back``.

    Determinism: elementwise.
    """
    return _back(g, y, _PLAIN, bias).dz.view(y.shape)


def weighted_swiglu_back(g: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``weighted_swiglu`` to ``y`` and ``weights``; see ``swiglu_back``.

    Determinism: repeatable; the weight gradient adds its columns in a fixed order.
    """
    return _weighted_back(g, y, weights, _PLAIN)


def clamped_swiglu_back(g: Tensor, y: Tensor, clamp_value: Scalar) -> Tensor:
    """Return the gradient of ``clamped_swiglu`` to ``y``; see ``swiglu_back``.

    Determinism: elementwise.
    """
    return _back(g, y, _option(y, clamp_value)).dz.view(y.shape)


def bias_clamped_swiglu_back(g: Tensor, y: Tensor, bias: Tensor, clamp_value: Scalar) -> Tensor:
    """Return the gradient of ``bias_clamped_swiglu`` to ``y + bias``; see ``swiglu_back``.

    Determinism: elementwise.
    """
    return _back(g, y, _option(y, clamp_value), bias).dz.view(y.shape)


def clamped_weighted_swiglu_back(
    g: Tensor, y: Tensor, weights: Tensor, clamp_value: Scalar
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``clamped_weighted_swiglu`` to ``y`` and ``weights``.

    Determinism: repeatable; the weight gradient adds its columns in a fixed order.
    """
    return _weighted_back(g, y, weights, _option(y, clamp_value))


def bias_swiglu_impl(
    input: Tensor,
    bias: Tensor | None,
    fp8_input_store: bool = False,
    cpu_offload_input: bool = False,
    clamp_value: Scalar | None = None,
) -> Tensor:
    """Return ``bias_swiglu`` or ``bias_clamped_swiglu``, with a choice of what the backward keeps.

    Args:
        input: ``(…, 2F)``.
        bias: ``(2F,)`` or None.
        fp8_input_store: Keep ``input`` in fp8 (e4m3), saturated at ±448, for the backward.
        cpu_offload_input: Set ``activation_offloading`` on what is kept, for a trainer that moves
            such tensors to the host.
        clamp_value: Bound, finite and > 0; None leaves values unbounded (0 does not).

    Returns:
        ``(…, F)`` in ``input.dtype``; differentiable.

    Determinism: elementwise; the bias gradient adds its rows in a fixed order.
    """
    option = _PLAIN if clamp_value is None else _option(input, clamp_value)
    return _apply(input, option, bias, storage=Storage(fp8_input_store, cpu_offload_input))


def weighted_bias_swiglu_impl(
    input: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    fp8_input_store: bool = False,
    clamp_value: Scalar | None = None,
) -> Tensor:
    """Return ``weighted_swiglu`` (or its clamped form), with a bias if there is one.

    Arguments as ``bias_swiglu_impl``; ``weights`` as ``weighted_swiglu``.

    Determinism: elementwise; gradients of weights and bias add in a fixed order.
    """
    option = _PLAIN if clamp_value is None else _option(input, clamp_value)
    return _apply(input, option, bias, weights, Storage(fp8=fp8_input_store))


def weighted_bias_quick_geglu_impl(
    input: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    fp8_input_store: bool = False,
    linear_offset: Scalar = 0.0,
    clamp_value: Scalar | None = None,
) -> Tensor:
    """Return ``gate * sigmoid(1.702 * gate) * (up + linear_offset) * weights``.

    The clamp works on ``input`` **before** the bias is added, as in Megatron-LM; gpt-oss models
    clamp after the bias (use ``samebits.ops.activation.activate`` with a bias for that).

    Args:
        input: ``(…, 2F)``.
        bias: ``(2F,)``, or any shape that broadcasts to ``input``; or None.
        weights: ``(…, 1)``, one factor per row.
        fp8_input_store: Keep the operator's input in fp8 (e4m3) for the backward.
        linear_offset: Added to up; a number or a tensor with one element.
        clamp_value: Bound, finite and > 0; None leaves values unbounded.

    Returns:
        ``(…, F)`` in ``input.dtype``; differentiable in input, bias and weights.

    Determinism: elementwise; gradients of weights and bias add in a fixed order.
    """
    if bias is not None and clamp_value is not None:
        input, clamp_value = _clamp_then_add(input, bias, clamp_value), None
        bias = None
    option = _option(input, clamp_value, linear_offset, _QUICK_ALPHA)
    return _apply(input, option, bias, weights, Storage(fp8=fp8_input_store))


def _clamp_then_add(y: Tensor, bias: Tensor, clamp_value: Scalar) -> Tensor:
    """Return ``D(clamp(y) + bias)``; by masks, so that the gradient is 1 at the bound."""
    if not isinstance(clamp_value, Tensor) and not torch.compiler.is_compiling():
        _of_numbers(1.0, clamp_value, 0.0)  # raises for an illegal bound
    wide = wide_dtype(y.dtype)
    limit = _as_tensor(y, clamp_value, "clamp_value")
    limit = torch.where((limit > 0) & torch.isfinite(limit), limit, float("nan"))
    gate, up = y.to(wide).chunk(2, -1)
    poison = limit - limit
    gate = torch.where(gate > limit, limit, gate) + poison
    up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    return (torch.cat((gate, up), -1) + bias.to(wide)).to(y.dtype)


def weighted_squared_relu_impl(input: Tensor, weights: Tensor) -> Tensor:
    """Return ``relu(input)² * weights`` with one rounding.

    Args:
        input: ``(…, F)``.
        weights: ``(…, 1)``, one factor per row.

    Returns:
        ``(…, F)`` in ``input.dtype``; differentiable.

    Determinism: elementwise; the weight gradient adds its columns in a fixed order.
    """
    return _apply(input, _RELU2, weights=weights)
