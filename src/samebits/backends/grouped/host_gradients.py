"""The backward pass on CPU: the stages of ``host`` in reverse order, from the rows of ``z``.

Written out, so that nothing but ``z`` is kept and no options live in a graph.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from samebits import activation as act
from samebits.backends.call import DIFFERENTIABLE, PARAMETERS, Call, Gradients, accumulate_dtype
from samebits.backends.grouped.host import (
    Chunk,
    Normed,
    Rows,
    dense,
    expert_input,
    product,
    unrounded,
)
from samebits.problem import DTYPES, Problem, ProbPlacement
from samebits.weight_gradients import Buffer
from samebits.weights import merge_gate_up, split_gate_up


def backward(
    problem: Problem,
    call: Call,
    z: Tensor,
    dout: Tensor,
    wanted: tuple[bool, ...],
    into: Mapping[str, Buffer],
) -> Gradients:
    """Return the wanted gradients from ``z``; recomputes h, and y before a norm.

    Determinism: repeatable; rows ascend in every sum over rows.
    """
    want = {name for name, asked in zip(DIFFERENTIABLE, wanted, strict=True) if asked}
    on_input = problem.placement == ProbPlacement.FC1_INPUT
    want_probs = "topk_probs" in want
    want_dx = "x" in want or (want_probs and on_input)
    want_dz = want_dx or bool(want & {"gate_up", "gate_up_bias"})
    rows = Rows(problem, call)
    wide, dtype = accumulate_dtype(problem), DTYPES[problem.dtype]
    dout = dout.to(dtype)
    dx = torch.zeros(call.x.shape, dtype=wide)
    dprobs = torch.zeros(call.topk_probs.numel(), dtype=wide)
    dnorm_scale = torch.zeros(problem.H, dtype=wide)
    parameters = _ParameterGradients(call, want, rows.bounds, into)
    for chunk in rows.chunks():
        local = _derivative(problem, z[chunk.span].to(wide))
        # Gradients of parameters are by the numbers of the call, products by those of the part.
        part, renumbered = dense(problem, call, chunk)
        second = _second_backward(
            problem,
            part,
            dout.index_select(0, chunk.tokens),
            local.h,
            renumbered,
            want_dh=want_dz or (want_probs and not on_input),
            want_probs=want_probs,
        )
        dnorm_scale += second.norm_scale
        if second.p is not None:
            dprobs[rows.slots[chunk.span]] = second.p
        parameters.of_second(chunk, second, local.h)
        if not want_dz:
            continue
        assert second.h is not None
        dh = second.h if second.scale is None else second.h * second.scale
        dz = dh * local.gate
        if local.up is not None:
            dz = merge_gate_up(dz, dh * local.up, problem.layout)
        dz = dz.to(dtype)
        x = call.x.index_select(0, chunk.tokens)
        parameters.of_first(chunk, dz, expert_input(problem, x, chunk.p))
        if want_dx:
            dx_slot = product(dz, part.gate_up.transpose(1, 2), None, renumbered)
            dx_slot = dx_slot.contiguous().to(wide)
            if on_input:
                dprobs[rows.slots[chunk.span]] = (dx_slot * x).sum(-1)
                dx_slot = dx_slot * chunk.p
            dx.index_add_(0, chunk.tokens, dx_slot)
    grads = parameters.finished(dnorm_scale)
    if "x" in want:
        grads["x"] = dx.to(dtype)
    if want_probs:
        grads["topk_probs"] = dprobs.view_as(call.topk_probs).to(call.topk_probs.dtype)
    return Gradients(**grads)


class _SecondGradients(NamedTuple):
    """Gradients at the second projection of a chunk."""

    # (rows, H) of its output, rounded to D, before ``scale``; and the same unrounded.
    y: Tensor
    exact: Tensor
    # (rows, F) of its input, before ``scale``; None where nothing needs it.
    h: Tensor | None
    # (rows,) of the probability; None where it is on the input, or not wanted.
    p: Tensor | None
    # (H,), summed over the rows; 0 without a norm.
    norm_scale: Tensor
    # (rows, 1) factor still missing from ``y`` and ``h``; None for 1.
    scale: Tensor | None


def _second_backward(
    problem: Problem,
    call: Call,
    dout: Tensor,
    h: Tensor,
    chunk: Chunk,
    *,
    want_dh: bool,
    want_probs: bool,
) -> _SecondGradients:
    """Return what comes before the activation, from ``dout`` by row and ``h`` without ``p``."""
    p, placement = chunk.p, problem.placement
    scale = None if placement == ProbPlacement.FC1_INPUT else p
    dy, exact, dh, dp = dout, dout.to(p.dtype), None, None
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
        if want_dh:
            # Unrounded, as y is before the norm: what is left of it for p is a small difference.
            parts = [exact[rows] @ call.down[e].to(p.dtype) for e, rows in chunk.groups()]
            dh = torch.cat(parts)
    elif want_dh:
        dh = product(dy, call.down.transpose(1, 2), None, chunk).to(p.dtype)
    if want_probs and dp is None and scale is not None:
        assert dh is not None
        dp = (dh * h).sum(-1)
        if call.down_bias is not None:
            dp += (exact * call.down_bias[chunk.experts]).sum(-1)
    return _SecondGradients(dy, exact, dh, dp if want_probs else None, dnorm_scale, scale)


class _ParameterGradients:
    """The wanted gradients of parameters, written as chunks come by: 0 for an expert without."""

    def __init__(
        self, call: Call, want: set[str], bounds: list[int], into: Mapping[str, Buffer]
    ) -> None:
        self._dtype = call.x.dtype
        self._grads: dict[str, Tensor] = {
            name: torch.empty_like(tensor)
            for name in PARAMETERS
            if name in want and name not in into and (tensor := getattr(call, name)) is not None
        }
        self._buffers = {name: Buffer(grad, False) for name, grad in self._grads.items()}
        self._buffers |= into
        for name, buffer in self._buffers.items():
            for expert, (start, stop) in enumerate(pairwise(bounds)):
                if stop == start and not buffer.accumulate and name != "norm_scale":
                    buffer.tensor[expert] = 0

    def finished(self, dnorm_scale: Tensor) -> dict[str, Tensor]:
        """Return the gradients for which there was no buffer."""
        if "norm_scale" in self._buffers:
            self._buffers["norm_scale"].store(dnorm_scale)
        return self._grads

    def of_second(self, chunk: Chunk, second: _SecondGradients, h: Tensor) -> None:
        """Write those of the second projection, from ``h`` without ``p``."""
        exact = second.exact
        if second.scale is not None:
            exact, h = exact * second.scale, h * second.scale
        if "down" in self._buffers:
            self._products("down", chunk, second.y, h.to(self._dtype))
        if "down_bias" in self._buffers:
            self._sums("down_bias", chunk, exact)

    def of_first(self, chunk: Chunk, dz: Tensor, x: Tensor) -> None:
        """Write those of the first projection, from the rows that it multiplied."""
        if "gate_up" in self._buffers:
            self._products("gate_up", chunk, dz, x)
        if "gate_up_bias" in self._buffers:
            self._sums("gate_up_bias", chunk, dz)

    def _products(self, name: str, chunk: Chunk, left: Tensor, right: Tensor) -> None:
        buffer = self._buffers[name]
        # torch's products return the dtype of their operands: round once, or not at all.
        direct = buffer.tensor.dtype == self._dtype and not buffer.accumulate
        wide = torch.promote_types(self._dtype, torch.float32)
        for expert, rows in chunk.groups():
            if direct:
                torch.mm(left[rows].T, right[rows], out=buffer.tensor[expert])
            else:
                grad = left[rows].T.to(wide) @ right[rows].to(wide)
                buffer.of_expert(expert).store(grad)

    def _sums(self, name: str, chunk: Chunk, terms: Tensor) -> None:
        wide = torch.promote_types(self._dtype, torch.float32)
        for expert, rows in chunk.groups():
            self._buffers[name].of_expert(expert).store(terms[rows].to(wide).sum(0))


def _derivative(problem: Problem, z: Tensor) -> act.Derivative:
    if not problem.activation.gated:
        return act.derivative(problem.activation, z, None)
    return act.derivative(problem.activation, *split_gate_up(z, problem.layout))
