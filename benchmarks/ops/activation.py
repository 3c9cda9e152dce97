"""The activation, ``[T*K, 2F] → [T*K, F]``, both directions, every option."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from baselines import Formula, Function, compiled, liger
from case import OURS, Candidate, Case, Options, Outputs, generator
from torch import Tensor

from samebits import activation as act
from samebits.activation import Activation
from samebits.ops.activation import Operands, Wanted, activate, activate_backward
from samebits.ops.activation.tuning import backward_heuristic, forward_heuristic
from samebits.problem import Problem
from samebits.testing.numerics import judge
from samebits.weights import Layout, merge_gate_up, split_gate_up


class Variant(NamedTuple):
    """Options of one row of the table."""

    activation: Activation
    layout: Layout = Layout()
    probs: bool = False
    # A bias of each expert, and its gradient.
    bias: bool = False


_GPT_OSS = Activation(alpha=1.702, limit=7.0, linear_offset=1.0)
_PAIRS = Layout(interleave=1)
VARIANTS = {
    "plain": Variant(Activation()),
    "clamped": Variant(Activation(limit=7.0)),
    "gpt-oss": Variant(_GPT_OSS),
    "interleaved": Variant(_GPT_OSS, _PAIRS),
    "weighted": Variant(Activation(limit=7.0), probs=True),
    "gpt-oss-whole": Variant(_GPT_OSS, _PAIRS, probs=True, bias=True),
}


class Given(NamedTuple):
    """The inputs of both directions."""

    dh: Tensor
    operands: Operands


Peers = dict[str, Candidate]
# Rows that the check looks at: rows do not depend on one another.
_CHECKED = 512


def _make(problem: Problem, tokens: int, variant: Variant, device: str, seed: int) -> Given:
    draws, rows = generator(seed, device), tokens * problem.K

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=draws)

    # Spread so that a good part lies beyond the limits.
    z, dh = draw(rows, 2 * problem.F) * 4, draw(rows, problem.F)
    bias = offsets = None
    if variant.bias:
        bias = draw(problem.E, 2 * problem.F)
        chosen = torch.randint(0, problem.E, (rows,), device=device, generator=draws)
        counts = torch.zeros(problem.E, dtype=torch.int64, device=device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    probs = torch.rand(rows, device=device, generator=draws) if variant.probs else None
    return Given(dh, Operands(z, bias, offsets, probs))


def _forward(variant: Variant, given: Given) -> Outputs:
    z, bias, offsets, probs, *_ = given.operands
    h = activate(z, variant.activation, variant.layout, bias=bias, offsets=offsets, row_probs=probs)
    return (h,)


def _backward(variant: Variant, given: Given) -> Outputs:
    wanted = Wanted(dp=variant.probs, dbias=variant.bias)
    result = activate_backward(given.dh, given.operands, variant.activation, variant.layout, wanted)
    return tuple(value for value in result if value is not None)


def _exact(variant: Variant, direction: str, given: Given, dtype: torch.dtype) -> Outputs:
    """Return the results of the first rows, everything between z' and the results in ``dtype``."""
    dh, (z, bias, offsets, probs, *_) = given
    rows = min(_CHECKED, z.shape[0])
    z = z[:rows]
    if bias is not None:
        row = torch.arange(rows, device=z.device)
        expert = torch.searchsorted(offsets[1:].contiguous(), row.int(), right=True)
        z = (z.float() + bias[expert].float()).to(z.dtype)
    gate, up = split_gate_up(z.to(dtype), variant.layout)
    p = 1.0 if probs is None else probs[:rows, None].to(dtype)
    if direction == "forward":
        return (act.apply(variant.activation, gate, up) * p,)
    local = act.derivative(variant.activation, gate, up)
    dh = dh[:rows].to(dtype)
    assert local.up is not None
    dz = merge_gate_up(dh * p * local.gate, dh * p * local.up, variant.layout)
    return (dz,) if probs is None else (dz, (dh * local.h).sum(-1))


def _check(variant: Variant, direction: str, given: Given, outputs: Outputs) -> float:
    """Return the worst error over the budget; the bias gradient is left to the tests."""
    worst = 0.0
    exact = _exact(variant, direction, given, torch.float64)
    plain = _exact(variant, direction, given, torch.float32)
    for value, near, target in zip(outputs, plain, exact, strict=False):
        rounded = near.to(value.dtype)
        judgement = judge(value[: target.shape[0]], rounded, target, torch.bfloat16)
        worst = max(worst, judgement.measured / judgement.allowed)
        worst = max(worst, judgement.worst_row / judgement.worst_allowed)
    return worst


def _liger(direction: str) -> Peers:
    """Return Liger's kernel, on the same memory taken as two contiguous matrices, its own layout.

    Nothing is returned, so nothing is compared; its backward overwrites its inputs.
    """
    module = liger()
    if module is None:
        return {}

    def parts(given: Given) -> tuple[Tensor, Tensor]:
        z = given.operands.z
        gate, up = z.view(2, z.shape[0], -1)
        return gate, up

    def forward(given: Given) -> Outputs:
        module.swiglu_forward(*parts(given))
        return ()

    def backward(given: Given) -> Outputs:
        module.swiglu_backward(*parts(given), given.dh)
        return ()

    return {"liger": forward if direction == "forward" else backward}


def _peers(variant: Variant, direction: str, device: str) -> Peers:
    if variant.bias:
        return {}
    formula = Formula(variant.activation, variant.layout == _PAIRS)
    plain = variant == VARIANTS["plain"] and device == "cuda"
    more = _liger(direction) if plain else {}

    def of_forward(function: Function) -> Candidate:
        return lambda g: function(g.operands.z, g.operands.row_probs)

    def of_backward(function: Function) -> Candidate:
        return lambda g: function(g.dh, g.operands.z, g.operands.row_probs)

    if direction == "forward":
        whole = compiled(formula.forward, device)
        return {"eager": of_forward(formula.forward), "compile": of_forward(whole), **more}
    whole = compiled(formula.backward, device)
    return {"eager": of_backward(formula.backward), "megatron-style": of_backward(whole), **more}


def cases(shapes: dict[str, Problem], options: Options) -> Iterator[Case]:
    """Yield the cases of every shape, token count, variant and direction."""
    for shape, problem in shapes.items():
        for name, variant in VARIANTS.items():
            for direction in ("forward", "backward"):
                peers = _peers(variant, direction, options.device) if options.peers else {}
                for tokens in options.tokens:
                    yield _case(shape, problem, tokens, name, direction, options.device, peers)


def _case(
    shape: str,
    problem: Problem,
    tokens: int,
    name: str,
    direction: str,
    device: str,
    peers: Peers,
) -> Case:
    variant, rows = VARIANTS[name], tokens * problem.K
    if direction == "forward":
        config = forward_heuristic(rows, problem.F, 2)
    else:
        config = backward_heuristic(rows, problem.F, 2, dbias=variant.bias, dp=variant.probs)

    values = 2 * rows * problem.F * (3 if direction == "forward" else 5)
    bias = 2 * 2 * problem.E * problem.F + 4 * (problem.E + 1) if variant.bias else 0
    probs = 4 * rows if variant.probs else 0
    both = 1 if direction == "forward" else 2
    ours = partial(_forward if direction == "forward" else _backward, variant)
    return Case(
        op="activation", variant=name, direction=direction, shape=shape, T=tokens,
        problem=problem, config=str(config),
        moved=values + both * (bias + probs),
        make=partial(_make, problem, tokens, variant, device), candidates={OURS: ours, **peers},
        check=partial(_check, variant, direction),
    )  # fmt: skip
