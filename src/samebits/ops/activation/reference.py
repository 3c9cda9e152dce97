"""The activation in torch only: the CPU operator, vectorised over blocks of rows.

The mathematics is that of ``samebits.activation.apply`` and ``derivative``, spelled in the few
torch operators that are vectorised on a CPU (``where``, boolean masks and operands of two dtypes
are not), block by block (``blocks.py``).
"""

import math
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from samebits import activation as act
from samebits.activation import Activation
from samebits.ops.activation.blocks import Buffers, blocks, live_rows
from samebits.ops.activation.operands import Backward, Operands, Wanted, wide_dtype
from samebits.weights import Layout

# Columns of a sum of dp.
_PARTIAL = 64


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


def _parts(
    operands: Operands, activation: Activation, layout: Layout, span: slice, experts: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return gate and up of ``z' = D(z + bias)``, blocks of columns apart where they alternate."""
    z = operands.z[span]
    bias = _row_bias(operands, span, experts)
    if bias is not None:
        wide = wide_dtype(z.dtype)
        z = (z.to(wide) + bias.to(wide)).to(z.dtype)
    if not activation.gated:
        return z, None
    block = layout.block(z.shape[1] // 2)
    first, second = z.view(z.shape[0], -1, 2, block).unbind(2)
    return (second, first) if layout.up_first else (first, second)


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
    """Return the scalar function of the gate; may write into ``out``."""
    aten = torch.ops.aten
    if activation.kind == "silu":
        if activation.alpha == 1.0:
            return cast("Tensor", aten.silu.out(gate, out=out))
        return torch.mul(gate, activation.alpha, out=out).sigmoid_().mul_(gate)
    if activation.kind in ("gelu", "gelu_tanh"):
        approximate = _APPROXIMATE[activation.kind]
        return cast("Tensor", aten.gelu.out(gate, approximate=approximate, out=out))
    if activation.kind == "relu":
        return torch.clamp(gate, min=0.0, out=out)
    if activation.kind == "relu2":
        return torch.clamp(gate, min=0.0, out=out).square_()
    return act.ACTIVATIONS[activation.kind].function(gate, activation)


def _act_backward(grad: Tensor, gate: Tensor, activation: Activation) -> Tensor:
    """Return ``grad * d act / d gate``; may write into ``grad``."""
    aten = torch.ops.aten
    if activation.kind == "silu":
        # d/dg (g σ(αg)) is the derivative of silu at αg.
        scaled = gate if activation.alpha == 1.0 else gate * activation.alpha
        return cast("Tensor", aten.silu_backward.grad_input(grad, scaled, grad_input=grad))
    if activation.kind in ("gelu", "gelu_tanh"):
        approximate = _APPROXIMATE[activation.kind]
        return cast("Tensor", aten.gelu_backward(grad, gate, approximate=approximate))
    return grad.mul_(act.ACTIVATIONS[activation.kind].derivative(gate, activation))


_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def _inside(grad: Tensor, value: Tensor, low: float, limit: float) -> Tensor:
    """Set ``grad`` to exactly 0 where ``value > limit`` or ``value < low``; NaN values pass."""
    # The operator's own bounds are exclusive: the next numbers of the dtype make them inclusive.
    bounds = torch.tensor([low, limit], dtype=value.dtype)
    below, above = torch.nextafter(bounds, bounds.sign() * math.inf).tolist()
    masked = torch.ops.aten.hardtanh_backward.grad_input
    return cast("Tensor", masked(grad, value, below, above, grad_input=grad))


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
    wide = wide_dtype(z.dtype)
    for span in blocks(operands, columns):
        gate_part, up_part = _parts(operands, activation, layout, span, experts)
        shape, size = gate_part.shape, gate_part.numel()
        value = buffers.wide("gate", gate_part)
        if limit is not None and activation.limit_position == "pre":
            value.clamp_(max=limit)
        value = _act(value, activation, buffers.of("act", value))
        if limit is not None and activation.limit_position == "post":
            value.clamp_(max=limit)
        block = h[span].view(shape)
        # The last product goes straight to its place where no rounding is between.
        direct = operands.row_probs is None and wide == z.dtype
        if up_part is not None:
            up = _linear(buffers.wide("up", up_part), activation)
            if direct:
                torch.mul(value[:size].view(shape), up[:size].view(shape), out=block)
                continue
            value.mul_(up)
        value = value[:size].view(shape)
        if operands.row_probs is not None:
            p = operands.row_probs[span].to(wide)
            value.mul_(p.view(-1, *[1] * (len(shape) - 1)))
        block.copy_(value)
    return h


def _changes_up(activation: Activation) -> bool:
    return bool(activation.limit or activation.up_softcap or activation.linear_offset)


def _linear(up: Tensor, activation: Activation) -> Tensor:
    """Return up after clamp, cap and offset; may write into ``up``."""
    if activation.limit is not None:
        up.clamp_(-activation.limit, activation.limit)
    if activation.up_softcap is not None:
        up.div_(activation.up_softcap).tanh_().mul_(activation.up_softcap)
    return up.add_(activation.linear_offset) if activation.linear_offset else up


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
        _sum_bias(result.dz, operands, result.dbias)
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
    gate_part, up_part = _parts(operands, activation, layout, span, experts)
    gate, grad = buffers.wide("gate", gate_part), buffers.wide("grad", dh[span])
    up = None if up_part is None else buffers.wide("up", up_part)
    rows, columns = dh[span].shape

    bounded_gate = gate
    if pre:
        bounded_gate = torch.clamp(gate, max=limit, out=buffers.of("bounded", gate))
    raw = _act(bounded_gate, activation, buffers.of("act", gate))
    bounded = raw.clamp(max=limit) if limit is not None and not pre else raw
    linear = up
    if up is not None and _changes_up(activation):
        linear = _linear(buffers.of("linear", up).copy_(up), activation)

    def cut(flat: Tensor) -> Tensor:
        return flat[: rows * columns].view(rows, columns)

    p = operands.row_probs
    p = None if p is None else p[span].to(grad.dtype)[:, None]
    if result.dp is not None or result.h is not None:
        h = torch.mul(bounded, 1.0 if linear is None else linear, out=buffers.of("dup", grad))
        _store_others(result, span, cut(h), cut(grad), p)
    if p is not None:
        cut(grad).mul_(p)
    if linear is None or up is None:
        result.dz[span] = cut(_act_backward(grad, gate, activation))
        return

    dup = torch.mul(grad, bounded, out=buffers.of("dup", grad))
    if cap is not None:
        dup.mul_(1.0 - torch.tanh(up / cap).square_())
    dgate = _act_backward(grad.mul_(linear), bounded_gate, activation)
    if limit is not None:
        dup = _inside(dup, up, -limit, limit)
        dgate = _inside(dgate, gate if pre else raw, -math.inf, limit)
    _store(result.dz[span], cut(dgate), cut(dup), layout)


def _store_others(result: Backward, span: slice, h: Tensor, dh: Tensor, p: Tensor | None) -> None:
    """Store dp and h, where wanted."""
    if result.dp is not None:
        result.dp[span] = _sum_columns(h * dh)
    if result.h is not None:
        result.h[span] = h if p is None else h * p


def _store(dz: Tensor, dgate: Tensor, dup: Tensor, layout: Layout) -> None:
    rows, columns = dgate.shape
    block = layout.block(columns)
    pairs = dz.view(rows, -1, 2, block)
    first, second = (dup, dgate) if layout.up_first else (dgate, dup)
    pairs[:, :, 0] = first.view(rows, -1, block)
    pairs[:, :, 1] = second.view(rows, -1, block)


def _sum_columns(product: Tensor) -> Tensor:
    """Add the columns of each row: sums of 64, then these in ascending order."""
    rows, columns = product.shape
    missing = -columns % _PARTIAL
    padded = functional.pad(product, (0, missing)) if missing else product
    partials = padded.view(rows, -1, _PARTIAL).sum(-1)
    # The last running sum is the sum from left to right.
    return partials.cumsum(-1)[:, -1]


def _sum_bias(dz: Tensor, operands: Operands, dbias: Tensor) -> None:
    wide, live = wide_dtype(dz.dtype), live_rows(operands)
    if operands.offsets is None:
        dbias.copy_(dz[:live].sum(0, dtype=wide))
        return
    bounds = [min(bound, live) for bound in operands.offsets.tolist()]
    for expert, (first, end) in enumerate(pairwise(bounds)):
        dbias[expert] = dz[first:end].sum(0, dtype=wide)
