"""Inputs that find bugs, for one problem: tensors, routings, and the runs to compare.

Every generator is deterministic in its seed and the same on every device: tensors are drawn on CPU
in fp32, rounded to the working dtype, then moved.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from samebits.backends.call import DIFFERENTIABLE
from samebits.errors import must
from samebits.experts import experts
from samebits.formats.weights import Parameters, QuantizedWeights, dequantize, quantize
from samebits.problem import DTYPES, Problem, ProbPlacement
from samebits.routing import Routing
from samebits.testing.numerics import Judgement, judge
from samebits.weights import ExpertWeights, PostExpertNorm

# How slots choose experts: uniform; zipf, where expert e has weight 1/(e+1); one, where every first
# choice is the last expert; dropped, uniform with about a third of the slots dropped.
Distribution = Literal["uniform", "zipf", "one", "dropped"]

# Root mean square of the first projection: beyond every limit of the catalogue on at least a fifth
# of its elements.
_SPREAD = 3.0


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The tensors of one call, and the gradient that flows into its output."""

    x: Tensor
    routing: Routing
    weights: Parameters
    # (T, H), fp32 or the dtype of the output.
    dout: Tensor
    num_valid_tokens: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "Inputs":
        """Return inputs with ``function`` applied to every float tensor that is not quantised."""
        routing, weights = self.routing, self.weights
        if isinstance(weights, QuantizedWeights):
            changed: dict[str, Any] = {n: function(t) for n, t in weights.unquantized().items()}
            weights = replace(weights, **changed)
        else:
            weights = weights.map(function)
        probs = function(routing.topk_probs)
        return replace(
            self,
            x=function(self.x),
            routing=Routing(routing.topk_ids.to(probs.device), probs, routing.num_experts),
            weights=weights,
            dout=function(self.dout),
        )


