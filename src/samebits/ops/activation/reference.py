"""The activation in torch only: the CPU operator, vectorised over blocks of rows.

The mathematics is that of ``samebits.activation.apply`` and ``derivative``, spelled in the few
torch operators that are vectorised on a CPU (``where`` and boolean masks are not). A block fits
into the cache, so that the elementwise steps cost little memory traffic, and lives in flat buffers
whose length is a multiple of the vector width, because torch's scalar tail loop gives other bits
than its vector loop: so the bits of a row do not depend on its position.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from samebits import activation as act
from samebits.activation import Activation
from samebits.ops.activation.operands import Backward, Operands, Wanted, wide_dtype
from samebits.weights import Layout

# Elements of h per block and thread: large enough to hide the cost of a call, small enough for L2.
BLOCK = 131072
# torch gives a thread at least this many elements of a loop.
_GRAIN = 32768
# More elements than two vectors of any instruction set.
_VECTOR = 64
_PARTIAL = 64


def _live_rows(operands: Operands) -> int:
    live = operands.z.shape[0]
    if operands.num_rows is not None:
        live = min(live, int(operands.num_rows))
    if operands.offsets is not None:
        live = min(live, int(operands.offsets[-1]))
    return max(live, 0)


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


def _blocks(operands: Operands, columns: int) -> Iterator[slice]:
    """Cut the live rows into blocks of rows."""
    live = _live_rows(operands)
    step = max(1, BLOCK * torch.get_num_threads() // max(columns, 1))
    for first in range(0, live, step):
        yield slice(first, min(first + step, live))


def _padded(size: int) -> int:
    """Return a length that torch cuts into whole vectors, however many threads share it."""
    threads = torch.get_num_threads()
    unit = _GRAIN
    if size <= _GRAIN or size >= _GRAIN * threads:
        unit = _VECTOR if size <= _GRAIN else _VECTOR * threads
    return -(-size // unit) * unit


def _wide(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a flat copy in ``dtype``, padded with zeros to whole vectors."""
    size = part.numel()
    flat = torch.empty(_padded(size), dtype=dtype)
    flat[size:] = 0
    flat[:size].view(part.shape).copy_(part)
    return flat


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


def _act(gate: Tensor, activation: Activation) -> Tensor:
    """Return the scalar function of the gate; may write into ``gate``."""
    if activation.kind == "silu":
        if activation.alpha == 1.0:
            return functional.silu(gate, inplace=True)
        return gate.mul_(torch.mul(gate, activation.alpha).sigmoid_())
    if activation.kind in ("gelu", "gelu_tanh"):
        return functional.gelu(gate, approximate=_APPROXIMATE[activation.kind])
    if activation.kind == "relu":
        return gate.clamp_(min=0.0)
    if activation.kind == "relu2":
        return gate.clamp_(min=0.0).square_()
    return act.ACTIVATIONS[activation.kind].function(gate, activation)


def _act_backward(grad: Tensor, gate: Tensor, activation: Activation) -> Tensor:
    """Return ``grad * d act / d gate``; may write into ``grad``."""
    aten = torch.ops.aten
    if activation.kind == "silu":
        # d/dg (g σ(αg)) is the derivative of silu at αg.
        scaled = gate if activation.alpha == 1.0 else gate * activation.alpha
        return cast("Tensor", aten.silu_backward(grad, scaled))
    if activation.kind in ("gelu", "gelu_tanh"):
        approximate = _APPROXIMATE[activation.kind]
        return cast("Tensor", aten.gelu_backward(grad, gate, approximate=approximate))
    return grad.mul_(act.ACTIVATIONS[activation.kind].derivative(gate, activation))


_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def _inside(grad: Tensor, value: Tensor, low: float, limit: float) -> Tensor:
    """Return ``grad``, exactly 0 where ``value > limit`` or ``value < low``; NaN values pass."""
    # The operator's own bounds are exclusive: the next numbers of the dtype make them inclusive.
    bounds = torch.tensor([low, limit], dtype=value.dtype)
    below, above = torch.nextafter(bounds, bounds.sign() * math.inf).tolist()
    return cast("Tensor", torch.ops.aten.hardtanh_backward(grad, value, below, above))


