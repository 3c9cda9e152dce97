"""What TARGET names: one of our backends, an implementation of transformers, or any function."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from samebits import env
from samebits.backends import BACKENDS
from samebits.checks.compile.target import Target, TargetError, load, make
from samebits.checks.invariance.rows import Rows
from samebits.errors import UnsupportedError, must
from samebits.experts import experts
from samebits.problem import Problem
from samebits.routing import Routing
from samebits.testing.inputs import make_inputs, options_of

# Large enough that libraries choose between kernels; small enough for a CPU.
PROBLEM = "H=256 F=128 E=8 K=2 dtype=bf16"
MODEL = "mixtral"
_TRANSFORMERS = "transformers/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the command line asks for."""

    target: str
    # Of functions.
    inputs: str | None = None
    rows: Sequence[str] = ()
    # Rows of the largest batch.
    tokens: int
    # Of experts: ``str(problem)``, and the experts class of transformers.
    problem: str = PROBLEM
    model: str | None = None


def find(wanted: Wanted) -> tuple[Rows, str]:
    """Return the rows that are judged, and the problem in words.

    Raises:
        TargetError: The target, or what is said of it, means nothing.
        ValueError: As above.
        UnsupportedError: A backend refuses the problem.
        ImportError: transformers is absent.
    """
    target = wanted.target
    is_function = ":" in target
    if not is_function and (wanted.inputs is not None or wanted.rows):
        raise TargetError(must("--inputs and --rows", "come with package.module:function", target))
    if is_function and wanted.problem != PROBLEM:
        raise TargetError(must("--problem", "come with experts", target))
    if wanted.model is not None and not target.startswith(_TRANSFORMERS):
        raise TargetError(must("--model", "come with transformers/IMPLEMENTATION", target))
    if target in BACKENDS:
        return _backend(target, wanted)
    if target.startswith(_TRANSFORMERS):
        return _transformers(target.removeprefix(_TRANSFORMERS), wanted)
    if not is_function:
        known = f"{', '.join(BACKENDS)}, {_TRANSFORMERS}NAME or package.module:function"
        raise TargetError(must("TARGET", f"be one of {known}", repr(target)))
    function, factory = load(Target(target, wanted.inputs))
    args, kwargs = make(factory)
    rows = Rows(function, args, kwargs, names=wanted.rows)
    return rows, str(rows)


def _backend(name: str, wanted: Wanted) -> tuple[Rows, str]:
    device = env.default_device()
    problem = replace(Problem.parse(wanted.problem), device=env.architecture(device), grad=False)
    if problem.counted:
        raise TargetError(must("--problem", "have no count of valid tokens: rows move", problem))
    reason = BACKENDS[name].why_not(problem)
    if reason is not None:
        raise UnsupportedError(f"backend {name!r} cannot run {problem} because {reason}")
    inputs = make_inputs(problem, wanted.tokens, device=device)

    def function(x: Tensor, topk_ids: Tensor, topk_probs: Tensor) -> Tensor:
        with torch.no_grad():
            return experts(
                x,
                Routing(topk_ids, topk_probs, problem.experts),
                inputs.weights,
                problem.activation,
                backend=name,
                **options_of(problem, None),
            )

    routing = inputs.routing
    return Rows(function, [inputs.x, routing.topk_ids, routing.topk_probs]), str(problem)


def _transformers(implementation: str, wanted: Wanted) -> tuple[Rows, str]:
    # The one place where the check names a framework.
    from samebits.integrations.transformers.by_row import experts_by_row

    problem = Problem.parse(wanted.problem)
    model = wanted.model or MODEL
    function, args = experts_by_row(implementation, model, problem, wanted.tokens)
    return Rows(_without_gradients(function), args), f"{model} {problem}"


def _without_gradients(function: Any) -> Any:
    def call(*args: Any) -> Any:
        with torch.no_grad():
            return function(*args)

    return call
