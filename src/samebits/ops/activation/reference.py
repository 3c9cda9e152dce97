"""The activation in torch only: the CPU operator, vectorised over blocks of rows.

The formulas are ``samebits.activation.apply`` and ``derivative``. A block fits into the cache, so
that the many elementwise steps cost little memory traffic, and lives in a flat buffer whose length
is a multiple of the vector width, because torch's scalar tail loop gives other bits than its
vector loop: so the bits of a row do not depend on its position.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from samebits import activation as act
from samebits.activation import Activation
from samebits.ops.activation.contract import Backward, Operands, Wanted, wide_dtype
from samebits.weights import Layout, split_gate_up

# Elements of h per block and thread; torch splits longer loops over threads at this size.
BLOCK = 32768
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


def _wide(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a flat copy in ``dtype``, padded with zeros to a multiple of the vector width."""
    size = part.numel()
    # Multiples of vector width × threads, so that no thread's share ends in a scalar tail.
    unit = _VECTOR * torch.get_num_threads()
    flat = torch.empty(-(-size // unit) * unit, dtype=dtype)
    flat[size:] = 0
    flat[:size].view(part.shape).copy_(part)
    return flat


def _load(
    operands: Operands, activation: Activation, layout: Layout, span: slice, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return flat wide gate and up of ``z' = D(z + bias)``."""
    z = operands.z[span]
    dtype = wide_dtype(z.dtype)
    if bias is not None:
        z = (z.to(dtype) + bias.to(dtype)).to(z.dtype)
    if not activation.gated:
        return _wide(z, dtype), None
    gate, up = split_gate_up(z, layout)
    return _wide(gate, dtype), _wide(up, dtype)


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


def forward(operands: Operands, activation: Activation, layout: Layout) -> Tensor:
    """Return ``h``; see ``samebits.ops.activation.activate``.

    Determinism: elementwise.
    """
    activation = _with_scalars(activation, operands.scalars)
    z = operands.z
    columns = z.shape[1] // activation.columns
    h = z.new_empty(z.shape[0], columns)
    experts = _row_experts(operands)
    for span in _blocks(operands, columns):
        bias = _row_bias(operands, span, experts)
        gate, up = _load(operands, activation, layout, span, bias)
        block = h[span]
        value = act.apply(activation, gate, up)[: block.numel()].view(block.shape)
        if operands.row_probs is not None:
            value *= operands.row_probs[span].to(value.dtype)[:, None]
        block.copy_(value)
    return h


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
    bias = _row_bias(operands, span, experts)
    gate, up = _load(operands, activation, layout, span, bias)
    local = act.derivative(activation, gate, up)
    shape = dh[span].shape
    size = shape.numel()
    scaled = dh[span].to(gate.dtype)
    h = local.h[:size].view(shape)
    if result.dp is not None:
        result.dp[span] = _sum_columns(scaled * h)
    if operands.row_probs is not None:
        p = operands.row_probs[span].to(gate.dtype)[:, None]
        scaled = scaled * p
        if result.h is not None:
            h = h * p
    if result.h is not None:
        result.h[span] = h
    bounded = activation.limit is not None
    dgate = _masked(scaled, local.gate[:size].view(shape), bounded)
    if local.up is None:
        result.dz[span] = dgate
        return
    dup = _masked(scaled, local.up[:size].view(shape), bounded)
    block = layout.block(shape[1])
    pairs = result.dz[span].unflatten(1, (-1, 2, block))
    first, second = (dup, dgate) if layout.up_first else (dgate, dup)
    pairs[:, :, 0] = first.unflatten(1, (-1, block))
    pairs[:, :, 1] = second.unflatten(1, (-1, block))


def _masked(scaled: Tensor, slope: Tensor, bounded: bool) -> Tensor:
    """Return the product; exactly 0 outside a clamp, whatever ``scaled`` holds."""
    product = scaled * slope
    return torch.where(slope == 0, 0.0, product) if bounded else product


def _sum_columns(product: Tensor) -> Tensor:
    """Add the columns of each row: sums of 64, then these in ascending order."""
    rows, columns = product.shape
    missing = -columns % _PARTIAL
    padded = torch.nn.functional.pad(product, (0, missing)) if missing else product
    partials = padded.view(rows, -1, _PARTIAL).sum(-1)
    # The last running sum is the sum from left to right.
    return partials.cumsum(-1)[:, -1]


def _sum_bias(dz: Tensor, operands: Operands, dbias: Tensor) -> None:
    wide, live = wide_dtype(dz.dtype), _live_rows(operands)
    if operands.offsets is None:
        dbias.copy_(dz[:live].sum(0, dtype=wide))
        return
    bounds = [min(bound, live) for bound in operands.offsets.tolist()]
    for expert, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        dbias[expert] = dz[first:end].sum(0, dtype=wide)
