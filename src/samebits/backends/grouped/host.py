"""The stages on CPU: torch matrix products, one expert after the other, rows sorted by expert.

The rows of a few experts pass through all stages while they are in cache.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from samebits import activation as act
from samebits.backends.call import Call, accumulate_dtype, weights_of_experts
from samebits.problem import DTYPES, Problem, ProbPlacement
from samebits.routing import Permutation
from samebits.weights import split_gate_up

# Experts with few rows share the elementwise stages up to this many rows: beyond it they gain
# nothing and leave the cache.
_CHUNK_ROWS = 64
# fp32 products of more and of at most so many rows for each expert are quicker with the weight as
# the left operand; measured with MKL.
_WEIGHT_FIRST_FP32 = (4, 32)
# Dense weights of a chunk of several experts take at most so many bytes.
_CHUNK_BYTES = 2**28
# What torch's grouped product takes on CPU: bytes that divide every stride and address.
_ALIGNMENT = 16


class Chunk(NamedTuple):
    """Successive rows that go through the stages together; whole experts only."""

    # Rows of the call.
    span: slice
    # (rows,) token and expert of each row, and (rows, 1) its probability.
    tokens: Tensor
    experts: Tensor
    p: Tensor
    # Experts with rows, ascending, and how many rows each of them has.
    present: list[int]
    counts: list[int]

    def groups(self) -> Iterator[tuple[int, slice]]:
        """Yield each expert with its rows within the chunk.

        Determinism: ascending.
        """
        start = 0
        for expert, count in zip(self.present, self.counts, strict=True):
            yield expert, slice(start, start + count)
            start += count


class Rows:
    """The sorted rows of one call."""

    def __init__(self, problem: Problem, call: Call) -> None:
        parameters = (problem.activation.columns + 1) * problem.F * problem.H
        self._most = max(1, _CHUNK_BYTES // (parameters * call.x.element_size()))
        offsets, slots = _sorted(problem, call)
        self.bounds: list[int] = offsets.tolist()
        self.total = self.bounds[-1]
        self._kinds = _WEIGHT_FIRST_FP32 if call.x.dtype == torch.float32 else ()
        # No chunk has more rows.
        self.longest = max(_CHUNK_ROWS, *(stop - start for start, stop in pairwise(self.bounds)))
        self.slots = slots[: self.total]
        self._tokens = self.slots // problem.K
        self._experts = call.topk_ids.reshape(-1)[self.slots] - problem.expert_start
        wide = accumulate_dtype(problem)
        self._probs = call.topk_probs.reshape(-1)[self.slots].to(wide)[:, None]

    def chunks(self) -> Iterator[Chunk]:
        """Yield the rows in order, in chunks within ``_CHUNK_ROWS`` and ``_CHUNK_BYTES``.

        A chunk of one expert may exceed both.

        Determinism: exact integers.
        """
        present: list[int] = []
        first = last = 0
        for expert, (start, stop) in enumerate(pairwise(self.bounds)):
            if stop == start:
                continue
            # No expert's product is chosen by the rows of others, which another rank may hold.
            kind = sum(stop - start > bound for bound in self._kinds)
            full = stop - first > _CHUNK_ROWS or len(present) == self._most or kind != last
            if present and full:
                yield self._chunk(first, start, present)
                present, first = [], start
            present.append(expert)
            last = kind
        if present:
            yield self._chunk(first, self.total, present)

    def _chunk(self, start: int, stop: int, present: list[int]) -> Chunk:
        span = slice(start, stop)
        counts = [self.bounds[expert + 1] - self.bounds[expert] for expert in present]
        experts = self._experts[span]
        return Chunk(span, self._tokens[span], experts, self._probs[span], present, counts)


def _sorted(problem: Problem, call: Call) -> tuple[Tensor, Tensor]:
    """Return the first row of each expert, and the slot of each row."""
    if call.offsets is not None:
        return call.offsets, torch.arange(call.topk_ids.numel())
    permutation = Permutation.of(
        call.topk_ids,
        problem.E,
        expert_start=problem.expert_start,
        num_valid_tokens=call.num_valid_tokens,
    )
    return permutation.offsets, permutation.slots


def forward(problem: Problem, call: Call, *, save: bool) -> tuple[Tensor, Tensor]:
    """Return ``(out, z)``; see ``samebits.experts``. ``z`` is (R, 2F or F) by row, if ``save``.

    Determinism: repeatable; rounding points and combine order of the contract.
    """
    rows = Rows(problem, call)
    out = torch.zeros(call.x.shape, dtype=accumulate_dtype(problem))
    saved = call.x.new_empty(call.topk_ids.numel() if save else 0, call.gate_up.shape[1])
    terms = torch.empty(rows.longest, problem.H, dtype=out.dtype)
    for held in rows.chunks():
        part, chunk = dense(problem, call, held)
        x = expert_input(problem, call.x.index_select(0, chunk.tokens), chunk.p)
        z = product(x, part.gate_up, part.gate_up_bias, chunk)
        if save:
            saved[chunk.span] = z
        y = _second(problem, part, _activate(problem, z, chunk.p), chunk)
        term = terms[: len(y)]
        if problem.placement == ProbPlacement.FC2_OUTPUT:
            torch.mul(y, chunk.p, out=term)
        else:
            term.copy_(y)
        # Experts ascend, so every token's terms are added by ascending row, from +0.0.
        out.index_add_(0, chunk.tokens, term)
    if save:
        saved[rows.total :] = 0
    return out.to(DTYPES[problem.result_dtype]), saved


def dense(problem: Problem, call: Call, chunk: Chunk) -> tuple[Call, Chunk]:
    """Return a call that holds the chunk's experts alone, dequantised, and the chunk in its terms.

    Where nothing is quantised, both as they are.

    Determinism: see ``samebits.formats``.
    """
    if problem.format is None:
        return call, chunk
    experts = chunk.present
    changed = {
        name: weights_of_experts(problem, call, name, experts) for name in ("gate_up", "down")
    }
    for name in ("gate_up_bias", "down_bias"):
        bias: Tensor | None = getattr(call, name)
        if bias is not None:
            changed[name] = bias[experts]
    counts = torch.tensor(chunk.counts)
    renumbered = torch.arange(len(experts)).repeat_interleave(counts)
    return call._replace(**changed), chunk._replace(
        experts=renumbered, present=list(range(len(experts)))
    )


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
    if bias is not None and bias.dtype != x.dtype:
        # torch adds a bias before it rounds only where the bias has the product's dtype.
        wide = torch.promote_types(x.dtype, torch.float32)
        parts = [
            F.linear(x[rows].to(wide), weight[expert].to(wide), bias[expert].to(wide))
            for expert, rows in chunk.groups()
        ]
        return _joined(parts).to(x.dtype)
    if _weight_first(x, weight, chunk):
        return _weight_first_product(x, weight, bias, chunk)
    if (bias is None or x.dtype == torch.float32) and _takes_grouped_mm(x, weight):
        first, last = chunk.present[0], chunk.present[-1] + 1
        ends = torch.bincount(chunk.experts - first, minlength=last - first).cumsum(0)
        z = F.grouped_mm(x, weight[first:last].transpose(1, 2), offs=ends.to(torch.int32))
        return z if bias is None else z.add_(bias[chunk.experts])
    rows_of = x.split(chunk.counts)
    weights = [weight[expert].T for expert in chunk.present]
    if bias is None:
        return _joined(list(map(torch.mm, rows_of, weights)))
    biases = [bias[expert] for expert in chunk.present]
    return _joined(list(map(torch.addmm, biases, rows_of, weights)))


def _joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _weight_first(x: Tensor, weight: Tensor, chunk: Chunk) -> bool:
    """Return whether ``weight · xᵀ`` is quicker than ``x · weightᵀ``: it repacks ``x`` only."""
    if weight.stride(-1) != 1:
        return False
    if x.dtype == torch.float32:
        few, most = _WEIGHT_FIRST_FP32
        return few < len(chunk.tokens) / len(chunk.present) <= most
    return x.element_size() == 2


def _weight_first_product(x: Tensor, weight: Tensor, bias: Tensor | None, chunk: Chunk) -> Tensor:
    # As batches of one: for one row, torch has a slower product of a matrix and a vector.
    columns = x.T[None].split(chunk.counts, 2)
    weights = [weight[expert : expert + 1] for expert in chunk.present]
    if bias is None:
        return _joined(list(map(torch.bmm, weights, columns)), 2)[0].T
    biases = [bias[expert][None, :, None] for expert in chunk.present]
    return _joined(list(map(torch.baddbmm, biases, weights, columns)), 2)[0].T


def _takes_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch's grouped product, one call for all experts, takes these tensors."""
    if x.dtype == torch.float64 or x.stride(-1) != 1 or 1 not in weight.stride()[1:]:
        return False
    elements = _ALIGNMENT // x.element_size()
    # Sizes too: in a matrix of one row or column torch checks a stride of 1.
    strides = [stride for stride in (x.stride(0), *weight.stride()) if stride != 1]
    aligned = all(extent % elements == 0 for extent in (*strides, *weight.shape[1:]))
    return aligned and all(t.data_ptr() % _ALIGNMENT == 0 for t in (x, weight))


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
    wide = chunk.p.dtype
    parts = [
        F.linear(h[rows].to(wide), call.down[expert].to(wide)) for expert, rows in chunk.groups()
    ]
    y = _joined(parts)
    if call.down_bias is not None:
        bias = call.down_bias[chunk.experts].to(wide)
        y += bias * chunk.p if problem.placement == ProbPlacement.FC2_INPUT else bias
    return y


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
