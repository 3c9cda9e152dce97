"""The activation in torch only: the CPU operator, vectorised over blocks of rows.

The mathematics is that of ``samebits.activation.apply`` and ``derivative``, spelled in the few
torch operators that are vectorised on a CPU (``where``, boolean masks and operands of two dtypes
are not), block by block (``blocks.py``).
"""

import math
from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

from samebits import activation as act
from samebits.activation import Activation
from samebits.ops.activation.blocks import BLOCK, Block, Buffers, parts_of, walk
from samebits.ops.activation.operands import Backward, Operands, Wanted, wide_dtype
from samebits.ops.activation.sums import sum_bias, sum_columns
from samebits.weights import Layout


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


def _act_backward(
    grad: Tensor, gate: Tensor, activation: Activation, buffers: Buffers, out: Tensor
) -> Tensor:
    """Return ``grad * d act / d gate`` in ``out``, which may be ``grad``."""
    aten = torch.ops.aten
    if activation.kind == "silu":
        # d/dg (g σ(αg)) is the derivative of silu at αg.
        if activation.alpha != 1.0:
            gate = torch.mul(gate, activation.alpha, out=buffers.like("scaled", gate))
        return cast("Tensor", aten.silu_backward.grad_input(grad, gate, grad_input=out))
    if activation.kind in ("gelu", "gelu_tanh"):
        approximate = _APPROXIMATE[activation.kind]
        backward = aten.gelu_backward.grad_input
        return cast("Tensor", backward(grad, gate, approximate=approximate, grad_input=out))
    if activation.kind == "relu2":
        slope = torch.clamp(gate, min=0.0, out=buffers.like("scaled", gate)).mul_(2.0)
    else:
        slope = act.ACTIVATIONS[activation.kind].derivative(gate, activation)
    return torch.mul(grad, slope, out=out)


_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


