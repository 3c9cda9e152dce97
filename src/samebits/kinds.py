"""The kinds of activation: one table row each, a function of the gate with its derivative."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor


class Scalars(Protocol):
    """What a kind may read of a ``samebits.Activation``."""

    @property
    def alpha(self) -> float:
        """Slope of the gate's sigmoid."""

    @property
    def gate_softcap(self) -> float | None:
        """Soft cap of the gate."""


class ActivationKind(NamedTuple):
    """One row of ``ACTIVATIONS``: the function of the gate, its derivative, what they read."""

    # (gate, activation) -> act(gate); differentiable by autograd.
    function: Callable[[Tensor, Scalars], Tensor]
    # (gate, activation) -> d act / d gate.
    derivative: Callable[[Tensor, Scalars], Tensor]
    # Fields of Activation with a meaning for this kind; any other must be at its neutral value.
    options: frozenset[str]
    # Fields among ``options`` that have no neutral value and must be given.
    required: frozenset[str] = frozenset()
    # False where the kind exists in the gated form only.
    ungated: bool = True


def _logistic(x: Tensor) -> Tensor:
    # In place: fresh memory for every step costs more than the arithmetic on a CPU.
    return torch.neg(x).exp_().add_(1.0).reciprocal_()


class _Sigmoid(torch.autograd.Function):
    """``1 / (1 + exp(-x))``, whose own gradient is NaN where the exponential overflows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        share = _logistic(x)
        ctx.save_for_backward(share)
        return share

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        share: Tensor = ctx.saved_tensors[0]
        return grads[0] * (share * (1.0 - share))


def _sigmoid(x: Tensor) -> Tensor:
    # torch's own sigmoid gives an element other bits on CPU when it falls into the tail of a vector
    # loop, that is, by its place in the tensor; exp, tanh and erf do not.
    if not x.requires_grad:
        return _logistic(x)
    share: Tensor = _Sigmoid.apply(x)  # type: ignore[no-untyped-call]
    return share


def _silu(gate: Tensor, activation: Scalars) -> Tensor:
    return gate * _sigmoid(gate if activation.alpha == 1.0 else activation.alpha * gate)


def _silu_derivative(gate: Tensor, activation: Scalars) -> Tensor:
    sigmoid = _sigmoid(activation.alpha * gate)
    return sigmoid * (1.0 + activation.alpha * gate * (1.0 - sigmoid))


def _gelu(gate: Tensor, activation: Scalars) -> Tensor:
    return 0.5 * gate * (1.0 + torch.erf(gate * math.sqrt(0.5)))


def _gelu_derivative(gate: Tensor, activation: Scalars) -> Tensor:
    density = torch.exp(-0.5 * gate * gate) * (1.0 / math.sqrt(2.0 * math.pi))
    return 0.5 * (1.0 + torch.erf(gate * math.sqrt(0.5))) + gate * density


# tanh approximation of gelu: 0.5 g (1 + tanh(√(2/π) (g + 0.044715 g³))), Hendrycks & Gimpel 2016.
_GELU_TANH_SCALE = math.sqrt(2.0 / math.pi)
_GELU_TANH_CUBIC = 0.044715


def _gelu_tanh(gate: Tensor, activation: Scalars) -> Tensor:
    inner = _GELU_TANH_SCALE * (gate + _GELU_TANH_CUBIC * gate * gate * gate)
    return 0.5 * gate * (1.0 + torch.tanh(inner))


def _gelu_tanh_derivative(gate: Tensor, activation: Scalars) -> Tensor:
    square = gate * gate
    tanh = torch.tanh(_GELU_TANH_SCALE * (gate + _GELU_TANH_CUBIC * square * gate))
    slope = _GELU_TANH_SCALE * (1.0 + 3.0 * _GELU_TANH_CUBIC * square)
    return 0.5 * (1.0 + tanh) + 0.5 * gate * (1.0 - tanh * tanh) * slope


def _relu(gate: Tensor, activation: Scalars) -> Tensor:
    # The slope at 0 is 0, as in torch's own relu; the sign of a zero is kept.
    value = torch.where(gate == 0, gate.detach(), gate)
    return torch.where(gate < 0, torch.zeros_like(gate), value)


def _relu_derivative(gate: Tensor, activation: Scalars) -> Tensor:
    return (gate > 0).to(gate.dtype)


def _relu2(gate: Tensor, activation: Scalars) -> Tensor:
    positive = _relu(gate, activation)
    return positive * positive


def _relu2_derivative(gate: Tensor, activation: Scalars) -> Tensor:
    return 2.0 * _relu(gate, activation)


def _situ(gate: Tensor, activation: Scalars) -> Tensor:
    cap = cast("float", activation.gate_softcap)
    return cap * torch.tanh(gate / cap) * _sigmoid(gate)


def _situ_derivative(gate: Tensor, activation: Scalars) -> Tensor:
    cap = cast("float", activation.gate_softcap)
    tanh, sigmoid = torch.tanh(gate / cap), _sigmoid(gate)
    return sigmoid * ((1.0 - tanh * tanh) + cap * tanh * (1.0 - sigmoid))


_CLAMPED = frozenset({"limit", "limit_position", "linear_offset"})

ACTIVATIONS: Mapping[str, ActivationKind] = {
    "silu": ActivationKind(_silu, _silu_derivative, _CLAMPED | {"alpha"}),
    "gelu": ActivationKind(_gelu, _gelu_derivative, _CLAMPED),
    "gelu_tanh": ActivationKind(_gelu_tanh, _gelu_tanh_derivative, _CLAMPED),
    "relu": ActivationKind(_relu, _relu_derivative, _CLAMPED),
    "relu2": ActivationKind(_relu2, _relu2_derivative, _CLAMPED),
    "situ": ActivationKind(
        _situ,
        _situ_derivative,
        frozenset({"gate_softcap", "up_softcap", "linear_offset"}),
        required=frozenset({"gate_softcap"}),
        ungated=False,
    ),
}
