"""An experts implementation of transformers as a function of rows: for `check invariance`."""

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from samebits.checks.models.protocol import Sizes
from samebits.errors import UnsupportedError, must, unknown
from samebits.integrations.transformers import tiny
from samebits.integrations.transformers.implementations import SAMEBITS, device, implementations
from samebits.integrations.transformers.plugin import attach
from samebits.integrations.transformers.stand_in import sonicmoe_runs_here
from samebits.integrations.transformers.zoo import ExpertsClass, is_decorated
from samebits.problem import DTYPES, Problem
from samebits.testing.inputs import make_inputs

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def experts_by_row(
    implementation: str, model: str, problem: Problem, tokens: int
) -> tuple[Function, list[Tensor]]:
    """Return an experts class under one implementation, and inputs of that many rows.

    Args:
        implementation: A registered name.
        model: Name of a model of transformers, or "<model>.<Class>".
        problem: Sizes and dtype; the model decides everything else.
        tokens: Rows of the inputs.

    Raises:
        ValueError: A name is unknown, or the problem says more than sizes and dtype.
        UnsupportedError: The implementation cannot run here.

    Determinism: parameters and inputs have fixed seeds.
    """
    sizes = Sizes(T=tokens, K=problem.K, E=problem.E, H=problem.H, F=problem.F)
    plain = Problem(H=sizes.H, F=sizes.F, E=sizes.E, K=sizes.K, dtype=problem.dtype)
    if problem != plain:
        raise ValueError(must("--problem", f"say sizes and dtype alone: {model} decides", problem))
    known = implementations()
    if implementation not in known:
        raise ValueError(unknown("implementation", implementation, known))
    if implementation == "sonicmoe" and not sonicmoe_runs_here():
        raise UnsupportedError("the kernels of sonicmoe cannot run on this machine")
    place = device()
    module: Any = tiny.build(_class_of(model), sizes).to(DTYPES[problem.dtype]).to(place)
    module.config._experts_implementation = implementation
    if implementation == SAMEBITS:
        attach(module)
    inputs = make_inputs(plain, tokens, device=place)
    return module, [inputs.x, inputs.routing.topk_ids, inputs.routing.topk_probs]


def _class_of(name: str) -> ExpertsClass:
    model, _, wanted = name.partition(".")
    path = f"transformers.models.{model}.modeling_{model}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):
            raise
        raise ValueError(must("--model", "name a model of transformers", repr(name))) from None
    classes = {
        value.__name__: value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == path and is_decorated(value)
    }
    if wanted not in classes and (wanted or len(classes) != 1):
        names = ", ".join(f"{model}.{name}" for name in classes)
        raise ValueError(must("--model", f"name an experts class ({names or 'none'})", repr(name)))
    chosen = wanted or next(iter(classes))
    return ExpertsClass(f"{model}.{chosen}", classes[chosen], module)
