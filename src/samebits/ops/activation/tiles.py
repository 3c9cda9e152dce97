"""The contract's section 2 on fp32 tiles: one forward and one derivative, for every kernel.

``glu_tile`` and ``glu_derivative_tile`` are the only places where a gated expert function is
written for the GPU; kernels and GEMM epilogues call them (``act_tile`` and ``slope_tile`` where
there is no gate). They take the options as run-time fp32 scalars, so that limits that differ from
layer to layer share one binary; ``TileOptions.of(activation, D)`` gives both kinds of argument.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from samebits.activation import Activation
from samebits.ops._triton.elementwise import clamp_above, clamp_both, sigmoid, sigmoid_fp32, tanh

# Kinds that act_tile and slope_tile know; a test compares them with samebits.activation.
KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "situ")
# Kinds whose sigmoid is computed more precisely where D is fp32, under another name.
_PRECISE = {"silu": "silu fp32", "situ": "situ fp32"}


class TileOptions(NamedTuple):
    """Arguments of the tile functions that an activation stands for."""

    # Run-time fp32 scalars (alpha, limit, offset, gate_cap, up_cap); unused ones hold 1.
    scalars: tuple[float, float, float, float, float]
    # Constexpr arguments, by name.
    flags: dict[str, str | bool]

    @staticmethod
    def of(activation: Activation, dtype: torch.dtype) -> "TileOptions":
        """Return the tile arguments of ``activation`` in D; treat the result as read-only."""
        return _options(activation, dtype == torch.float32)


@lru_cache(maxsize=1024)
def _options(activation: Activation, precise: bool) -> TileOptions:
    limit, kind = activation.limit, activation.kind
    return TileOptions(
        scalars=(
            activation.alpha,
            1.0 if limit is None else limit,
            activation.linear_offset,
            activation.gate_softcap or 1.0,
            activation.up_softcap or 1.0,
        ),
        flags={
            "KIND": _PRECISE.get(kind, kind) if precise else kind,
            "GATED": activation.gated,
            "LIMIT": "none" if limit is None else activation.limit_position,
            "HAS_OFFSET": activation.linear_offset != 0.0,
            "HAS_UP_CAP": activation.up_softcap is not None,
        },
    )


@triton.jit
def _gelu_tanh_parts(gate):
    square = gate * gate
    # sqrt(2 / pi) (g + 0.044715 g³) and its derivative.
    inner = 0.7978845608028654 * (gate + 0.044715 * (square * gate))
    return tanh(inner), 0.7978845608028654 * (1.0 + 0.134145 * square)


@triton.jit
def _sigmoid(x, KIND: tl.constexpr):
    if KIND == "silu fp32" or KIND == "situ fp32":
        return sigmoid_fp32(x)
    else:
        return sigmoid(x)


@triton.jit
def act_tile(gate, alpha, gate_cap, KIND: tl.constexpr):
    """Return the scalar function of the gate, fp32."""
    if KIND == "silu" or KIND == "silu fp32":
        return gate * _sigmoid(alpha * gate, KIND)
    elif KIND == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        bend, _ = _gelu_tanh_parts(gate)
        return 0.5 * gate * (1.0 + bend)
    elif KIND == "relu":
        return tl.where(gate < 0.0, 0.0, gate)
    elif KIND == "relu2":
        positive = tl.where(gate < 0.0, 0.0, gate)
        return positive * positive
    else:
        tl.static_assert(KIND == "situ" or KIND == "situ fp32")
        return gate_cap * tanh(gate / gate_cap) * _sigmoid(gate, KIND)


@triton.jit
def slope_tile(gate, alpha, gate_cap, KIND: tl.constexpr):
    """Return ``(act, d act / d gate)``, fp32; the first has the bits of ``act_tile``."""
    if KIND == "silu" or KIND == "silu fp32":
        share = _sigmoid(alpha * gate, KIND)
        return gate * share, share * (1.0 + alpha * gate * (1.0 - share))
    elif KIND == "gelu":
        bell = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
        density = tl.exp(-0.5 * gate * gate) * 0.3989422804014327
        return bell, 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)) + gate * density
    elif KIND == "gelu_tanh":
        bend, inner_slope = _gelu_tanh_parts(gate)
        slope = 0.5 * (1.0 + bend) + 0.5 * gate * (1.0 - bend * bend) * inner_slope
        return 0.5 * gate * (1.0 + bend), slope
    elif KIND == "relu":
        return tl.where(gate < 0.0, 0.0, gate), tl.where(gate > 0.0, 1.0, 0.0)
    elif KIND == "relu2":
        positive = tl.where(gate < 0.0, 0.0, gate)
        return positive * positive, 2.0 * positive
    else:
        tl.static_assert(KIND == "situ" or KIND == "situ fp32")
        bend, share = tanh(gate / gate_cap), _sigmoid(gate, KIND)
        act = gate_cap * bend * share
        return act, share * ((1.0 - bend * bend) + gate_cap * bend * (1.0 - share))


@triton.jit
def glu_tile(
    gate, up,
    alpha, limit, offset, gate_cap, up_cap,
    KIND: tl.constexpr, LIMIT: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_UP_CAP: tl.constexpr,
):  # fmt: skip
    """Return ``h`` in fp32, before its rounding.

    ``LIMIT`` is "none", "pre" or "post"; a value whose flag is off is not read.
    """
    if LIMIT == "pre":
        gate = clamp_above(gate, limit)
    act = act_tile(gate, alpha, gate_cap, KIND)
    if LIMIT == "post":
        act = clamp_above(act, limit)
    if LIMIT != "none":
        up = clamp_both(up, limit)
    if HAS_UP_CAP:
        up = up_cap * tanh(up / up_cap)
    if HAS_OFFSET:
        up = up + offset
    return act * up


@triton.jit
def glu_derivative_tile(
    dh, gate, up,
    alpha, limit, offset, gate_cap, up_cap,
    KIND: tl.constexpr, LIMIT: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_UP_CAP: tl.constexpr,
):  # fmt: skip
    """Return ``(h, dgate, dup)`` in fp32: ``h`` as ``glu_tile``, and the gradients for ``dh``.

    The mask of a clamp is ``not (value > limit)``: 1 inside, at the bound and for NaN. Outside,
    the gradient is exactly 0 whatever ``dh`` holds. Masks compare again what a clamp compared:
    predicates kept from one to the other would not fit.
    """
    clamped = clamp_above(gate, limit) if LIMIT == "pre" else gate
    act, slope = slope_tile(clamped, alpha, gate_cap, KIND)
    bounded = clamp_above(act, limit) if LIMIT == "post" else act
    linear = clamp_both(up, limit) if LIMIT != "none" else up

    dup = dh * bounded
    if HAS_UP_CAP:
        bend = tanh(linear / up_cap)
        linear = up_cap * bend
        dup = dup * (1.0 - bend * bend)
    if LIMIT != "none":
        dup = tl.where(tl.abs(up) > limit, 0.0, dup)
    if HAS_OFFSET:
        linear = linear + offset

    dgate = dh * (slope * linear)
    if LIMIT == "pre":
        dgate = tl.where(gate > limit, 0.0, dgate)
    if LIMIT == "post":
        dgate = tl.where(act > limit, 0.0, dgate)
    return bounded * linear, dgate, dup