def forward(operands: Operands, activation: Activation, layout: Layout) -> Tensor:
    """Return ``h``; see ``samebits.ops.activation.activate``.

    Determinism: elementwise.
    """
    activation = _with_scalars(activation, operands.scalars)
    z, limit = operands.z, activation.limit
    columns = z.shape[1] // activation.columns
    h = z.new_empty(z.shape[0], columns)
    experts = _row_experts(operands)
    wide = wide_dtype(z.dtype)
    for span in _blocks(operands, columns):
        gate_part, up = _parts(operands, activation, layout, span, experts)
        gate = _wide(gate_part, wide)
        if limit is not None and activation.limit_position == "pre":
            gate.clamp_(max=limit)
        value = _act(gate, activation)
        if limit is not None and activation.limit_position == "post":
            value.clamp_(max=limit)
        value = value[: gate_part.numel()].view(gate_part.shape)
        block = h[span].view(value.shape)
        # The last product goes straight to its place where no rounding is between.
        direct = block if operands.row_probs is None and wide == z.dtype else value
        if up is not None:
            if _changes_up(activation):
                up = _linear(_wide(up, wide), activation)[: value.numel()].view(value.shape)
            value = torch.mul(value, up, out=direct)
        if operands.row_probs is not None:
            p = operands.row_probs[span].to(wide)
            value = value.mul_(p.view(-1, *[1] * (value.dim() - 1)))
        if value is not block:
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
    for span in _blocks(operands, columns):
        _backward_block(dh, operands, activation, layout, result, span, experts)
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
) -> None:
    limit, cap = activation.limit, activation.up_softcap
    pre = limit is not None and activation.limit_position == "pre"
    wide = wide_dtype(operands.z.dtype)
    gate_part, up_part = _parts(operands, activation, layout, span, experts)
    gate, grad = _wide(gate_part, wide), _wide(dh[span], wide)
    up = None if up_part is None else _wide(up_part, wide)
    rows, columns = dh[span].shape

    bounded_gate = gate.clamp(max=limit) if pre else gate
    raw = _act(bounded_gate.clone(), activation)
    bounded = raw.clamp(max=limit) if limit is not None and not pre else raw
    linear = None if up is None else _linear(up.clone(), activation)

    def cut(flat: Tensor) -> Tensor:
        return flat[: rows * columns].view(rows, columns)

    if result.dp is not None or result.h is not None:
        h = cut(bounded if linear is None else bounded * linear)
        if result.dp is not None:
            result.dp[span] = _sum_columns(h * cut(grad))
        if result.h is not None:
            p = operands.row_probs
            result.h[span] = h if p is None else h * p[span].to(h.dtype)[:, None]
    if operands.row_probs is not None:
        cut(grad).mul_(operands.row_probs[span].to(grad.dtype)[:, None])
    if linear is None or up is None:
        result.dz[span] = cut(_act_backward(grad, gate, activation))
        return

    dup = grad * bounded
    if cap is not None:
        dup.mul_(1.0 - torch.tanh(up / cap).square_())
    dgate = _act_backward(grad.mul_(linear), bounded_gate, activation)
    if limit is not None:
        dup = _inside(dup, up, -limit, limit)
        dgate = _inside(dgate, gate if pre else raw, -math.inf, limit)
    block = layout.block(columns)
    pairs = result.dz[span].view(result.dz[span].shape[0], -1, 2, block)
    first, second = (dup, dgate) if layout.up_first else (dgate, dup)
    pairs[:, :, 0] = cut(first).view(rows, -1, block)
    pairs[:, :, 1] = cut(second).view(rows, -1, block)


def _sum_columns(product: Tensor) -> Tensor:
    """Add the columns of each row: sums of 64, then these in ascending order."""
    rows, columns = product.shape
    missing = -columns % _PARTIAL
    padded = functional.pad(product, (0, missing)) if missing else product
    partials = padded.view(rows, -1, _PARTIAL).sum(-1)
    # The last running sum is the sum from left to right.
    return partials.cumsum(-1)[:, -1]


def _sum_bias(dz: Tensor, operands: Operands, dbias: Tensor) -> None:
    wide, live = wide_dtype(dz.dtype), _live_rows(operands)
    if operands.offsets is None:
        dbias.copy_(dz[:live].sum(0, dtype=wide))
        return
    bounds = [min(bound, live) for bound in operands.offsets.tolist()]
    for expert, (first, end) in enumerate(pairwise(bounds)):
        dbias[expert] = dz[first:end].sum(0, dtype=wide)
