"""Activations by the names that other projects give the function of the gate."""

from collections.abc import Mapping

from samebits.activation import Activation, LimitPosition
from samebits.errors import UnsupportedError, unknown

# Name in a configuration -> (kind, alpha).
_KINDS: Mapping[str, tuple[str, float]] = {
    "silu": ("silu", 1.0),
    "swish": ("silu", 1.0),
    "quick_gelu": ("silu", 1.702),
    "gelu": ("gelu", 1.0),
    "gelu_pytorch_tanh": ("gelu_tanh", 1.0),
    "gelu_new": ("gelu_tanh", 1.0),
    "relu": ("relu", 1.0),
    "relu2": ("relu2", 1.0),
    "squared_relu": ("relu2", 1.0),
}


def activation_of(
    name: str,
    *,
    gated: bool = True,
    limit: float | None = None,
    position: LimitPosition = "pre",
    linear_offset: float = 0.0,
) -> Activation:
    """Return the activation with the gate function ``name``.

    Raises:
        UnsupportedError: No activation of this library has that function.

    Determinism: a function of its arguments.
    """
    if name not in _KINDS:
        raise UnsupportedError(unknown("function of the gate", name, _KINDS))
    kind, alpha = _KINDS[name]
    return Activation(
        kind=kind,
        alpha=alpha,
        gated=gated,
        limit=limit,
        limit_position="pre" if limit is None else position,
        linear_offset=linear_offset,
    )
