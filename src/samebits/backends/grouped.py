"""Torch matrix products, one expert after the other, over rows sorted by expert; the CPU default.

Forward and backward are written out, so that nothing but ``z`` is kept between them and no options
live in a graph. Each expert's rows pass through all stages while they are in cache.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from samebits import activation as act
from samebits.backends.call import Call, Gradients, accumulate_dtype
from samebits.problem import DTYPES, ProbPlacement, Problem
from samebits.routing import Permutation
from samebits.weights import merge_gate_up, split_gate_up

NAME = "grouped"


def why_not(problem: Problem) -> str | None:
    """Return why this backend cannot run ``problem``, or None.

    Determinism: pure function of the problem.
    """
    if problem.device != "cpu":
        return f"it has no kernels for {problem.device} yet, only for cpu"
    if problem.norm_eps is not None and problem.grad:
        return "it has no gradient of the post-expert norm"
    return None


def notes(problem: Problem) -> str | None:
    """Return what is not promised here: bits may depend on T through torch's matrix products."""
    return "row independence is not promised: torch chooses its matrix product by the row count"


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
            for expert, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False))
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
        z = _project(_input(problem, call.x[tokens], p), call.gate_up[expert], call.gate_up_bias, expert)
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
    return linear(x.float(), weight.float(), bias[expert]).to(x.dtype)


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
    want = Gradients(*wanted)
    rows = _Rows(problem, call)
    wide, dtype = accumulate_dtype(problem), DTYPES[problem.dtype]
    placement = problem.placement
    dout = dout.to(dtype)
    dx = torch.zeros(call.x.shape, dtype=wide)
    dprobs = torch.zeros(call.topk_probs.numel(), dtype=wide)
    grads = {
        name: torch.zeros_like(tensor)
        for name in ("gate_up", "down", "gate_up_bias", "down_bias")
        if getattr(want, name) and (tensor := getattr(call, name)) is not None
    }
    for expert, span in rows.groups:
        tokens, p = rows.tokens[span], rows.probs[span]
        dy = dout[tokens]
        gate, up = split_gate_up(z[span].to(wide), problem.layout) if problem.activation.gated else (z[span].to(wide), None)
        local = act.derivative(problem.activation, gate, up)
        dh = (dy @ call.down[expert]).to(wide)
        scale = 1.0 if placement == ProbPlacement.FC1_INPUT else p
        if want.topk_probs and placement != ProbPlacement.FC1_INPUT:
            dp = (dh * local.h).sum(-1)
            if call.down_bias is not None:
                dp += dy.to(wide) @ call.down_bias[expert].to(wide)
            dprobs[rows.slots[span]] = dp
        dz_gate, dz_up = dh * scale * local.gate, None if local.up is None else dh * scale * local.up
        dz = (dz_gate if dz_up is None else merge_gate_up(dz_gate, dz_up, problem.layout)).to(dtype)
        if "down" in grads:
            grads["down"][expert] = dy.T @ (local.h * scale).to(dtype)
        if "down_bias" in grads:
            grads["down_bias"][expert] = (dy.to(wide) * scale).sum(0)
        if "gate_up_bias" in grads:
            grads["gate_up_bias"][expert] = dz.to(wide).sum(0)
        x = call.x[tokens]
        if "gate_up" in grads:
            grads["gate_up"][expert] = dz.T @ _input(problem, x, p)
        if want.x or (want.topk_probs and placement == ProbPlacement.FC1_INPUT):
            dx_slot = (dz @ call.gate_up[expert]).to(wide)
            if placement == ProbPlacement.FC1_INPUT:
                dprobs[rows.slots[span]] = (dx_slot * x.to(wide)).sum(-1)
                dx_slot = dx_slot * p
            dx.index_add_(0, tokens, dx_slot)
    return Gradients(
        x=dx.to(dtype) if want.x else None,
        topk_probs=dprobs.view_as(call.topk_probs).to(call.topk_probs.dtype) if want.topk_probs else None,
        **grads,
    )
