"""The functions that a callable leads to in its own package, and the globals that they mention.

A function leads to those that it names: globals, closure cells, attributes of modules, and methods
of what the callable belongs to.
"""

import argparse
import dataclasses
import functools
import inspect
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from samebits.checks.compile.place import Place, is_object, kind_of
from samebits.checks.compile.transport import names_used


def original(function: Any) -> Any:
    """Return the function that ``torch.compile`` retained, or the one given."""
    while (inner := getattr(function, "_torchdynamo_orig_callable", None)) is not None:
        function = inner
    if isinstance(function, torch._dynamo.eval_frame.OptimizedModule):
        return function._orig_mod
    return function


def is_compiled(function: Any) -> bool:
    """Return whether ``function`` is itself, or leads to, a compiled function or module."""
    if original(function) is not function or _Walk(function).compiled:
        return True
    modules = function.modules() if isinstance(function, nn.Module) else ()
    return any(module._compiled_call_impl is not None for module in modules)


def mentioned_globals(function: Any) -> Iterator[Place]:
    """Yield the globals that are or hold data, of ``function`` and of what it leads to."""
    walk = _Walk(function)
    for plain in walk.found:
        space, names = plain.__globals__, _names(plain.__code__)
        for name in sorted(names_used(plain.__code__) & space.keys()):
            value = space[name]
            if _is_data(value, walk.packages):
                yield Place.of_item(space, name, f"{plain.__module__}.{name}")
            else:
                for holder in _namespaces(value, names, walk.packages):
                    yield from _numbers_named(holder, names, walk.packages)


class _Walk:
    """Follows names from a callable through the packages that it and its modules are of."""

    def __init__(self, function: Any) -> None:
        self.found: list[types.FunctionType] = []
        # Whether one of them is under torch.compile.
        self.compiled = False
        self._seen: set[int] = set()
        self._owners = _owners(function)
        first = [function, *_functions_of(original(function))]
        plains = [plain for f in first if (plain := _plain_function(f)) is not None]
        self.packages = {_package(owner) for owner in [*plains, *self._owners]} - {"torch", ""}
        for each in first:
            self._follow(each)

    def _follow(self, function: Any) -> None:
        plain = _plain_function(function)
        if plain is None or _package(plain) not in self.packages:
            return
        self.compiled |= original(function) is not function
        if id(plain) in self._seen:
            return
        self._seen.add(id(plain))
        self.found.append(plain)
        for value in [*_in_wrappers(function), *self._mentioned(plain)]:
            for inner in _functions_of(value):
                self._follow(inner)

    def _mentioned(self, plain: types.FunctionType) -> Iterator[Any]:
        names = _names(plain.__code__)
        yield from _contents(plain)
        for name in sorted(names & plain.__globals__.keys()):
            value = plain.__globals__[name]
            yield value
            for holder in _namespaces(value, names, self.packages):
                yield from (vars(holder)[name] for name in sorted(names & vars(holder).keys()))
        for owner in self._owners:
            yield from (vars(owner)[name] for name in sorted(names & vars(owner).keys()))


def _names(code: types.CodeType) -> set[str]:
    """Return all names in ``code`` and the code inside it, those of attributes too."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _owners(function: Any) -> list[type]:
    """Return the classes of the object that a method or module is of, and of its modules."""
    plain = original(function)
    holder = getattr(plain, "__self__", plain)
    holders = list(holder.modules()) if isinstance(holder, nn.Module) else [holder]
    owners: dict[type, None] = {}
    for each in holders:
        if isinstance(each, nn.Module) or is_object(each):
            owners |= dict.fromkeys(type(each).__mro__)
    return [owner for owner in owners if _package(owner) not in ("torch", "builtins")]


def _namespaces(value: Any, names: set[str], packages: set[str]) -> Iterator[Any]:
    """Yield ``value`` if it is a module or class of these packages, and those named inside it."""
    if isinstance(value, type) and _package(value) in packages:
        yield value
    if not isinstance(value, types.ModuleType) or value.__name__.partition(".")[0] not in packages:
        return
    yield value
    for name in sorted(names & vars(value).keys()):
        inner = vars(value)[name]
        is_module = isinstance(inner, types.ModuleType)
        # Modules that it holds, not those that hold it: a package may import itself.
        if not is_module or inner.__name__.startswith(f"{value.__name__}."):
            yield from _namespaces(inner, names, packages)


def _numbers_named(holder: Any, names: set[str], packages: set[str]) -> Iterator[Place]:
    """Yield the places of data in a module or class, as far as they are named."""
    path = holder.__name__
    if isinstance(holder, type):
        path = f"{holder.__module__}.{holder.__qualname__}"
    for name in sorted(names & vars(holder).keys()):
        if _is_data(vars(holder)[name], packages):
            yield Place.of_attribute(holder, name, f"{path}.{name}")


# Longer tables are data.
_LONGEST = 64
_DATA = (dict, list, tuple, nn.Module, types.SimpleNamespace, argparse.Namespace)


def _is_data(value: Any, packages: set[str]) -> bool:
    """Return whether a global is a number, or an object of options rather than, say, a logger."""
    if kind_of(value) or isinstance(value, _DATA):
        return True
    if isinstance(value, (type, types.ModuleType)) or (callable(value) and not is_object(value)):
        return False
    return dataclasses.is_dataclass(value) or _package(type(value)) in packages


def _package(owner: Any) -> str:
    return str(getattr(owner, "__module__", "") or "").partition(".")[0]


def _functions_of(value: Any, depth: int = 2) -> list[Any]:
    """Return the functions that are, or are behind, a value; those in a table of functions too."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        items = value[:_LONGEST] if depth else ()
        return [function for item in items for function in _functions_of(item, depth - 1)]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
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
    elif is_object(function):
        function = type(function).__call__
    if isinstance(function, types.MethodType):
        function = function.__func__
    function = inspect.unwrap(function) if isinstance(function, types.FunctionType) else function
    return function if isinstance(function, types.FunctionType) else None


def _in_wrappers(function: Any) -> Iterator[Any]:
    """Yield what is in the closures of decorators around a function."""
    while isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__"):
        yield from _contents(function)
        function = function.__wrapped__


def _contents(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents
