"""The forms that a trainer calls: with a choice of what the backward keeps."""

from torch import Tensor

from samebits.functional.call import (
    PLAIN,
    QUICK_ALPHA,
    RELU2,
    Scalar,
    apply,
    clamp_then_add,
    option_of,
)
from samebits.ops.activation.contract import Storage


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
    option = PLAIN if clamp_value is None else option_of(input, clamp_value)
    return apply(input, option, bias, storage=Storage(fp8_input_store, cpu_offload_input))


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
    option = PLAIN if clamp_value is None else option_of(input, clamp_value)
    return apply(input, option, bias, weights, Storage(fp8=fp8_input_store))


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
        fp8_input_store: Keep the operator's input in fp8 (e4m3) for the backward. With a bias and
            a clamp it saves nothing: ``input`` itself is kept as well.
        linear_offset: Added to up; a number or a tensor with one element.
        clamp_value: Bound, finite and > 0; None leaves values unbounded.

    Returns:
        ``(…, F)`` in ``input.dtype``; differentiable in input, bias and weights.

    Determinism: elementwise; gradients of weights and bias add in a fixed order.
    """
    if bias is not None and clamp_value is not None:
        input, clamp_value = clamp_then_add(input, bias, clamp_value), None
        bias = None
    option = option_of(input, clamp_value, linear_offset, QUICK_ALPHA)
    return apply(input, option, bias, weights, Storage(fp8=fp8_input_store))


def weighted_squared_relu_impl(input: Tensor, weights: Tensor) -> Tensor:
    """Return ``relu(input)² * weights`` with one rounding.

    Args:
        input: ``(…, F)``.
        weights: ``(…, 1)``, one factor per row.

    Returns:
        ``(…, F)`` in ``input.dtype``; differentiable.

    Determinism: elementwise; the weight gradient adds its columns in a fixed order.
    """
    return apply(input, RELU2, weights=weights)
