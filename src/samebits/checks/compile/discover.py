"""Find the numbers that reach a callable, wherever they live, and a way to set each of them.

Arguments (with defaults made explicit), items of dicts and sequences, fields of dataclasses,
attributes of modules and other objects, closure cells, and globals that the code mentions, through
the functions that it calls in its own package. Tensors are not numbers: a 0-d tensor is safe.
"""

import argparse
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from samebits.checks.compile.place import Place, attributes, children, kind_of, of_torch
from samebits.checks.compile.transport import names_used

_DEEPEST = 6
_MODULE_OWN = frozenset(vars(nn.Module())) | {"_is_hf_initialized", "_is_torch_compile"}


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
    """Add to the arguments every default that is a number, so that it can be varied."""
    try:
        signature = inspect.signature(call.function)
        bound = signature.bind(*call.args, **call.kwargs)
    except (TypeError, ValueError):
        return
    for name, parameter in signature.parameters.items():
        if name in bound.arguments or not kind_of(parameter.default):
            continue
        if parameter.kind is not parameter.POSITIONAL_ONLY:
            call.kwargs[name] = parameter.default
        elif list(signature.parameters)[len(call.args)] == name:
            call.args.append(parameter.default)


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
    for root in _globals(call.function, set()):
        for place in _numbers(root, seen, 0):
            found.setdefault(place.path, place)
    return list(found.values())


def original(function: Any) -> Any:
    """Return the function that ``torch.compile`` retained, or the one given."""
    while (inner := getattr(function, "_torchdynamo_orig_callable", None)) is not None:
        function = inner
    if isinstance(function, torch._dynamo.eval_frame.OptimizedModule):
        return function._orig_mod
    return function


def is_compiled(function: Any) -> bool:
    """Return whether ``function`` is itself, or calls in its package, a compiled function."""
    return original(function) is not function or any(
        original(other) is not other for other in _reached(function, set())
    )


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


def _globals(function: Any, seen: set[int]) -> Iterator[Place]:
    """Yield the globals that are or hold data, of ``function`` and of what it mentions."""
    for reached in [function, *_reached(function, seen)]:
        plain = _plain_function(reached)
        if plain is None:
            continue
        space = plain.__globals__
        for name in sorted(names_used(plain.__code__)):
            if name in space and _is_data(space[name], plain):
                yield Place.of_item(space, name, f"{plain.__module__}.{name}")


_DATA = (dict, list, tuple, nn.Module, types.SimpleNamespace, argparse.Namespace)


def _is_data(value: Any, user: types.FunctionType) -> bool:
    """Return whether a global is a number, or an object of options rather than, say, a logger."""
    if kind_of(value) or isinstance(value, _DATA):
        return True
    if callable(value) or isinstance(value, type):
        return False
    return dataclasses.is_dataclass(value) or _package(type(value)) == _package(user)


def _package(owner: Any) -> str:
    return str(owner.__module__ or "").partition(".")[0]


def _reached(function: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the functions that ``function`` mentions, directly or not, in its own package."""
    plain = _plain_function(function)
    if plain is None or id(plain) in seen:
        return
    seen.add(id(plain))
    package = _package(plain)
    cells = [_content(cell) for cell in plain.__closure__ or ()]
    mentioned = [plain.__globals__.get(name) for name in sorted(names_used(plain.__code__))]
    for value in [*cells, *mentioned]:
        for other in _functions_of(value):
            inner = _plain_function(other)
            if inner is not None and _package(inner) == package:
                yield other
                yield from _reached(other, seen)


def _functions_of(value: Any) -> list[Any]:
    if isinstance(value, type) and issubclass(value, torch.autograd.Function):
        return [value.forward, value.backward]
    if isinstance(value, nn.Module):
        return [type(module).forward for module in value.modules()]
    return [value] if callable(value) and not isinstance(value, type) else []


def _plain_function(function: Any) -> types.FunctionType | None:
    function = original(function)
    if isinstance(function, functools.partial):
        return _plain_function(function.func)
    if isinstance(function, nn.Module):
        function = type(function).forward
    if isinstance(function, types.MethodType):
        function = function.__func__
    function = inspect.unwrap(function) if isinstance(function, types.FunctionType) else function
    return function if isinstance(function, types.FunctionType) else None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
