"""vLLM's names of activations, with the options that stand beside the name."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from samebits.activation import Activation, LimitPosition
from samebits.errors import UnsupportedError, must, unknown
from samebits.weights import Layout


class _Named(NamedTuple):
    """What one name of vLLM means."""

    kind: str
    gated: bool = True
    layout: Layout = Layout()
    limit_position: LimitPosition = "pre"
    # What the name says where no option does.
    defaults: Mapping[str, float] = {}
    # Options that must be given.
    needed: tuple[str, ...] = ()


_NAMED: Mapping[str, _Named] = {
    "silu": _Named("silu"),
    "gelu": _Named("gelu"),
    "gelu_tanh": _Named("gelu_tanh"),
    "gelu_pytorch_tanh": _Named("gelu_tanh"),
    "swigluoai": _Named(
        "silu",
        layout=Layout(interleave=1),
        defaults={"limit": 7.0, "alpha": 1.702, "linear_offset": 1.0},
    ),
    # vLLM takes alpha = 1 and an offset of 0 where they are missing: the name says otherwise.
    "swigluoai_uninterleave": _Named("silu", needed=("limit", "alpha", "linear_offset")),
    "swiglustep": _Named("silu", limit_position="post", defaults={"limit": 7.0}),
    "situ": _Named("situ", needed=("gate_softcap",)),
    "silu_no_mul": _Named("silu", gated=False),
    "gelu_no_mul": _Named("gelu", gated=False),
    "gelu_tanh_no_mul": _Named("gelu_tanh", gated=False),
    "relu2_no_mul": _Named("relu2", gated=False),
}
# Names of vLLM's options, for messages.
_SPELLED = {
    "limit": "gemm1_clamp_limit",
    "alpha": "gemm1_alpha",
    "linear_offset": "gemm1_beta",
    "gate_softcap": "activation_situ_beta",
    "up_softcap": "activation_situ_linear_beta",
}


def activation_of(
    activation: Any,
    *,
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
) -> tuple[Activation, Layout]:
    """Return the activation that vLLM names, and the order of gate and up that the name implies.

    Every option that is given is honoured, also where vLLM's own code has a constant or drops it.

    Args:
        activation: A ``MoEActivation``, or its value.
        limit: ``gemm1_clamp_limit`` or ``swiglu_limit``; None is "off", 0 an error.
        alpha: ``gemm1_alpha`` or ``swiglu_alpha``.
        beta: ``gemm1_beta`` or ``swiglu_beta``, the offset of the up part.
        situ_beta: ``activation_situ_beta``.
        situ_linear_beta: ``activation_situ_linear_beta``.

    Raises:
        UnsupportedError: The name is not known, or vLLM itself computes no such activation.
        ValueError: An option is out of range, missing, or none of this activation's.

    Determinism: a function of its arguments.
    """
    name = str(getattr(activation, "value", activation))
    if name == "relu2":
        raise UnsupportedError("activation relu2 with a gate is a name that vLLM does not compute")
    if name not in _NAMED:
        raise UnsupportedError(unknown("activation of vLLM", name, _NAMED))
    named = _NAMED[name]
    given = {
        "limit": limit,
        "alpha": alpha,
        "linear_offset": beta,
        "gate_softcap": situ_beta,
        "up_softcap": situ_linear_beta,
    }
    options = dict(named.defaults) | {key: v for key, v in given.items() if v is not None}
    for key in named.needed:
        if key not in options:
            raise ValueError(must(_SPELLED[key], f"be given for activation {name}", None))
    position = named.limit_position if "limit" in options else "pre"
    built = Activation(kind=named.kind, gated=named.gated, limit_position=position, **options)
    return built, named.layout
