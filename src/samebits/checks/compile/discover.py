"""Find the numbers that reach a callable, wherever they live, and a way to set each of them.

Arguments (with defaults made explicit), items of dicts and sequences, fields of dataclasses,
attributes of modules and other objects, closure cells, and globals that the code mentions, through
the functions that it calls in its own package. Tensors are not numbers: a 0-d tensor is safe.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from samebits.checks.compile.place import (
    Place,
    attributes,
    children,
    holds_places,
    kind_of,
    of_torch,
)
from samebits.checks.compile.reached import is_compiled as is_compiled
from samebits.checks.compile.reached import mentioned_globals
from samebits.checks.compile.reached import original as original

_DEEPEST = 6
_HOOKS = {"_forward_hooks", "_forward_pre_hooks"}
_MARKS = {"_is_hf_initialized", "_is_torch_compile"}
_MODULE_OWN = frozenset({*vars(nn.ParameterList()), *_MARKS}) - _HOOKS


@dataclasses.dataclass
class Call:
    """One call of the target, whose parts can be replaced."""

    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Call the function with the arguments as they are now."""
        return self.function(*self.args, **self.kwargs)


def spell_out(call: Call) -> None:
    """Add to the arguments every default that is or holds a number, so that it can be varied."""
    try:
        signature = inspect.signature(call.function)
        bound = signature.bind(*call.args, **call.kwargs)
    except (TypeError, ValueError):
        return
    for name, parameter in signature.parameters.items():
        default = parameter.default
        if name in bound.arguments or not (kind_of(default) or holds_places(default)):
            continue
        if parameter.kind is not parameter.POSITIONAL_ONLY:
            call.kwargs[name] = default
        elif list(signature.parameters)[len(call.args)] == name:
            call.args.append(default)


def leaves(call: Call) -> list[Place]:
    """Return the places of all numbers that reach the callable: arguments first, globals last."""
    seen: set[int] = set()
    found: dict[str, Place] = {}
    for root in [*_arguments(call), *_owned(call.function, "target")]:
        for place in _numbers(root, seen, 0):
            found.setdefault(place.path, place)
    if isinstance(original(call.function), functools.partial):
        for name in call.kwargs:  # what is given by name wins
            found.pop(f"target.keywords[{name!r}]", None)
    for root in mentioned_globals(call.function):
        for place in _numbers(root, seen, 0):
            found.setdefault(place.path, place)
    return list(found.values())


def argument_name(call: Call, index: int) -> str:
    """Return the name of the parameter that a positional argument is for."""
    names = _parameter_names(call.function)
    return names[index] if index < len(names) else f"args[{index}]"


def _arguments(call: Call) -> Iterator[Place]:
    for index in range(len(call.args)):
        yield Place.of_item(call.args, index, argument_name(call, index))
    for name in list(call.kwargs):
        yield Place.of_item(call.kwargs, name, name)


def _parameter_names(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional]


def _owned(function: Any, path: str) -> Iterator[Place]:
    """Yield what the callable holds: ``self``, frozen arguments, closure cells."""
    function = original(function)
    if isinstance(function, types.MethodType):
        yield from _attributes(function.__self__, f"{path}.__self__")
        yield from _owned(function.__func__, path)
    elif isinstance(function, functools.partial):
        yield Place(f"{path}.args", lambda: function.args, functools.partial(_set_args, function))
        yield Place(f"{path}.keywords", lambda: function.keywords, _refuse)
        yield from _owned(function.func, path)
    elif isinstance(function, types.FunctionType):
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            yield Place.of_attribute(cell, "cell_contents", f"{path}:{name}")
    elif not isinstance(function, type) and hasattr(function, "__dict__"):
        yield from _attributes(function, path)


def _attributes(holder: Any, path: str) -> Iterator[Place]:
    """Yield the places in what a method is of, or in what is called: also one that is callable."""
    place = Place(path, lambda: holder, _refuse)
    if isinstance(holder, type):
        numbers = [name for name, held in vars(holder).items() if kind_of(held)]
        yield from (Place.of_attribute(holder, name, f"{path}.{name}") for name in numbers)
    elif isinstance(holder, nn.Module) or not callable(holder):
        yield place
    elif not of_torch(type(holder)):
        yield from attributes(place, holder)


def _set_args(function: "functools.partial[Any]", args: tuple[Any, ...]) -> None:
    function.__setstate__((function.func, args, function.keywords, vars(function)))  # type: ignore[attr-defined]  # not in typeshed


def _refuse(value: object) -> None:
    raise TypeError(f"this place cannot be set to {value!r}")


def _numbers(place: Place, seen: set[int], depth: int) -> Iterator[Place]:
    try:
        value = place.get()
    except ValueError:  # an empty cell
        return
    if kind_of(value):
        yield place
        return
    if id(value) in seen or depth > _DEEPEST:
        return
    seen.add(id(value))
    if isinstance(original(value), (types.FunctionType, types.MethodType, functools.partial)):
        for inner in _owned(value, place.path):
            yield from _numbers(inner, seen, depth + 1)
        return
    for child in children(place, skip=_MODULE_OWN if isinstance(value, nn.Module) else frozenset()):
        yield from _numbers(child, seen, depth + 1)