def make_inputs(
    problem: Problem,
    tokens: int,
    *,
    seed: int = 0,
    distribution: Distribution = "uniform",
    device: torch.device | str = "cpu",
    valid_tokens: int | None = None,
) -> Inputs:
    """Return inputs of ``problem`` with T = ``tokens``.

    Determinism: a function of its arguments; every device gets the same values.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[problem.dtype]

    def draw(*shape: int, scale: float = 1.0, to: torch.dtype = dtype) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(to).to(device)

    def bias(kind: str | None, *shape: int) -> Tensor | None:
        return None if kind is None else draw(*shape, to=DTYPES[kind])

    rows = problem.activation.columns * problem.F
    scales = None
    if problem.norm_eps is not None:
        scales = (torch.rand(problem.H, generator=generator) + 0.5).to(dtype).to(device)
    weights = ExpertWeights(
        gate_up=draw(problem.E, rows, problem.H, scale=_SPREAD * problem.H**-0.5),
        down=draw(problem.E, problem.H, problem.F, scale=problem.F**-0.5),
        gate_up_bias=bias(problem.gate_up_bias, problem.E, rows),
        down_bias=bias(problem.down_bias, problem.E, problem.H),
        layout=problem.layout,
        norm=None if problem.norm_eps is None else PostExpertNorm(eps=problem.norm_eps),
        norm_scale=scales,
    )
    stored: Parameters = weights
    if problem.format is not None:
        # On CPU too: the bits of a format are then the same on every device.
        packed = quantize(weights.map(Tensor.cpu), problem.format)
        stored = packed.map(lambda tensor: tensor.to(device))
    ids = _choose(problem, tokens, distribution, generator).to(device)
    probs = torch.rand(tokens, problem.K, generator=generator) + 0.05
    routing = Routing(ids, probs.to(DTYPES[problem.probs]).to(device), problem.experts)
    count = None
    if problem.counted:
        live = tokens if valid_tokens is None else valid_tokens
        count = torch.tensor([live], dtype=torch.int32, device=device)
    dout = draw(tokens, problem.H, to=DTYPES[problem.result_dtype])
    return Inputs(draw(tokens, problem.H), routing, stored, dout, count)


def _choose(
    problem: Problem, tokens: int, distribution: Distribution, generator: torch.Generator
) -> Tensor:
    experts_, topk = problem.experts, problem.K
    weight = torch.ones(experts_)
    if distribution == "zipf":
        weight = 1.0 / torch.arange(1, experts_ + 1)
    # Gumbel top-k draws K different experts where there are as many; more slots repeat experts.
    noise = -torch.log(-torch.log(torch.rand(tokens, experts_, generator=generator) + 1e-9) + 1e-9)
    order = (weight.log() + noise).argsort(1, descending=True)
    repeat = -(-topk // experts_)
    ids = order.repeat(1, repeat)[:, :topk].contiguous()
    if distribution == "one":
        ids[:, 0] = experts_ - 1
    if distribution == "dropped":
        dropped = torch.rand(ids.shape, generator=generator) < 1 / 3
        ids[dropped] = torch.where(torch.rand(ids.shape, generator=generator) < 0.5, -1, experts_)[
            dropped
        ]
    return ids


def run(problem: Problem, inputs: Inputs, backend: str) -> dict[str, Tensor]:
    """Return the output of ``backend`` and, where ``problem.grad``, every gradient, by name."""
    return run_function(problem, inputs, partial(experts, backend=backend))


def options_of(problem: Problem, num_valid_tokens: Tensor | None) -> dict[str, Any]:
    """Return the keyword arguments of ``experts`` that are not at their neutral value."""
    options: dict[str, Any] = {}
    if problem.placement != ProbPlacement.FC2_OUTPUT:
        options["placement"] = problem.placement
    if problem.expert_start:
        options["expert_start"] = problem.expert_start
    if problem.result_dtype != problem.dtype:
        options["out_dtype"] = DTYPES[problem.result_dtype]
    if num_valid_tokens is not None:
        options["num_valid_tokens"] = num_valid_tokens
    if problem.row_format is not None:
        options["row_format"] = problem.row_format
    return options


def run_function(
    problem: Problem, inputs: Inputs, function: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """Return ``run`` of any function that is called like ``experts``.

    Options at their neutral value are not passed. Where the output carries no gradient, there is
    none in the results.

    Raises:
        ValueError: The output does not depend on one of the differentiable tensors.
    """
    leaves = inputs.map(lambda t: t.detach().clone().requires_grad_(problem.grad))
    options = options_of(problem, leaves.num_valid_tokens)
    out = function(leaves.x, leaves.routing, leaves.weights, problem.activation, **options)
    results = {"out": out.detach()}
    if not (problem.grad and out.requires_grad):
        return results
    tensors = {"x": leaves.x, "topk_probs": leaves.routing.topk_probs}
    tensors |= leaves.weights.named_tensors()
    names = [name for name in DIFFERENTIABLE if name in tensors]
    wanted = [tensors[name] for name in names]
    grads = torch.autograd.grad(out, wanted, inputs.dout, allow_unused=True)
    found = dict(zip(names, grads, strict=True))
    unused = [name for name, grad in found.items() if grad is None]
    if unused:
        raise ValueError(must("the output", f"have a gradient to {', '.join(unused)}", "none"))
    return results | {f"d_{name}": grad for name, grad in found.items() if grad is not None}


def widened(problem: Problem) -> Problem:
    """Return the problem in fp64, whose reference is the oracle."""
    return replace(
        problem,
        dtype="fp64",
        out_dtype=None,
        probs="fp64",
        gate_up_bias=None if problem.gate_up_bias is None else "fp64",
        down_bias=None if problem.down_bias is None else "fp64",
        format=None,
        row_format=None,
        device="cpu",
    )


def exact(problem: Problem, inputs: Inputs) -> dict[str, Tensor]:
    """Return ``run`` of the reference in fp64 on CPU, on the same values."""
    count = inputs.num_valid_tokens
    weights = inputs.weights
    dense = dequantize(weights) if isinstance(weights, QuantizedWeights) else weights
    wide = replace(inputs, weights=dense).map(lambda t: t.double().cpu())
    wide = replace(wide, num_valid_tokens=None if count is None else count.cpu())
    results = run(widened(problem), wide, "reference")
    if problem.format is not None:
        # Quantised matrices are frozen.
        results = {n: t for n, t in results.items() if n not in ("d_gate_up", "d_down")}
    return results


# Results whose first index is the expert: the budget judges them expert by expert.
PER_EXPERT = frozenset({"d_gate_up", "d_down", "d_gate_up_bias", "d_down_bias"})


def judge_all(problem: Problem, inputs: Inputs, results: dict[str, Tensor]) -> dict[str, Judgement]:
    """Judge the output and every gradient of a run against the error budget, by name.

    Raises:
        ValueError: A quantity is missing from ``results``, or is no quantity of the problem.
    """
    budget, oracle = plain(problem, inputs), exact(problem, inputs)
    if results.keys() != oracle.keys():
        raise ValueError(must("results", f"hold {sorted(oracle)}", sorted(results)))
    return {
        name: judge(
            value.cpu(),
            budget[name].cpu(),
            oracle[name],
            DTYPES[problem.dtype],
            per_expert=name in PER_EXPERT,
        )
        for name, value in results.items()
    }


def plain(problem: Problem, inputs: Inputs) -> dict[str, Tensor]:
    """Return ``run`` of the reference in the working dtype: what the budget is measured against."""
    return run(problem, inputs, "reference")
