"""Sorting slots, moving rows to their experts and adding them up again."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import baselines
import torch
from case import OURS, Candidate, Case, Inputs, Options, Outputs, generator
from torch import Tensor

from samebits.ops.permute import combine, permute, reference, sort_slots
from samebits.ops.permute.tuning import heuristic
from samebits.problem import Problem
from samebits.testing.numerics import bitwise_equal

BLOCK_R = 128
# Token counts of a decoding step, up to 4096 slots at K = 8.
FEW = (1, 16, 64, 512)


def _same(outputs: Outputs, expected: Outputs) -> float:
    """Return 0 where ours has every bit; peers round elsewhere and are compared by size."""
    worst = 0.0
    for value, exact in zip(outputs, expected, strict=False):
        if bitwise_equal(value, exact):
            continue
        if not value.is_floating_point():
            return float("inf")
        scale = exact.float().abs().amax() * torch.finfo(torch.bfloat16).eps
        worst = max(worst, 1.5 + float((value.float() - exact.float()).abs().amax() / scale))
    return worst


class Moving(NamedTuple):
    """The inputs of permute and combine."""

    # (T, H), and (R, H).
    x: Tensor
    y: Tensor
    # (T, K).
    probs: Tensor
    # Slot -> row and row -> slot.
    inverse: Tensor
    slots: Tensor


class _Shape:
    """One shape and token count: inputs and cases."""

    def __init__(self, shape: str, problem: Problem, tokens: int, options: Options) -> None:
        self.shape, self.problem, self.tokens, self.options = shape, problem, tokens, options
        self.topk, self.device = problem.K, options.device
        self.rows = tokens * problem.K

    def ids(self, seed: int) -> Tensor:
        scores = torch.rand(
            self.tokens, self.problem.E, device=self.device, generator=generator(seed, self.device)
        )
        return scores.topk(self.topk).indices

    def moving(self, seed: int) -> Moving:
        """Return the inputs of everything but sort."""
        draws = generator(seed, self.device)
        hidden = self.problem.H

        def draw(rows: int) -> Tensor:
            shape = (rows, hidden)
            return torch.randn(shape, device=self.device, dtype=torch.bfloat16, generator=draws)

        m = sort_slots(self.ids(seed), self.problem.E)
        probs = torch.rand(self.tokens, self.topk, device=self.device, generator=draws)
        return Moving(draw(self.tokens), draw(self.rows), probs, m.inverse, m.slots)

    def case(
        self,
        variant: str,
        direction: str,
        moved: int,
        make: Callable[[int], Inputs],
        candidates: dict[str, Candidate],
        expected: Candidate,
    ) -> Case:
        if not self.options.peers:
            candidates = {OURS: candidates[OURS]}
        config = heuristic(self.tokens, self.problem.H, self.topk, 2)
        return Case(
            op="permute", variant=variant, direction=direction, shape=self.shape, T=self.tokens,
            problem=self.problem, config=str(config), moved=moved, make=make,
            candidates=candidates,
            check=lambda inputs, outputs: _same(outputs, expected(inputs)),
        )  # fmt: skip

    def sort(self) -> Case:
        experts = self.problem.E

        def ours(ids: Tensor) -> Outputs:
            m = sort_slots(ids, experts, block_r=BLOCK_R)
            return m.slots, m.offsets, m.inverse

        return self.case(
            "sort", "forward", 8 * self.rows + 8 * self.rows + 4 * experts,
            self.ids,
            {OURS: ours, "eager": lambda ids: baselines.sort(ids, experts)},
            lambda ids: baselines.sort(ids, experts),
        )  # fmt: skip

    def moves(self) -> Iterator[Case]:
        """Yield permute and combine, forward and backward."""
        k, device = self.topk, self.device
        row = 2 * self.problem.H
        few, many = self.tokens * row, self.rows * row
        index, probs = 4 * self.rows, 4 * self.rows
        gather = baselines.compiled(baselines.gather, device)
        add = baselines.compiled(baselines.combine, device)
        ops = torch.ops.samebits

        yield self.case(
            "permute", "forward", few + many + index, self.moving,
            {
                OURS: lambda m: (permute(m.x, m.inverse, k),),
                "eager": lambda m: baselines.gather(m.x, m.slots, k, None),
                "compile": lambda m: gather(m.x, m.slots, k, None),
            },
            lambda m: (reference.permute(m.x, m.inverse, k, None),),
        )  # fmt: skip
        yield self.case(
            "permute-scaled", "forward", few + many + index + probs, self.moving,
            {
                OURS: lambda m: (permute(m.x, m.inverse, k, m.probs),),
                "eager": lambda m: baselines.gather(m.x, m.slots, k, m.probs),
                "compile": lambda m: gather(m.x, m.slots, k, m.probs),
            },
            lambda m: (reference.permute(m.x, m.inverse, k, m.probs),),
        )  # fmt: skip
        yield self.case(
            "combine", "forward", few + many + index + probs, self.moving,
            {
                OURS: lambda m: (combine(m.y, m.inverse, k, m.probs),),
                "eager": lambda m: baselines.combine(m.y, m.inverse, k, m.probs),
                "compile": lambda m: add(m.y, m.inverse, k, m.probs),
            },
            lambda m: (reference.combine(m.y, m.inverse, k, m.probs, m.y.dtype),),
        )  # fmt: skip
        yield self.case(
            "permute", "backward", few + many + index, self.moving,
            {
                OURS: lambda m: ops.permute_backward(m.y, m.inverse, None, None, k),
                "eager": lambda m: baselines.combine(m.y, m.inverse, k, None),
                "compile": lambda m: add(m.y, m.inverse, k, None),
            },
            lambda m: reference.permute_backward(m.y, m.inverse, k, None, None)[:1],
        )  # fmt: skip
        # x is read too, for dp.
        yield self.case(
            "permute-scaled", "backward", 2 * few + many + index + 2 * probs, self.moving,
            {OURS: lambda m: ops.permute_backward(m.y, m.inverse, m.probs, m.x, k)},
            lambda m: reference.permute_backward(m.y, m.inverse, k, m.probs, m.x),
        )  # fmt: skip
        # The rows are read, for dp, and their gradients written.
        yield self.case(
            "combine", "backward", few + 2 * many + index + 2 * probs, self.moving,
            {
                OURS: lambda m: ops.combine_backward(
                    m.x, m.inverse, m.probs, m.y, None, k, m.y.dtype
                )
            },
            lambda m: reference.combine_backward(m.x, m.inverse, k, m.probs, m.y, m.y.dtype),
        )  # fmt: skip


def cases(shapes: dict[str, Problem], options: Options) -> Iterator[Case]:
    """Yield sorts of few and many tokens, and the moves of the token counts asked for."""
    for shape, problem in shapes.items():
        for tokens in sorted({*FEW, *options.tokens}):
            yield _Shape(shape, problem, tokens, options).sort()
        for tokens in options.tokens:
            yield from _Shape(shape, problem, tokens, options).moves()
