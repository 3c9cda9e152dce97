"""Fused activations with the signatures of Megatron-LM's, on this library's operator.

Gate and up are the two halves of the last dimension, gate first. Everything between load and store
is fp32 with one rounding (CONTRACT section 5), and a clamp's gradient is 1 at the bound.

A clamp bound or an offset may be a number or a tensor with one element. Inside a compiled function
a number becomes a tensor in the graph: the operator never sees a Python float, which a later value
could leave stale in a compiled program. A bound that is not finite and > 0 raises; where it is
a tensor on a GPU, or a number in a compiled function on a GPU, the result is NaN instead.
"""

from samebits.functional.plain import (
    bias_clamped_swiglu,
    bias_clamped_swiglu_back,
    bias_swiglu,
    bias_swiglu_back,
    clamped_swiglu,
    clamped_swiglu_back,
    clamped_weighted_swiglu,
    clamped_weighted_swiglu_back,
    swiglu,
    swiglu_back,
    weighted_swiglu,
    weighted_swiglu_back,
)
from samebits.functional.stored import (
    bias_swiglu_impl,
    weighted_bias_quick_geglu_impl,
    weighted_bias_swiglu_impl,
    weighted_squared_relu_impl,
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
