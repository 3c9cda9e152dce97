"""Megatron-LM's quick-geglu functions on this library's operator, with its names and signatures.

``quick_gelu(gate) * (up + linear_offset)``, ``quick_gelu(g) = g * sigmoid(1.702 * g)``.
"""

from torch import Tensor

from samebits.functional.call import (
    QUICK_ALPHA,
    Option,
    Scalar,
    apply,
    back,
    option_of,
    weighted_back,
)


def quick_geglu(y: Tensor, linear_offset: Scalar = 0.0) -> Tensor:
    """Return ``quick_gelu(gate) * (up + linear_offset)``; ``y`` is ``(…, 2F)``.

    Determinism: elementwise.
    """
    return apply(y, _option(y, linear_offset))


def weighted_quick_geglu(y: Tensor, weights: Tensor, linear_offset: Scalar = 0.0) -> Tensor:
    """Return ``quick_geglu(y) * weights``, with weights ``(…, 1)``.

    Determinism: elementwise; the weight gradient adds its columns in a fixed order.
    """
    return apply(y, _option(y, linear_offset), weights=weights)


def weighted_bias_quick_geglu(
    y: Tensor, bias: Tensor, weights: Tensor, linear_offset: Scalar = 0.0
) -> Tensor:
    """Return ``quick_geglu(y + bias) * weights``.

    Determinism: elementwise; gradients of weights and bias add in a fixed order.
    """
    return apply(y, _option(y, linear_offset), bias, weights)


def quick_geglu_back(g: Tensor, y: Tensor, linear_offset: Scalar = 0.0) -> Tensor:
    """Return the gradient of ``quick_geglu`` to ``y``.

    Determinism: elementwise.
    """
    return back(g, y, _option(y, linear_offset)).dz.view(y.shape)


def weighted_quick_geglu_back(
    g: Tensor, y: Tensor, weights: Tensor, linear_offset: Scalar = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``weighted_quick_geglu`` to ``y`` and ``weights``.

    Determinism: repeatable; the weight gradient adds its columns in a fixed order.
    """
    return weighted_back(g, y, weights, _option(y, linear_offset))


def weighted_bias_quick_geglu_back(
    g: Tensor, y: Tensor, bias: Tensor, weights: Tensor, linear_offset: Scalar = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients to ``y``, the bias (row by row, as Megatron-LM does), and ``weights``.

    Determinism: repeatable; the weight gradient adds its columns in a fixed order.
    """
    result = back(g, y, _option(y, linear_offset), bias, weights)
    assert result.dp is not None
    dz = result.dz.view(y.shape)
    return dz, dz, result.dp.to(weights.dtype).reshape(weights.shape)


def _option(y: Tensor, linear_offset: Scalar) -> Option:
    return option_of(y, None, linear_offset, QUICK_ALPHA)
