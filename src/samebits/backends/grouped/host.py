"""The stages on CPU: torch matrix products, one expert after the other, rows sorted by expert.

Forward and backward are written out, so that nothing but ``z`` is kept between them and no options
live in a graph. Each expert's rows pass through all stages while they are in cache.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from samebits import activation as act
from samebits.backends.call import DIFFERENTIABLE, Call, Gradients, accumulate_dtype
from samebits.problem import DTYPES, Problem, ProbPlacement
from samebits.routing import Permutation
from samebits.weights import merge_gate_up, split_gate_up


class _Rows:
    """The sorted rows of one call: for each expert with rows, its tokens and probabilities."""

    def __init__(self, problem: Problem, call: Call) -> None:
        permutation = Permutation.of(
            call.topk_ids,
            problem.E,
            expert_start=problem.expert_start,
            num_valid_tokens=call.num_valid_tokens,
        )
        bounds = permutation.offsets.tolist()
        self.total = bounds[-1]
        self.slots = permutation.slots[: self.total]
        self.tokens = self.slots // problem.K
        self.probs = call.topk_probs.reshape(-1)[self.slots].to(accumulate_dtype(problem))[:, None]
        self.groups = [
            (expert, slice(start, stop))
            for expert, (start, stop) in enumerate(pairwise(bounds))
            if stop > start
        ]


def forward(problem: Problem, call: Call, *, save: bool) -> tuple[Tensor, Tensor]:
    """Return ``(out, z)``; see ``samebits.experts``. ``z`` is (R, 2F or F) by row, if ``save``.

    Determinism: repeatable; rounding points and combine order of the contract.
    """
    rows = _Rows(problem, call)
    wide = accumulate_dtype(problem)
    out = torch.zeros(call.x.shape, dtype=wide)
    saved = call.x.new_empty(call.topk_ids.numel() if save else 0, call.gate_up.shape[1])
    for expert, span in rows.groups:
        tokens, p = rows.tokens[span], rows.probs[span]
        z = _project(
            _input(problem, call.x[tokens], p), call.gate_up[expert], call.gate_up_bias, expert
        )
        if save:
            saved[span] = z
        y = _second(problem, call, expert, _activate(problem, z, p), p).to(wide)
        # Experts ascend, so every token's terms are added by ascending row, from +0.0.
        out.index_add_(0, tokens, y.mul_(p) if problem.placement == ProbPlacement.FC2_OUTPUT else y)
    if save:
        saved[rows.total :] = 0
    return out.to(DTYPES[problem.result_dtype]), saved


def _input(problem: Problem, x: Tensor, p: Tensor) -> Tensor:
    if problem.placement == ProbPlacement.FC1_INPUT:
        return (x.to(p.dtype) * p).to(x.dtype)
    return x


def _project(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    """Return ``D(x · weightᵀ + bias)`` with one rounding."""
    if bias is None or bias.dtype == x.dtype:
        return linear(x, weight, None if bias is None else bias[expert])
    # torch adds a bias before it rounds only where the bias has the product's dtype.
    wide = torch.promote_types(x.dtype, torch.float32)
    return linear(x.to(wide), weight.to(wide), bias[expert].to(wide)).to(x.dtype)


def _activate(problem: Problem, z: Tensor, p: Tensor) -> Tensor:
    """Return ``h``, rounded to the dtype of ``z``."""
    gate, up = split_gate_up(z, problem.layout) if problem.activation.gated else (z, None)
    h = act.apply(problem.activation, gate.to(p.dtype), None if up is None else up.to(p.dtype))
    if problem.placement == ProbPlacement.FC2_INPUT:
        h = h * p
    return h.to(z.dtype)


def _second(problem: Problem, call: Call, expert: int, h: Tensor, p: Tensor) -> Tensor:
    """Return ``y``, rounded to the dtype of ``h``."""
    scaled_bias = call.down_bias is not None and problem.placement == ProbPlacement.FC2_INPUT
    if not scaled_bias and call.norm_scale is None:
        return _project(h, call.down[expert], call.down_bias, expert)
    # What follows the product must see its unrounded sum.
    y = linear(h.to(p.dtype), call.down[expert].to(p.dtype))
    if call.down_bias is not None:
        bias = call.down_bias[expert].to(p.dtype)
        y += p * bias if scaled_bias else bias
    if call.norm_scale is not None and problem.norm_eps is not None:
        y *= call.norm_scale.to(p.dtype)
        y *= torch.rsqrt(y.square().mean(-1, keepdim=True) + problem.norm_eps)
    return y.to(h.dtype)


def backward(
    problem: Problem, call: Call, z: Tensor, dout: Tensor, wanted: tuple[bool, ...]
) -> Gradients:
    """Return the wanted gradients from ``z``; recomputes h.

    Determinism: repeatable; rows ascend in every sum over rows.
    """
    want = {name for name, asked in zip(DIFFERENTIABLE, wanted, strict=True) if asked}
    on_input = problem.placement == ProbPlacement.FC1_INPUT
    want_probs = "topk_probs" in want
    rows = _Rows(problem, call)
    wide, dtype = accumulate_dtype(problem), DTYPES[problem.dtype]
    dout = dout.to(dtype)
    dx = torch.zeros(call.x.shape, dtype=wide)
    dprobs = torch.zeros(call.topk_probs.numel(), dtype=wide)
    grads: dict[str, Tensor] = {
        name: torch.zeros_like(tensor)
        for name in ("gate_up", "down", "gate_up_bias", "down_bias")
        if name in want and (tensor := getattr(call, name)) is not None
    }
    for expert, span in rows.groups:
        tokens, p = rows.tokens[span], rows.probs[span]
        dy = dout[tokens]
        local = _derivative(problem, z[span].to(wide))
        dh = (dy @ call.down[expert]).to(wide)
        scale = 1.0 if on_input else p
        if want_probs and not on_input:
            dp = (dh * local.h).sum(-1)
            if call.down_bias is not None:
                dp += dy.to(wide) @ call.down_bias[expert].to(wide)
            dprobs[rows.slots[span]] = dp
        dz = dh * scale * local.gate
        if local.up is not None:
            dz = merge_gate_up(dz, dh * scale * local.up, problem.layout)
        dz = dz.to(dtype)
        x = call.x[tokens]
        part = _Part(dy, dz, local.h, x, p, scale)
        for name, grad in grads.items():
            grad[expert] = _parameter_gradient(problem, name, part)
        if "x" in want or (want_probs and on_input):
            dx_slot = (dz @ call.gate_up[expert]).to(wide)
            if on_input:
                dprobs[rows.slots[span]] = (dx_slot * x.to(wide)).sum(-1)
                dx_slot = dx_slot * p
            dx.index_add_(0, tokens, dx_slot)
    if "x" in want:
        grads["x"] = dx.to(dtype)
    if want_probs:
        grads["topk_probs"] = dprobs.view_as(call.topk_probs).to(call.topk_probs.dtype)
    return Gradients(**grads)


class _Part(NamedTuple):
    """What the parameter gradients of one expert are made of; one row per row of the expert."""

    # (rows, H) gradient of the second projection before ``scale``, in D.
    dy: Tensor
    # (rows, 2F or F) gradient of the first projection, in D.
    dz: Tensor
    # (rows, F) before ``scale``, unrounded.
    h: Tensor
    # (rows, H) and (rows, 1).
    x: Tensor
    p: Tensor
    # The probability, where it comes after the activation.
    scale: Tensor | float


def _parameter_gradient(problem: Problem, name: str, part: _Part) -> Tensor:
    wide = part.p.dtype
    if name == "down":
        return part.dy.T @ (part.h * part.scale).to(part.dy.dtype)
    if name == "down_bias":
        return (part.dy.to(wide) * part.scale).sum(0)
    if name == "gate_up_bias":
        return part.dz.to(wide).sum(0)
    return part.dz.T @ _input(problem, part.x, part.p)


def _derivative(problem: Problem, z: Tensor) -> act.Derivative:
    if not problem.activation.gated:
        return act.derivative(problem.activation, z, None)
    return act.derivative(problem.activation, *split_gate_up(z, problem.layout))
