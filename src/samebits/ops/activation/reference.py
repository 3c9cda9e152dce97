"""The activation in torch only: the CPU operator, vectorised over blocks of rows.

The mathematics is that of ``samebits.activation.apply`` and ``derivative``, spelled in the few
torch operators that are vectorised on a CPU (``where``, boolean masks and operands of two dtypes
are not), block by block (``blocks.py``).
"""

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from samebits import activation as act
from samebits.activation import Activation
from samebits.ops.activation.blocks import Buffers, blocks
from samebits.ops.activation.operands import Backward, Operands, Wanted, wide_dtype
from samebits.ops.activation.sums import sum_bias, sum_columns
from samebits.weights import Layout

# Gives memory in the shape of a block's gate by name.
Buffer = Callable[[str], Tensor]


def _with_scalars(activation: Activation, scalars: Tensor | None) -> Activation:
    """Return the activation with limit and offset read from ``scalars``; illegal ones raise."""
    if scalars is None:
        return activation
    limit, offset = scalars.tolist()
    return Activation(
        kind=activation.kind,
        alpha=activation.alpha,
        limit=None if activation.limit is None else limit,
        limit_position=activation.limit_position,
        linear_offset=offset,
    )


def _stored(
    operands: Operands, activation: Activation, layout: Layout, span: slice, experts: Tensor | None
) -> Tensor:
    """Return the parts of ``z' = D(z + bias)`` as they are stored: ``(1 or 2, rows, n, block)``."""
    z = operands.z[span]
    bias = _row_bias(operands, span, experts)
    if bias is not None:
        # One rounding: sums of one dtype are computed in fp32 already.
        z = (z + bias if bias.dtype == z.dtype else z.to(bias.dtype) + bias).to(z.dtype)
    if not activation.gated:
        return z.view(1, z.shape[0], 1, z.shape[1])
    block = layout.block(z.shape[1] // 2)
    return z.view(z.shape[0], -1, 2, block).permute(2, 0, 1, 3)


# Kinds whose loops do not depend on strides; torch has two of gelu.
_STRIDED = ("silu", "relu", "relu2")


def _values(
    stored: Tensor, activation: Activation, layout: Layout, buffers: Buffers
) -> tuple[Tensor, Tensor | None, Buffer]:
    """Return gate and up in the wide dtype, and what gives a buffer of their shape.

    They are ``stored`` itself where that is as good: only "gate" and "up" may be written to.
    """
    direct = activation.kind in _STRIDED and buffers.is_flat(stored[0])
    parts = stored.unbind() if direct else buffers.wide("parts", stored)
    gate, up = parts if len(parts) == 2 else (parts[0], None)
    if up is not None and layout.up_first:
        gate, up = up, gate

    def buffer(name: str) -> Tensor:
        if not direct and name in ("gate", "up"):
            found = gate if name == "gate" else up
            assert found is not None
            return found
        return buffers.like(name, gate)

    return gate, up, buffer


def _row_bias(operands: Operands, span: slice, experts: Tensor | None) -> Tensor | None:
    if operands.bias is None or experts is None:
        return operands.bias
    return operands.bias[experts[span]]


def _row_experts(operands: Operands) -> Tensor | None:
    """Return the expert of each live row where every expert has its own bias."""
    if operands.offsets is None:
        return None
    counts = operands.offsets.long().diff()
    return torch.repeat_interleave(torch.arange(counts.shape[0]), counts)


def _act(gate: Tensor, activation: Activation, out: Tensor) -> Tensor:
    """Return the function of the gate; may write into ``out``, the gate where alpha is 1."""
    aten = torch.ops.aten
    if activation.kind == "silu" and activation.alpha == 1.0:
        return cast("Tensor", aten.silu.out(gate, out=out))
    if activation.kind in ("gelu", "gelu_tanh"):
        approximate = _APPROXIMATE[activation.kind]
        return cast("Tensor", aten.gelu.out(gate, approximate=approximate, out=out))
    if activation.kind == "relu":
        return torch.clamp(gate, min=0.0, out=out)
    if activation.kind == "relu2":
        return torch.clamp(gate, min=0.0, out=out).square_()
    if activation.kind == "silu":
        return torch.mul(gate, activation.alpha, out=out).sigmoid_().mul_(gate)
    return act.ACTIVATIONS[activation.kind].function(gate, activation)


def _act_backward(grad: Tensor, gate: Tensor, activation: Activation, buffer: Buffer) -> Tensor:
    """Return ``grad * d act / d gate`` in the buffer "grad"."""
    aten, out = torch.ops.aten, buffer("grad")
    if activation.kind == "silu":
        # d/dg (g σ(αg)) is the derivative of silu at αg.
        if activation.alpha != 1.0:
            gate = torch.mul(gate, activation.alpha, out=buffer("scaled"))
        return cast("Tensor", aten.silu_backward.grad_input(grad, gate, grad_input=out))
    if activation.kind in ("gelu", "gelu_tanh"):
        approximate = _APPROXIMATE[activation.kind]
        backward = aten.gelu_backward.grad_input
        return cast("Tensor", backward(grad, gate, approximate=approximate, grad_input=out))
    if activation.kind == "relu2":
        slope = torch.clamp(gate, min=0.0, out=buffer("scaled")).mul_(2.0)
    else:
        slope = act.ACTIVATIONS[activation.kind].derivative(gate, activation)
    return torch.mul(grad, slope, out=out)


_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def _inside(grad: Tensor, value: Tensor, low: float, limit: float) -> Tensor:
    """Set ``grad`` to exactly 0 where ``value > limit`` or ``value < low``; NaN values pass."""
    if not math.isfinite(value.sum()):
        # The operator below, many times as fast as masks, takes NaN and -inf for values outside.
        return grad.masked_fill_((value > limit) | (value < low), 0.0)
    # The operator's own bounds are exclusive: the next numbers of the dtype make them inclusive.
    bounds = torch.tensor([low, limit], dtype=value.dtype)
    below, above = torch.nextafter(bounds, bounds.sign() * math.inf).tolist()
    masked = torch.ops.aten.hardtanh_backward.grad_input
    return cast("Tensor", masked(grad, value, below, above, grad_input=grad))


def _cut(value: Tensor, shape: torch.Size) -> Tensor:
    """Return ``value`` in ``shape``, without its padding."""
    size = shape.numel()
    return (value if value.numel() == size else value[:size]).view(shape)


def forward(operands: Operands, activation: Activation, layout: Layout) -> Tensor:
    """Return ``h``; see ``samebits.ops.activation.activate``.

    Determinism: elementwise.
    """
    activation = _with_scalars(activation, operands.scalars)
    z, limit = operands.z, activation.limit
    columns = z.shape[1] // activation.columns
    h = z.new_empty(z.shape[0], columns)
    experts = _row_experts(operands)
    buffers = Buffers(operands, columns)
    for span in blocks(operands, columns):
        stored = _stored(operands, activation, layout, span, experts)
        shape = stored.shape[1:]
        value, up, buffer = _values(stored, activation, layout, buffers)
        if limit is not None and activation.limit_position == "pre":
            value = torch.clamp(value, max=limit, out=buffer("gate"))
        value = _act(value, activation, buffer("gate" if activation.alpha == 1.0 else "act"))
        if limit is not None and activation.limit_position == "post":
            value.clamp_(max=limit)
        block = h[span].view(shape)
        if up is not None:
            up = _linear(up, activation, buffer("up"))
            if operands.row_probs is None and value.dtype == z.dtype:
                # Straight to its place: no rounding is between.
                torch.mul(_cut(value, shape), _cut(up, shape), out=block)
                continue
            value.mul_(up)
        value = _cut(value, shape)
        if operands.row_probs is not None:
            value.mul_(operands.row_probs[span].to(value.dtype).view(-1, 1, 1))
        block.copy_(value)
    return h


def _linear(up: Tensor, activation: Activation, out: Tensor) -> Tensor:
    """Return up after clamp, cap and offset; in ``out``, which may be up, where that differs."""
    limit, cap, offset = activation.limit, activation.up_softcap, activation.linear_offset
    if limit is not None:
        up = torch.clamp(up, -limit, limit, out=out)
    if cap is not None:
        up = torch.div(up, cap, out=out).tanh_().mul_(cap)
    return torch.add(up, offset, out=out) if offset else up


def backward(
    dh: Tensor, operands: Operands, activation: Activation, layout: Layout, wanted: Wanted
) -> Backward:
    """Return the gradients; see ``samebits.ops.activation.activate_backward``.

    Determinism: repeatable; every sum has one order.
    """
    activation = _with_scalars(activation, operands.scalars)
    z, bias = operands.z, operands.bias
    wide = wide_dtype(z.dtype)
    rows, columns = dh.shape
    result = Backward(
        dz=z.new_empty(z.shape),
        dp=z.new_zeros(rows, dtype=wide) if wanted.dp else None,
        h=z.new_empty(rows, columns) if wanted.h else None,
        dbias=bias.new_zeros(bias.shape) if wanted.dbias and bias is not None else None,
    )
    experts = _row_experts(operands)
    buffers = Buffers(operands, columns)
    for span in blocks(operands, columns):
        _backward_block(dh, operands, activation, layout, result, span, experts, buffers)
    if result.dbias is not None:
        sum_bias(result.dz, operands, result.dbias)
    return result


def _backward_block(
    dh: Tensor,
    operands: Operands,
    activation: Activation,
    layout: Layout,
    result: Backward,
    span: slice,
    experts: Tensor | None,
    buffers: Buffers,
) -> None:
    limit, cap = activation.limit, activation.up_softcap
    pre = limit is not None and activation.limit_position == "pre"
    stored = _stored(operands, activation, layout, span, experts)
    gate, up, buffer = _values(stored, activation, layout, buffers)
    shape = dh[span].shape
    if gate.dim() > 1 and dh.dtype == gate.dtype:
        grad = dh[span].view(gate.shape)
    else:
        grad = buffers.wide("grad", dh[span][None])[0].view(gate.shape)

    bounded_gate = torch.clamp(gate, max=limit, out=buffer("bounded")) if pre else gate
    raw = _act(bounded_gate, activation, buffer("act"))
    bounded = raw.clamp(max=limit) if limit is not None and not pre else raw
    linear = None if up is None else _linear(up, activation, buffer("linear"))

    p = operands.row_probs
    p = None if p is None else p[span].to(gate.dtype)[:, None]
    if result.dp is not None or result.h is not None:
        h = torch.mul(bounded, 1.0 if linear is None else linear, out=buffer("dup"))
        _store_others(result, span, _cut(h, shape), _cut(grad, shape), p)
    if p is not None:
        torch.mul(_cut(grad, shape), p, out=_cut(buffer("grad"), shape))
        grad = buffer("grad")
    if linear is None or up is None:
        result.dz[span] = _cut(_act_backward(grad, gate, activation, buffer), shape)
        return

    # In the place of what is not needed any more: fewer buffers stay in the cache.
    dup = torch.mul(grad, bounded, out=buffer("act" if bounded is raw else "dup"))
    if cap is not None:
        dup.mul_(1.0 - torch.tanh(up / cap).square_())
    grad = torch.mul(grad, linear, out=buffer("grad"))
    dgate = _act_backward(grad, bounded_gate, activation, buffer)
    if limit is not None:
        dup = _inside(dup, up, -limit, limit)
        dgate = _inside(dgate, gate if pre else raw, -math.inf, limit)
    _store(result.dz[span], _cut(dgate, shape), _cut(dup, shape), layout)


def _store_others(result: Backward, span: slice, h: Tensor, dh: Tensor, p: Tensor | None) -> None:
    """Store dp and h, where wanted."""
    if result.dp is not None:
        result.dp[span] = sum_columns(h * dh)
    if result.h is not None:
        result.h[span] = h if p is None else h * p


def _store(dz: Tensor, dgate: Tensor, dup: Tensor, layout: Layout) -> None:
    rows, columns = dgate.shape
    block = layout.block(columns)
    pairs = dz.view(rows, -1, 2, block)
    first, second = (dup, dgate) if layout.up_first else (dgate, dup)
    pairs[:, :, 0] = first.view(rows, -1, block)
    pairs[:, :, 1] = second.view(rows, -1, block)
