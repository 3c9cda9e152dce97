"""The function between the two projections of an expert: one frozen description.

CONTRACT.md section 2 is the specification. With ``g`` and ``u`` the gate and up parts of the first
projection of one slot::

    g, u = min(g, limit), clamp(u, -limit, limit)          # limit_position = "pre"
    a    = act(g)
    a, u = min(a, limit), clamp(u, -limit, limit)          # limit_position = "post"
    u    = up_softcap * tanh(u / up_softcap)               # situ
    h    = a * (u + linear_offset)                         # gated; not gated: h = act(z)

A clamp's gradient is 1 inside **and at** the bound and 0 outside, by explicit masks: frameworks
disagree at the bound and changed between versions. NaN passes every clamp.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from samebits.arguments import (
    Reader,
    read_bool,
    read_options,
    require_bool,
    require_name,
    require_number,
)
from samebits.errors import must
from samebits.kinds import ACTIVATIONS as ACTIVATIONS

LimitPosition = Literal["pre", "post"]
LIMIT_POSITIONS: tuple[LimitPosition, ...] = ("pre", "post")


_NEUTRAL: Mapping[str, object] = {
    "alpha": 1.0,
    "limit": None,
    "limit_position": "pre",
    "linear_offset": 0.0,
    "gate_softcap": None,
    "up_softcap": None,
}
# Without an up part there is nothing to clamp on both sides, to offset or to cap.
_GATED_ONLY = frozenset(_NEUTRAL) - {"alpha"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """Describe the whole function between the two projections; ``Activation()`` is plain SwiGLU.

    Immutable, hashable and free of tensors. ``key`` is its canonical spelling, computed once, here:
    it is what enters operators and compiled graphs, never the Python floats.

    Raises:
        TypeError: An option has the wrong type.
        ValueError: An option is outside its range, or the chosen kind does not use it.
    """

    # A key of ACTIVATIONS.
    kind: str = "silu"
    # False: the first projection has no up part, h = act(z).
    gated: bool = True
    # Slope of the gate's sigmoid (silu only); finite, > 0. 1.702 is gpt-oss.
    alpha: float = 1.0
    # Clamp bound in activation units; finite, > 0. None leaves values unbounded; 0 is an error.
    limit: float | None = None
    # "pre": bound the gate before act (gpt-oss, DeepSeek-V4); "post": bound act(gate) (Step).
    limit_position: LimitPosition = "pre"
    # Added to up after its clamp; finite. 1 is gpt-oss.
    linear_offset: float = 0.0
    # Soft cap of the gate (situ only, where it must be given); finite, > 0.
    gate_softcap: float | None = None
    # Soft cap of up (situ only); finite, > 0. None leaves up as it is.
    up_softcap: float | None = None
    # Canonical spelling, for example "silu(alpha=1.702,limit=7.0,linear_offset=1.0)".
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        require_name("activation kind", self.kind, ACTIVATIONS)
        require_bool("gated", self.gated)
        require_name("limit_position", self.limit_position, LIMIT_POSITIONS)
        for name in ("alpha", "limit", "gate_softcap", "up_softcap"):
            self._canonical_float(name, above=0.0)
        self._canonical_float("linear_offset", above=None)
        self._refuse_unused()
        object.__setattr__(self, "key", self._spell())

    def _canonical_float(self, name: str, *, above: float | None) -> None:
        value = getattr(self, name)
        if value is not None or _NEUTRAL[name] is not None:
            hint = " (None means no clamp)" if name == "limit" else ""
            object.__setattr__(self, name, require_number(name, value, above=above, hint=hint))

    def _refuse_unused(self) -> None:
        kind = ACTIVATIONS[self.kind]
        if not self.gated and not kind.ungated:
            raise ValueError(must("gated", f"be True for kind {self.kind!r}", self.gated))
        allowed = kind.options if self.gated else kind.options - _GATED_ONLY
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name)
            if name not in allowed and value != neutral:
                form = "" if self.gated else " without a gate"
                rule = f"be {neutral!r} for kind {self.kind!r}{form}, which does not use it"
                raise ValueError(must(name, rule, repr(value)))
        for name in kind.required:
            if getattr(self, name) is None:
                raise ValueError(must(name, f"be given for kind {self.kind!r}", None))
        if self.limit is None and self.limit_position != "pre":
            raise ValueError(must("limit", "be given with limit_position='post'", None))

    def _spell(self) -> str:
        options = [] if self.gated else ["gated=False"]
        options += [
            f"{name}={getattr(self, name)}"
            for name, neutral in _NEUTRAL.items()
            if getattr(self, name) != neutral
        ]
        return f"{self.kind}({','.join(options)})" if options else self.kind

    def __str__(self) -> str:
        return self.key

    @property
    def columns(self) -> int:
        """Columns of the first projection per column of ``h``: 2 with a gate, 1 without."""
        return 2 if self.gated else 1

    @staticmethod
    def parse(key: str) -> "Activation":
        """Return the activation that ``key`` spells; the inverse of ``Activation.key``.

        Raises:
            ValueError: ``key`` is not of the form ``kind`` or ``kind(option=value,…)``.
        """
        return _parse(key)


@lru_cache(maxsize=1024)
def _parse(key: str) -> Activation:
    match = re.fullmatch(r"(\w+)(?:\(([^()]*)\))?", key)
    if match is None:
        raise ValueError(must("key", "look like kind(option=value,…)", repr(key)))
    readers: dict[str, Reader] = dict.fromkeys(_NEUTRAL, float)
    readers |= {"gated": read_bool, "limit_position": str}
    items = filter(None, (match[2] or "").split(","))
    return Activation(kind=match[1], **read_options("activation option", items, readers))


def clamp_above(value: Tensor, limit: float) -> Tensor:
    """Return ``min(value, limit)`` with gradient ``not (value > limit)``; NaN stays NaN."""
    return torch.where(value > limit, limit, value)


def clamp_both(value: Tensor, limit: float) -> Tensor:
    """Return ``clamp(value, -limit, limit)``, gradient 1 up to and at the bounds; NaN stays NaN."""
    return torch.where(value > limit, limit, torch.where(value < -limit, -limit, value))


def apply(activation: Activation, gate: Tensor, up: Tensor | None) -> Tensor:
    """Return ``h`` for the gate and up parts of the first projection (module docstring).

    Args:
        activation: The function.
        gate: Gate part, or the whole first projection where the activation is not gated; any
            shape, fp32 or fp64 (the contract computes in fp32).
        up: Up part, same shape and dtype; None where the activation is not gated.

    Returns:
        ``h``, same shape and dtype; differentiable.

    Determinism: elementwise.
    """
    kind = ACTIVATIONS[activation.kind]
    if up is None:
        return kind.function(gate, activation)
    limit = activation.limit
    pre = limit is not None and activation.limit_position == "pre"
    if limit is not None:
        up = clamp_both(up, limit)
    if activation.up_softcap is not None:
        up = activation.up_softcap * torch.tanh(up / activation.up_softcap)
    act = kind.function(clamp_above(gate, limit) if pre and limit is not None else gate, activation)
    if limit is not None and not pre:
        act = clamp_above(act, limit)
    return act * (up + activation.linear_offset) if activation.linear_offset else act * up


class Derivative(NamedTuple):
    """``h`` and its partial derivatives, elementwise; ``up`` is None where there is no up part."""

    h: Tensor
    gate: Tensor
    up: Tensor | None


def derivative(activation: Activation, gate: Tensor, up: Tensor | None) -> Derivative:
    """Return ``h``, ``dh/dgate`` and ``dh/dup`` in closed form; see ``apply``.

    Determinism: elementwise.
    """
    kind = ACTIVATIONS[activation.kind]
    if up is None:
        return Derivative(kind.function(gate, activation), kind.derivative(gate, activation), None)
    limit, cap = activation.limit, activation.up_softcap
    inside_gate: Tensor | None = None
    inside_up: Tensor | None = None
    if limit is not None:
        inside_up = ~((up > limit) | (up < -limit))
        up = clamp_both(up, limit)
        if activation.limit_position == "pre":
            inside_gate = ~(gate > limit)
            gate = clamp_above(gate, limit)
    act, slope = kind.function(gate, activation), kind.derivative(gate, activation)
    if limit is not None and activation.limit_position == "post":
        inside_gate = ~(act > limit)
        act = clamp_above(act, limit)
    up_slope: Tensor | None = None
    if cap is not None:
        tanh = torch.tanh(up / cap)
        up, up_slope = cap * tanh, 1.0 - tanh * tanh
    linear = up + activation.linear_offset if activation.linear_offset else up
    d_gate, d_up = slope * linear, act if up_slope is None else act * up_slope
    if inside_gate is not None:
        d_gate = torch.where(inside_gate, d_gate, 0.0)
    if inside_up is not None:
        d_up = torch.where(inside_up, d_up, 0.0)
    return Derivative(act * linear, d_gate, d_up)
