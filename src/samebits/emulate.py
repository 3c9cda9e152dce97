"""The reference with the rounding points of other frameworks, to say what a gap is made of.

Frameworks compute one function and round it in other places than CONTRACT.md section 5. An
emulation keeps the reference's products and order of sums, and moves the rounding points alone, so
that the distance from the reference to it is the share of rounding in a gap, and the distance from
it to the framework's own code is the share of the order of sums. docs/differences.md has both.

Emulations are for explanation: no backend, and nothing in ``samebits.experts``, computes them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from samebits import activation as act
from samebits.activation import Activation
from samebits.backends.call import Call, accumulate_dtype
from samebits.backends.operator import check_ids, problem_of
from samebits.errors import UnsupportedError, must, unknown
from samebits.experts import checked
from samebits.formats.weights import Parameters, QuantizedWeights, dequantize
from samebits.problem import DTYPES, Problem, ProbPlacement
from samebits.routing import Permutation, Routing
from samebits.weights import split_gate_up

_PLAIN = Activation()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingPoints:
    """Where values are rounded to the working dtype beyond the contract's five places.

    The default adds none: it is the reference.
    """

    # Each matrix product by itself, before its bias is added or a norm looks at it.
    products: bool = False
    # Every operation between the projections, as eager code in the working dtype does.
    operations: bool = False
    # With ``operations``: g · sigmoid(alpha · g) rounds once, for it is one compiled function.
    slope_once: bool = False
    # What a norm has scaled, before it is normed.
    scaled: bool = False
    # p · y, before it is added to the sum (FC2_OUTPUT).
    weighted: bool = False
    # The sum over a token's experts after each addition.
    additions: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """A framework: where it rounds, and which problems it has."""

    points: RoundingPoints
    placements: frozenset[ProbPlacement]
    # Kinds of activation that it has, limits after the activation, and norms of experts.
    kinds: frozenset[str]
    post: bool
    norm: bool


_MEGATRON = RoundingPoints(products=True, operations=True, slope_once=True, additions=True)
_MEGATRON_KINDS = frozenset({"silu", "gelu", "gelu_tanh", "relu", "relu2"})

EMULATIONS: Mapping[str, Emulation] = {
    # The loop over experts in the modeling files of transformers 5.17 to 5.24.
    "hf_eager": Emulation(
        points=RoundingPoints(
            products=True, operations=True, scaled=True, weighted=True, additions=True
        ),
        placements=frozenset({ProbPlacement.FC2_OUTPUT}),
        kinds=frozenset(act.ACTIVATIONS),
        post=True,
        norm=True,
    ),
    # SequentialMLP of Megatron-LM 0.19.2 without bias_activation_fusion, unfused unpermute.
    "megatron_eager": Emulation(
        points=_MEGATRON,
        placements=frozenset({ProbPlacement.FC1_INPUT, ProbPlacement.FC2_INPUT}),
        kinds=_MEGATRON_KINDS,
        post=False,
        norm=False,
    ),
    # The same with batch_invariant_mode of 0.20: the sum over experts is fp32, rounded once.
    "megatron_batch_invariant": Emulation(
        points=RoundingPoints(products=True, operations=True, slope_once=True),
        placements=frozenset({ProbPlacement.FC1_INPUT, ProbPlacement.FC2_INPUT}),
        kinds=_MEGATRON_KINDS,
        post=False,
        norm=False,
    ),
}


def emulated_experts(
    x: Tensor,
    routing: Routing,
    weights: Parameters,
    activation: Activation = _PLAIN,
    *,
    emulate: str | RoundingPoints,
    placement: ProbPlacement = ProbPlacement.FC2_OUTPUT,
    expert_start: int = 0,
    out_dtype: torch.dtype | None = None,
    num_valid_tokens: Tensor | None = None,
) -> Tensor:
    """Return what ``samebits.experts`` would with the rounding points of another framework.

    Args:
        x: See ``samebits.experts``.
        routing: See ``samebits.experts``.
        weights: See ``samebits.experts``; quantised ones count as the dense ones they stand for.
        activation: See ``samebits.experts``.
        emulate: A key of ``EMULATIONS``, or rounding points chosen one by one.
        placement: See ``samebits.experts``; a framework has its own.
        expert_start: See ``samebits.experts``.
        out_dtype: See ``samebits.experts``; the named frameworks round their output.
        num_valid_tokens: See ``samebits.experts``.

    Returns:
        ``(T, H)``; differentiable by autograd, which rounds gradients where the forward does. Only
        the forward was compared with the frameworks.

    Raises:
        TypeError: See ``samebits.experts``; or ``emulate`` is neither name nor rounding points.
        ValueError: See ``samebits.experts``; or no emulation has that name.
        UnsupportedError: The framework has no such problem.

    Determinism: that of the reference: repeatable; sums by ascending row, except inside torch's
    matrix products.
    """
    if not isinstance(emulate, str | RoundingPoints):
        names = ", ".join(EMULATIONS)
        rule = f"be one of {names}, or RoundingPoints"
        raise TypeError(must("emulate", rule, type(emulate).__name__))
    if isinstance(emulate, str) and emulate not in EMULATIONS:
        raise ValueError(unknown("emulation", emulate, EMULATIONS))
    if isinstance(weights, QuantizedWeights):
        weights = dequantize(weights)
    call, options, num_experts = checked(
        x,
        routing,
        weights,
        activation,
        placement=placement,
        backend="reference",
        expert_start=expert_start,
        out_dtype=out_dtype,
        num_valid_tokens=num_valid_tokens,
    )
    check_ids(call, num_experts)
    problem = problem_of(options, call, num_experts, expert_start, grad=False)
    if isinstance(emulate, RoundingPoints):
        return _compute(problem, call, emulate)
    reason = why_not(emulate, problem)
    if reason is not None:
        raise UnsupportedError(f"{emulate} cannot emulate this problem because {reason}")
    return _compute(problem, call, EMULATIONS[emulate].points)


def why_not(emulate: str, problem: Problem) -> str | None:
    """Return why a framework has no such problem, or None; ``emulate`` is a key of EMULATIONS.

    Determinism: pure function of its arguments.
    """
    emulation, activation = EMULATIONS[emulate], problem.activation
    if problem.placement not in emulation.placements:
        known = ", ".join(sorted(emulation.placements))
        return f"it places probabilities at {known}, not at {problem.placement}"
    if problem.placement == ProbPlacement.FC1_INPUT and problem.K > 1:
        return f"it scales inputs where K = 1 only, not {problem.K}"
    if activation.kind not in emulation.kinds:
        return f"it has no {activation.kind}"
    if activation.limit_position == "post" and not emulation.post:
        return "it clamps before the activation only"
    if problem.norm_eps is not None and not emulation.norm:
        return "its experts have no norm"
    if problem.result_dtype != problem.dtype:
        return f"it returns {problem.dtype}, not {problem.result_dtype}"
    return None


def _compute(problem: Problem, call: Call, points: RoundingPoints) -> Tensor:
    wide, dtype = accumulate_dtype(problem), DTYPES[problem.dtype]
    permutation = Permutation.of(
        call.topk_ids,
        problem.E,
        expert_start=problem.expert_start,
        num_valid_tokens=call.num_valid_tokens,
    )
    bounds = permutation.offsets.tolist()
    probs = call.topk_probs.reshape(-1).to(wide)
    out = call.x.new_zeros(call.x.shape, dtype=dtype if points.additions else wide)
    for expert in range(problem.E):
        slots = permutation.slots[bounds[expert] : bounds[expert + 1]]
        if slots.numel() == 0:
            continue
        tokens, p = slots // problem.K, probs[slots][:, None]
        y = _expert(problem, call, points, expert, call.x[tokens], p)
        if problem.placement == ProbPlacement.FC2_OUTPUT:
            y = y * p
        if points.weighted:
            y = y.to(dtype)
        out = out.index_add(0, tokens, y.to(out.dtype))
    return out.to(DTYPES[problem.result_dtype])


def _expert(
    problem: Problem, call: Call, points: RoundingPoints, expert: int, x: Tensor, p: Tensor
) -> Tensor:
    """Return rounded ``y`` of one expert's rows, in the accumulation dtype."""
    wide, dtype = accumulate_dtype(problem), DTYPES[problem.dtype]
    scales_h = problem.placement == ProbPlacement.FC2_INPUT

    def _round(value: Tensor, *, there: bool = True) -> Tensor:
        return value.to(dtype).to(wide) if there else value

    x = x.to(wide)
    if problem.placement == ProbPlacement.FC1_INPUT:
        x = _round(x * p)
    z = _round(x @ call.gate_up[expert].to(wide).T, there=points.products)
    if call.gate_up_bias is not None:
        z = z + call.gate_up_bias[expert].to(wide)
    z = _round(z)
    gate, up = split_gate_up(z, problem.layout) if problem.activation.gated else (z, None)
    if points.operations and problem.activation.kind in _ROUNDED:
        parts = (gate.to(dtype), None if up is None else up.to(dtype))
        h = _apply_rounded(problem.activation, *parts, once=points.slope_once).to(wide)
    else:
        h = act.apply(problem.activation, gate, up)
        h = _round(h, there=points.operations)
    h = _round(h * p if scales_h else h)
    y = _round(h @ call.down[expert].to(wide).T, there=points.products)
    if call.down_bias is not None:
        bias = call.down_bias[expert].to(wide)
        y = y + (p * bias if scales_h else bias)
    if call.norm_scale is not None and problem.norm_eps is not None:
        y = _round(y * call.norm_scale.to(wide), there=points.scaled)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + problem.norm_eps)
    return _round(y)


def _apply_rounded(
    activation: Activation, gate: Tensor, up: Tensor | None, *, once: bool
) -> Tensor:
    """Return ``activation.apply`` in torch's own operations, each rounded to the dtype of gate."""
    limit = activation.limit
    if limit is not None and activation.limit_position == "pre":
        gate = gate.clamp(max=limit)
    if activation.kind == "silu" and activation.alpha != 1.0:
        a = _slope(gate, activation.alpha, once=once)
    else:
        a = _ROUNDED[activation.kind](gate)
    if limit is not None and activation.limit_position == "post":
        a = a.clamp(max=limit)
    if up is None:
        return a
    if limit is not None:
        up = up.clamp(min=-limit, max=limit)
    return a * (up + activation.linear_offset if activation.linear_offset else up)


def _slope(gate: Tensor, alpha: float, *, once: bool) -> Tensor:
    if once:
        wide = gate.float()
        return (wide * torch.sigmoid(alpha * wide)).to(gate.dtype)
    return gate * torch.sigmoid(gate * alpha)


# Kinds whose operations eager code rounds one by one. The soft caps of situ are written in fp32
# there, and rounded once.
_ROUNDED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda gate: functional.relu(gate).square(),
}