@lru_cache(maxsize=1024)
def _exclusive(low: float, high: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the numbers next to inclusive bounds, outside of them."""
    bounds = torch.tensor([low, high], dtype=dtype)
    below, above = torch.nextafter(bounds, bounds.sign() * math.inf).tolist()
    return below, above


def _inside(grad: Tensor, value: Tensor, low: float, limit: float) -> Tensor:
    """Set ``grad`` to exactly 0 where ``value > limit`` or ``value < low``; NaN values pass."""
    if not math.isfinite(value.sum()):
        # The operator below, many times as fast as masks, takes NaN and -inf for values outside.
        return grad.masked_fill_((value > limit) | (value < low), 0.0)
    # The operator's own bounds are exclusive.
    below, above = _exclusive(low, limit, value.dtype)
    masked = torch.ops.aten.hardtanh_backward.grad_input
    return cast("Tensor", masked(grad, value, below, above, grad_input=grad))


def _cut(value: Tensor, shape: torch.Size) -> Tensor:
    """Return ``value`` in ``shape``, without its padding."""
    if value.dim() > 1:
        return value
    size = shape.numel()
    return (value if value.numel() == size else value[:size]).view(shape)


def forward(operands: Operands, activation: Activation, layout: Layout) -> Tensor:
    """Return ``h``; see ``samebits.ops.activation.activate``.

    Determinism: elementwise.
    """
    activation = _with_scalars(activation, operands.scalars)
    z, limit = operands.z, activation.limit
    columns = z.shape[1] // activation.columns
    block = layout.block(columns)
    h = z.new_empty(z.shape[0], columns)
    outs = h.view(z.shape[0], columns // block, block)
    buffers, probs = Buffers(wide_dtype(z.dtype)), _row_probs(operands)
    for span, shape, gate, up, lent in walk(operands, activation, layout, buffers, BLOCK):
        out, value = outs[span], gate
        if limit is not None and activation.limit_position == "pre":
            place = buffers.like("bounded", gate) if lent else gate
            value = torch.clamp(gate, max=limit, out=place)
        # In the place of the result or of the gate, unless that is needed again.
        place = out if lent else gate if activation.alpha == 1.0 else buffers.like("act", gate)
        value = _act(value, activation, place)
        if limit is not None and activation.limit_position == "post":
            value.clamp_(max=limit)
        if up is not None:
            linear = _linear(up, activation, buffers, own=not lent)
            if probs is None and value.dtype == z.dtype:
                # Straight to its place: no rounding is between.
                torch.mul(_cut(value, shape), _cut(linear, shape), out=out)
                continue
            value.mul_(linear)
        value = _cut(value, shape)
        if probs is not None:
            value.mul_(probs[span])
        if not lent:
            out.copy_(value)
    return h


def _row_probs(operands: Operands) -> Tensor | None:
    """Return the factor of each row in the wide dtype, ``(R, 1, 1)``."""
    probs = operands.row_probs
    return None if probs is None else probs.to(wide_dtype(operands.z.dtype)).view(-1, 1, 1)


def _linear(up: Tensor, activation: Activation, buffers: Buffers, *, own: bool) -> Tensor:
    """Return up after clamp, cap and offset, where these are; in its ``own`` place or a buffer."""
    limit, cap, offset = activation.limit, activation.up_softcap, activation.linear_offset
    if limit is None and cap is None and not offset:
        return up
    out = up if own else buffers.like("linear", up)
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
    buffers, probs = Buffers(wide), _row_probs(operands)
    # It needs twice as many buffers as the forward.
    for block in walk(operands, activation, layout, buffers, BLOCK // 2):
        dz = result.dz[block.span]
        dgate, dup = parts_of(dz, activation, layout)
        grad = dh[block.span].view(block.shape)
        p = None if probs is None else probs[block.span]
        _backward_block(_Gradients(grad, p, dgate, dup), block, activation, result, buffers)
    if result.dbias is not None:
        sum_bias(result.dz, operands, result.dbias)
    return result


class _Gradients(NamedTuple):
    """The gradient and the probabilities of a block, and the places of its gradients."""

    dh: Tensor
    p: Tensor | None
    dgate: Tensor
    dup: Tensor | None


def _backward_block(
    grads: _Gradients, block: Block, activation: Activation, result: Backward, buffers: Buffers
) -> None:
    limit, cap = activation.limit, activation.up_softcap
    pre = limit is not None and activation.limit_position == "pre"
    span, shape, gate, up, lent = block
    grad = grads.dh
    if gate.dim() == 1 or grad.dtype != gate.dtype or grad.stride(-1) != 1:
        grad = buffers.copy("grad", grad)
        grad = grad if gate.dim() == 1 else _cut(grad, shape)

    bounded_gate = torch.clamp(gate, max=limit, out=buffers.like("bounded", gate)) if pre else gate
    raw = _act(bounded_gate, activation, buffers.like("act", gate))
    bounded = raw.clamp(max=limit) if limit is not None and not pre else raw
    linear = None if up is None else _linear(up, activation, buffers, own=False)

    if result.dp is not None or result.h is not None:
        h = torch.mul(bounded, 1.0 if linear is None else linear, out=buffers.like("dup", gate))
        _store_others(result, span, _cut(h, shape), _cut(grad, shape), grads.p)
    scratch = buffers.like("grad", gate)
    if grads.p is not None:
        torch.mul(_cut(grad, shape), grads.p, out=_cut(scratch, shape))
        grad = scratch
    # In the places of the results, or where nothing is needed any more: fewer buffers stay in the
    # cache.
    dgate = grads.dgate if lent else scratch
    if linear is None or up is None or grads.dup is None:
        dgate = _act_backward(grad, gate, activation, buffers, dgate)
    else:
        place = grads.dup if lent else bounded if bounded is raw else buffers.like("dup", gate)
        dup = torch.mul(grad, bounded, out=place)
        if cap is not None:
            dup.mul_(1.0 - torch.tanh(up / cap).square_())
        grad = torch.mul(grad, linear, out=scratch)
        dgate = _act_backward(grad, bounded_gate, activation, buffers, dgate)
        if limit is not None:
            dup = _inside(dup, up, -limit, limit)
            dgate = _inside(dgate, gate if pre else raw, -math.inf, limit)
        if not lent:
            grads.dup.copy_(_cut(dup, shape))
    if not lent:
        grads.dgate.copy_(_cut(dgate, shape))


def _store_others(result: Backward, span: slice, h: Tensor, dh: Tensor, p: Tensor | None) -> None:
    """Store dp and h, where wanted."""
    if result.dp is not None:
        result.dp[span] = sum_columns((h * dh).reshape(h.shape[0], -1))
    if result.h is not None:
        result.h[span].view(h.shape).copy_(h if p is None else h * p)
