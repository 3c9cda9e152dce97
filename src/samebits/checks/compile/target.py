"""What is audited: a callable and a factory of its inputs, found again in every process by name."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from samebits.checks.compile.transport import unpack
from samebits.checks.result import FOREIGN_ERRORS
from samebits.checks.target import TargetError as TargetError
from samebits.checks.target import import_foreign
from samebits.checks.target import resolve as resolve
from samebits.errors import must

Inputs = tuple[Sequence[Any], dict[str, Any]]
Factory = Callable[..., Inputs]

SEED = 1234
_GUESSED_SHAPE = (4, 8)
_GUESSED_NUMBERS: Mapping[type, object] = {float: 0.75, int: 2, bool: False}


@dataclass(frozen=True, slots=True)
class Target:
    """Names from which each process loads the callable and its factory."""

    # "package.module:function", also of a method or module: "package.module:object.attribute".
    name: str
    # "module:factory"; None takes ``make_inputs`` beside the callable, or guesses.
    inputs: str | None = None
    # File with a packed (callable, factory), for callables that no name leads to.
    packed: str | None = None


def load(target: Target) -> tuple[Callable[..., Any], Factory]:
    """Return the callable and the factory of its inputs.

    Raises:
        TargetError: A name leads nowhere, or no inputs can be made.
    """
    if target.packed is not None:
        function, factory = unpack(Path(target.packed).read_bytes())
        return function, factory
    function = resolve(target.name, "TARGET")
    if not callable(function):
        raise TargetError(must("TARGET", "name a callable", type(function).__name__))
    if target.inputs is not None:
        return function, resolve(target.inputs, "--inputs")
    beside = getattr(import_foreign(target.name.partition(":")[0], "TARGET"), "make_inputs", None)
    if beside is not None:
        return function, beside
    return function, lambda: guess_inputs(function)


def require_callable(argument: str, value: object) -> None:
    """Raise ``TypeError`` unless ``value`` is callable, and say what to give instead."""
    if not callable(value):
        rule = "be callable"
        if argument == "make_inputs":
            rule = "be a function that returns (args, kwargs)"
        raise TypeError(must(argument, rule, _form(value)))


def fits(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ``TargetError`` where the function does not take these arguments."""
    # A module's call takes anything; its forward says what.
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise TargetError(f"{name} does not take what make_inputs() returns: {error}") from error


def make(factory: Factory, *, second_shape: bool = False) -> Inputs:
    """Return what the factory makes, from a fixed seed.

    Args:
        factory: Takes nothing, or ``second_shape`` where it knows how to make another shape.
        second_shape: Ask for the other shape.

    Raises:
        TargetError: The factory raises, or returns something other than ``(args, kwargs)``.
    """
    torch.manual_seed(SEED)
    try:
        made = factory(second_shape=True) if second_shape else factory()
    except TargetError:
        raise
    except FOREIGN_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
        raise TargetError(f"the factory of inputs raises {reason}") from error
    if not (
        isinstance(made, tuple)
        and len(made) == 2
        and isinstance(made[0], (tuple, list))
        and isinstance(made[1], dict)
    ):
        rule = "return (args, kwargs), a tuple and a dict such as ((x, 0.5), {})"
        raise TargetError(must("make_inputs()", rule, _form(made)))
    return tuple(made[0]), dict(made[1])


def _form(value: object) -> str:
    """Return the type of a value, of a tuple those of its items."""
    if not isinstance(value, tuple):
        return type(value).__name__
    items = [type(item).__name__ for item in value]
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def knows_second_shape(factory: Factory) -> bool:
    """Return whether the factory has a parameter named ``second_shape``."""
    try:
        return "second_shape" in inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False


def guess_inputs(function: Callable[..., Any]) -> Inputs:
    """Return inputs by the parameters' annotations; those with a default keep it.

    A parameter annotated as a tensor, or not at all, gets a (4, 8) normal tensor; a float 0.75, an
    int 2, a bool False.

    Raises:
        TargetError: A parameter has another annotation, or the callable has no signature.
    """
    # A module's call takes anything; its forward says what.
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError) as error:
        raise TargetError(f"no inputs can be guessed ({error}); give --inputs") from error
    hints = _hints(called)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        value = _guess(parameter.name, hints.get(parameter.name, torch.Tensor))
        if parameter.kind is parameter.KEYWORD_ONLY:
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(inspect.unwrap(function))
    except (NameError, TypeError, AttributeError):
        return {}


def _guess(name: str, hint: Any) -> Any:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for option in typing.get_args(hint) if union else (hint,):
        if option in _GUESSED_NUMBERS:
            return _GUESSED_NUMBERS[option]
        if isinstance(option, type) and issubclass(option, torch.Tensor):
            return torch.randn(_GUESSED_SHAPE)
    said = inspect.formatannotation(hint)
    raise TargetError(f"no value of {name!r} ({said}) can be guessed; give --inputs module:factory")
