"""The stages on CPU: torch matrix products, one expert after the other, rows sorted by expert.

The rows of a few experts pass through all stages while they are in cache.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from samebits import activation as act
from samebits.backends.call import Call, accumulate_dtype
from samebits.problem import DTYPES, Problem, ProbPlacement
from samebits.routing import Permutation
from samebits.weights import split_gate_up

# Experts with few rows share the elementwise stages up to this many rows: beyond it they gain
# nothing and leave the cache.
_CHUNK_ROWS = 64
# fp32 products of 5 to 32 rows are quicker with the weight as the left operand (MKL, measured).
_WEIGHT_FIRST_FP32 = range(5, 33)


class Chunk(NamedTuple):
    """Successive rows that go through the stages together; whole experts only."""

    # Rows of the call.
    span: slice
    # (rows,) and (rows, 1).
    tokens: Tensor
    p: Tensor
    # For each expert, its rows within the chunk.
    groups: list[tuple[int, slice]]


class Rows:
    """The sorted rows of one call."""

    def __init__(self, problem: Problem, call: Call) -> None:
        permutation = Permutation.of(
            call.topk_ids,
            problem.E,
            expert_start=problem.expert_start,
            num_valid_tokens=call.num_valid_tokens,
        )
        self.bounds: list[int] = permutation.offsets.tolist()
        self.total = self.bounds[-1]
        self.slots = permutation.slots[: self.total]
        self.tokens = self.slots // problem.K
        self.probs = call.topk_probs.reshape(-1)[self.slots].to(accumulate_dtype(problem))[:, None]

    def chunks(self) -> Iterator[Chunk]:
        """Yield the rows in order, in chunks of at most ``_CHUNK_ROWS`` or of one expert."""
        groups: list[tuple[int, slice]] = []
        first = 0
        for expert, (start, stop) in enumerate(pairwise(self.bounds)):
            if stop == start:
                continue
            if groups and stop - first > _CHUNK_ROWS:
                yield self._chunk(first, start, groups)
                groups, first = [], start
            groups.append((expert, slice(start - first, stop - first)))
        if groups:
            yield self._chunk(first, self.total, groups)

    def _chunk(self, start: int, stop: int, groups: list[tuple[int, slice]]) -> Chunk:
        span = slice(start, stop)
        return Chunk(span, self.tokens[span], self.probs[span], groups)


def forward(problem: Problem, call: Call, *, save: bool) -> tuple[Tensor, Tensor]:
    """Return ``(out, z)``; see ``samebits.experts``. ``z`` is (R, 2F or F) by row, if ``save``.

    Determinism: repeatable; rounding points and combine order of the contract.
    """
    rows = Rows(problem, call)
    out = torch.zeros(call.x.shape, dtype=accumulate_dtype(problem))
    saved = call.x.new_empty(call.topk_ids.numel() if save else 0, call.gate_up.shape[1])
    for chunk in rows.chunks():
        x = expert_input(problem, call.x[chunk.tokens], chunk.p)
        z = product(x, call.gate_up, call.gate_up_bias, chunk)
        if save:
            saved[chunk.span] = z
        y = _second(problem, call, _activate(problem, z, chunk.p), chunk).contiguous()
        y = y * chunk.p if problem.placement == ProbPlacement.FC2_OUTPUT else y.to(out.dtype)
        # Experts ascend, so every token's terms are added by ascending row, from +0.0.
        out.index_add_(0, chunk.tokens, y)
    if save:
        saved[rows.total :] = 0
    return out.to(DTYPES[problem.result_dtype]), saved


def expert_input(problem: Problem, x: Tensor, p: Tensor) -> Tensor:
    """Return the rows that the first projection multiplies.

    Determinism: elementwise.
    """
    if problem.placement == ProbPlacement.FC1_INPUT:
        return (x.to(p.dtype) * p).to(x.dtype)
    return x


def product(x: Tensor, weight: Tensor, bias: Tensor | None, chunk: Chunk) -> Tensor:
    """Return ``D(x · weight[expert]ᵀ + bias[expert])`` of every row, rounded once.

    Determinism: repeatable; bits may depend on an expert's row count and the strides.
    """
    parts = [
        _linear(x[rows], weight[expert], None if bias is None else bias[expert])
        for expert, rows in chunk.groups
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None and bias.dtype != x.dtype:
        # torch adds a bias before it rounds only where the bias has the product's dtype.
        wide = torch.promote_types(x.dtype, torch.float32)
        return linear(x.to(wide), weight.to(wide), bias.to(wide)).to(x.dtype)
    if not _weight_first(x, weight):
        return linear(x, weight, bias)
    if bias is None:
        return torch.bmm(weight[None], x.T[None])[0].T
    return torch.baddbmm(bias[None, :, None], weight[None], x.T[None])[0].T


def _weight_first(x: Tensor, weight: Tensor) -> bool:
    """Return whether ``(weight · xᵀ)ᵀ`` is quicker: a left operand needs no repacking."""
    if weight.stride(-1) != 1:
        return False
    return x.element_size() == 2 or (x.dtype == torch.float32 and len(x) in _WEIGHT_FIRST_FP32)


def _activate(problem: Problem, z: Tensor, p: Tensor) -> Tensor:
    """Return ``h``, rounded to the dtype of ``z``."""
    gate, up = split_gate_up(z, problem.layout) if problem.activation.gated else (z, None)
    h = act.apply(problem.activation, gate.to(p.dtype), None if up is None else up.to(p.dtype))
    if problem.placement == ProbPlacement.FC2_INPUT:
        h = h * p
    return h.to(z.dtype)


def _second(problem: Problem, call: Call, h: Tensor, chunk: Chunk) -> Tensor:
    """Return ``y``, rounded to the dtype of ``h``."""
    scaled_bias = call.down_bias is not None and problem.placement == ProbPlacement.FC2_INPUT
    if not scaled_bias and call.norm_scale is None:
        return product(h, call.down, call.down_bias, chunk)
    y = unrounded(problem, call, h, chunk)
    if call.norm_scale is not None:
        y = Normed.of(problem, call.norm_scale, y).y
    return y.to(h.dtype)


def unrounded(problem: Problem, call: Call, h: Tensor, chunk: Chunk) -> Tensor:
    """Return the second projection with its bias, in the accumulation dtype.

    Determinism: see ``product``.
    """
    wide, bias = chunk.p.dtype, call.down_bias
    parts = []
    for expert, rows in chunk.groups:
        part = linear(h[rows].to(wide), call.down[expert].to(wide))
        if bias is not None:
            row = bias[expert].to(wide)
            part += chunk.p[rows] * row if problem.placement == ProbPlacement.FC2_INPUT else row
        parts.append(part)
    return torch.cat(parts)


class Normed(NamedTuple):
    """The post-expert norm of some rows: ``y = before · scale · inverse``."""

    # (rows, H).
    y: Tensor
    before: Tensor
    # (H,) and (rows, 1).
    scale: Tensor
    inverse: Tensor

    @staticmethod
    def of(problem: Problem, norm_scale: Tensor, before: Tensor) -> "Normed":
        """Return the norm of ``before``, all in its dtype."""
        assert problem.norm_eps is not None
        scale = norm_scale.to(before.dtype)
        scaled = before * scale
        inverse = torch.rsqrt(scaled.square().mean(-1, keepdim=True) + problem.norm_eps)
        return Normed(scaled * inverse, before, scale, inverse)

    def backward(self, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of ``before`` and, summed over the rows, of ``scale``."""
        dscaled = self.inverse * (dy - self.y * (dy * self.y).mean(-1, keepdim=True))
        return dscaled * self.scale, (dscaled * self.before).sum(0)
