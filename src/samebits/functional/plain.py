"""SwiGLU with a bias, weights or a clamp, and the explicit gradients."""

from torch import Tensor

from samebits.functional.call import PLAIN, Scalar, apply, back, option_of, weighted_back


def swiglu(y: Tensor) -> Tensor:
    """Return ``silu(gate) * up``.

    Args:
        y: ``(…, 2F)``, gate then up; bf16, fp16 or fp32.

    Returns:
        ``(…, F)`` in ``y.dtype``; differentiable.

    Determinism: elementwise.
    """
    return apply(y, PLAIN)


def bias_swiglu(y: Tensor, bias: Tensor) -> Tensor:
    """Return ``swiglu(D(y + bias))``, added in fp32.

    Args:
        y: ``(…, 2F)``.
        bias: ``(2F,)``, or any shape that broadcasts to ``y``; dtype of ``y`` or fp32.

    Returns:
        ``(…, F)`` in ``y.dtype``; differentiable.

    Determinism: elementwise; the bias gradient adds its rows in a fixed order.
    """
    return apply(y, PLAIN, bias)


def weighted_swiglu(y: Tensor, weights: Tensor) -> Tensor:
    """Return ``swiglu(y) * weights`` with one rounding.

    Args:
        y: ``(…, 2F)``.
        weights: ``(…, 1)``, one factor per row.

    Returns:
        ``(…, F)`` in ``y.dtype``; differentiable.

    Determinism: elementwise; the weight gradient adds its columns in a fixed order.
    """
    return apply(y, PLAIN, weights=weights)


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
    return apply(y, option_of(y, clamp_value))


def bias_clamped_swiglu(y: Tensor, bias: Tensor, clamp_value: Scalar) -> Tensor:
    """Return ``clamped_swiglu(D(y + bias), clamp_value)``; see ``bias_swiglu``.

    Determinism: elementwise; the bias gradient adds its rows in a fixed order.
    """
    return apply(y, option_of(y, clamp_value), bias)


def clamped_weighted_swiglu(y: Tensor, weights: Tensor, clamp_value: Scalar) -> Tensor:
    """Return ``clamped_swiglu(y, clamp_value) * weights``; see ``weighted_swiglu``.

    Determinism: elementwise; the weight gradient adds its columns in a fixed order.
    """
    return apply(y, option_of(y, clamp_value), weights=weights)


def swiglu_back(g: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of ``swiglu`` to ``y``.

    Args:
        g: Gradient of the result, ``(…, F)``, dtype of ``y`` or fp32.
        y: ``(…, 2F)``.

    Returns:
        ``(…, 2F)`` in ``y.dtype``.

    Determinism: elementwise.
    """
    return back(g, y, PLAIN).dz.view(y.shape)


def bias_swiglu_back(g: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    """Return the gradient of ``bias_swiglu`` to ``y + bias``; see ``swiglu_back``.

    Determinism: elementwise.
    """
    return back(g, y, PLAIN, bias).dz.view(y.shape)


def weighted_swiglu_back(g: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``weighted_swiglu`` to ``y`` and ``weights``; see ``swiglu_back``.

    Determinism: repeatable; the weight gradient adds its columns in a fixed order.
    """
    return weighted_back(g, y, weights, PLAIN)


def clamped_swiglu_back(g: Tensor, y: Tensor, clamp_value: Scalar) -> Tensor:
    """Return the gradient of ``clamped_swiglu`` to ``y``; see ``swiglu_back``.

    Determinism: elementwise.
    """
    return back(g, y, option_of(y, clamp_value)).dz.view(y.shape)


def bias_clamped_swiglu_back(g: Tensor, y: Tensor, bias: Tensor, clamp_value: Scalar) -> Tensor:
    """Return the gradient of ``bias_clamped_swiglu`` to ``y + bias``; see ``swiglu_back``.

    Determinism: elementwise.
    """
    return back(g, y, option_of(y, clamp_value), bias).dz.view(y.shape)


def clamped_weighted_swiglu_back(
    g: Tensor, y: Tensor, weights: Tensor, clamp_value: Scalar
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``clamped_weighted_swiglu`` to ``y`` and ``weights``.

    Determinism: repeatable; the weight gradient adds its columns in a fixed order.
    """
    return weighted_back(g, y, weights, option_of(y, clamp_value))
