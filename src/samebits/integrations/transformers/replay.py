"""Record the routing that a model gives its experts, and replay it in another run of the model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from samebits.checks.models.protocol import UnbuildableError
from samebits.integrations.transformers import zoo

# What each call of each experts module was given: ids and probabilities, (B * S, K).
Routings = list[list[tuple[Tensor, Tensor]]]


def experts_modules(model: nn.Module) -> list[Any]:
    """Return the experts modules of ``model``, in its order."""
    return [m for m in model.modules() if zoo.is_decorated(type(m))]


def _positions(arguments: tuple[Any, ...]) -> tuple[int, int]:
    """Return where ids and probabilities are among an experts module's arguments."""
    tensors = [i for i, value in enumerate(arguments) if isinstance(value, Tensor)]
    ids = [i for i in tensors if not arguments[i].is_floating_point()]
    if len(ids) != 1:
        raise UnbuildableError("its experts are not given one tensor of ids by position")
    shape = arguments[ids[0]].shape
    probs = [i for i in tensors if i != ids[0] and i > 0 and arguments[i].shape == shape]
    if len(probs) != 1:
        raise UnbuildableError("its experts are not given one tensor of probabilities by position")
    return ids[0], probs[0]


@contextmanager
def recorded(model: nn.Module) -> Iterator[Routings]:
    """Note the routing that every experts module is given until the block ends."""
    modules = experts_modules(model)
    routings: Routings = [[] for _ in modules]

    def note(index: int, _module: nn.Module, arguments: tuple[Any, ...]) -> None:
        ids, probs = _positions(arguments)
        routings[index].append((arguments[ids].clone(), arguments[probs].clone()))

    with _hooked(modules, note):
        yield routings


@contextmanager
def replayed(model: nn.Module, routings: Routings, rows: slice) -> Iterator[None]:
    """Give every experts module the noted routing of ``rows`` instead of its router's."""
    calls = [iter(calls) for calls in routings]

    def replace(index: int, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, probs = _positions(arguments)
        exact_ids, exact_probs = next(calls[index])
        replaced = list(arguments)
        # Device and dtype of what the model's own router gave.
        replaced[ids] = exact_ids[rows].to(arguments[ids])
        replaced[probs] = exact_probs[rows].to(arguments[probs])
        return tuple(replaced)

    with _hooked(experts_modules(model), replace):
        yield


@contextmanager
def _hooked(modules: list[nn.Module], function: Callable[..., Any]) -> Iterator[None]:
    handles = [m.register_forward_pre_hook(partial(function, i)) for i, m in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
