"""The backward pass on CPU: the stages of ``host`` in reverse order, from the rows of ``z``.

Written out, so that nothing but ``z`` is kept and no options live in a graph.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from samebits import activation as act
from samebits.backends.call import DIFFERENTIABLE, Call, Gradients, accumulate_dtype
from samebits.backends.grouped.host import (
    Chunk,
    Normed,
    Rows,
    expert_input,
    product,
    unrounded,
)
from samebits.problem import DTYPES, Problem, ProbPlacement
from samebits.weights import merge_gate_up, split_gate_up


def backward(
    problem: Problem, call: Call, z: Tensor, dout: Tensor, wanted: tuple[bool, ...]
) -> Gradients:
    """Return the wanted gradients from ``z``; recomputes h, and y before a norm.

    Determinism: repeatable; rows ascend in every sum over rows.
    """
    want = {name for name, asked in zip(DIFFERENTIABLE, wanted, strict=True) if asked}
    on_input = problem.placement == ProbPlacement.FC1_INPUT
    want_probs = "topk_probs" in want
    rows = Rows(problem, call)
    wide, dtype = accumulate_dtype(problem), DTYPES[problem.dtype]
    dout = dout.to(dtype)
    dx = torch.zeros(call.x.shape, dtype=wide)
    dprobs = torch.zeros(call.topk_probs.numel(), dtype=wide)
    dnorm_scale = torch.zeros(problem.H, dtype=wide)
    grads = _parameter_buffers(call, want, rows.bounds)
    for chunk in rows.chunks():
        local = _derivative(problem, z[chunk.span].to(wide))
        second = _second_backward(problem, call, dout.index_select(0, chunk.tokens), local.h, chunk)
        dnorm_scale += second.norm_scale
        if second.p is not None:
            dprobs[rows.slots[chunk.span]] = second.p
        dh = second.h if second.scale is None else second.h * second.scale
        dz = dh * local.gate
        if local.up is not None:
            dz = merge_gate_up(dz, dh * local.up, problem.layout)
        dz = dz.to(dtype)
        x = call.x.index_select(0, chunk.tokens)
        h = local.h if second.scale is None else local.h * second.scale
        _parameter_gradients(
            grads, chunk, second, dz, h.to(dtype), expert_input(problem, x, chunk.p)
        )
        if "x" in want or (want_probs and on_input):
            dx_slot = product(dz, call.gate_up.transpose(1, 2), None, chunk).contiguous().to(wide)
            if on_input:
                dprobs[rows.slots[chunk.span]] = (dx_slot * x).sum(-1)
                dx_slot = dx_slot * chunk.p
            dx.index_add_(0, chunk.tokens, dx_slot)
    if "x" in want:
        grads["x"] = dx.to(dtype)
    if want_probs:
        grads["topk_probs"] = dprobs.view_as(call.topk_probs).to(call.topk_probs.dtype)
    if "norm_scale" in want and call.norm_scale is not None:
        grads["norm_scale"] = dnorm_scale.to(call.norm_scale.dtype)
    return Gradients(**grads)


class _SecondGradients(NamedTuple):
    """Gradients at the second projection of a chunk."""

    # (rows, H) of its output, rounded to D, before ``scale``; and the same unrounded.
    y: Tensor
    exact: Tensor
    # (rows, F) of its input, before ``scale``.
    h: Tensor
    # (rows,) of the probability; None where it is on the input.
    p: Tensor | None
    # (H,), summed over the rows; 0 without a norm.
    norm_scale: Tensor
    # (rows, 1) factor still missing from ``y`` and ``h``; None for 1.
    scale: Tensor | None


def _second_backward(
    problem: Problem, call: Call, dout: Tensor, h: Tensor, chunk: Chunk
) -> _SecondGradients:
    """Return what comes before the activation, from ``dout`` by row and ``h`` without ``p``."""
    p, placement = chunk.p, problem.placement
    scale = None if placement == ProbPlacement.FC1_INPUT else p
    dy, exact, dp = dout, dout.to(p.dtype), None
    dnorm_scale = h.new_zeros(())
    if call.norm_scale is not None:
        fed = (h * p if placement == ProbPlacement.FC2_INPUT else h).to(dout.dtype)
        normed = Normed.of(problem, call.norm_scale, unrounded(problem, call, fed, chunk))
        if placement == ProbPlacement.FC2_OUTPUT:
            # Not linear in h any more, so p cannot wait until after the product.
            dp = (exact * normed.y.to(dout.dtype)).sum(-1)
            exact, scale = exact * p, None
        exact, dnorm_scale = normed.backward(exact)
        dy = exact.to(dout.dtype)
        # Unrounded, as y is before the norm: what is left of it for p is a small difference.
        parts = [exact[rows] @ call.down[e].to(p.dtype) for e, rows in chunk.groups()]
        dh = torch.cat(parts)
    else:
        dh = product(dy, call.down.transpose(1, 2), None, chunk).to(p.dtype)
    if dp is None and scale is not None:
        dp = (dh * h).sum(-1)
        if call.down_bias is not None:
            dp += (exact * call.down_bias[chunk.experts]).sum(-1)
    return _SecondGradients(dy, exact, dh, dp, dnorm_scale, scale)


def _parameter_buffers(call: Call, want: set[str], bounds: list[int]) -> dict[str, Tensor]:
    """Return the wanted gradients of the parameters of experts, 0 where an expert has no rows."""
    grads: dict[str, Tensor] = {
        name: torch.empty_like(tensor)
        for name in ("gate_up", "down", "gate_up_bias", "down_bias")
        if name in want and (tensor := getattr(call, name)) is not None
    }
    for grad in grads.values():
        for expert, (start, stop) in enumerate(pairwise(bounds)):
            if stop == start:
                grad[expert] = 0
    return grads


def _parameter_gradients(
    grads: dict[str, Tensor],
    chunk: Chunk,
    second: _SecondGradients,
    dz: Tensor,
    h: Tensor,
    x: Tensor,
) -> None:
    """Write the gradients of the chunk's experts, from ``h`` and ``x`` as the products had them."""
    wide = second.exact.dtype
    scale = second.exact.new_ones(()) if second.scale is None else second.scale
    exact = second.exact * scale if "down_bias" in grads else second.exact
    for expert, rows in chunk.groups():
        if "down" in grads:
            torch.mm(second.y[rows].T, h[rows], out=grads["down"][expert])
        if "gate_up" in grads:
            torch.mm(dz[rows].T, x[rows], out=grads["gate_up"][expert])
        if "down_bias" in grads:
            grads["down_bias"][expert] = exact[rows].sum(0)
        if "gate_up_bias" in grads:
            grads["gate_up_bias"][expert] = dz[rows].to(wide).sum(0)


def _derivative(problem: Problem, z: Tensor) -> act.Derivative:
    if not problem.activation.gated:
        return act.derivative(problem.activation, z, None)
    return act.derivative(problem.activation, *split_gate_up(z, problem.layout))
