"""The compiled side of a comparison: the target under torch.compile, with a remedy or without.

A remedy changes a setting (nothing to edit, but for the whole process or function), or how the
number reaches the graph (an edit, but local).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samebits.checks.compile.discover import Call, argument_name, original
from samebits.checks.compile.sequence import Scenario


class Remedy(NamedTuple):
    """A way out: what to write, and how the audit applies it."""

    # What to write, for the report.
    code: str
    # Settings of torch by module path, applied while the sequence runs.
    settings: Mapping[str, Mapping[str, object]] = {}
    # Arguments of torch.compile; a function that is compiled already keeps its own.
    compile: Mapping[str, object] = {}
    # "argument": pass a 0-d tensor; "graph": make one inside; None leaves the number alone.
    tensor: str | None = None


AS_IT_IS = "as it is"

REMEDIES: Mapping[str, Remedy] = {
    AS_IT_IS: Remedy("nothing changed"),
    "0-d tensor argument": Remedy("fn(…, torch.tensor(value))", tensor="argument"),
    "new_ones": Remedy("value = x.new_ones(()) * value  # first line of fn", tensor="graph"),
    "specialize_float": Remedy(
        "torch._dynamo.config.specialize_float = True",
        {"torch._dynamo.config": {"specialize_float": True}},
    ),
    "dynamic=False": Remedy(
        "torch.compile(fn, dynamic=False)",
        {
            "torch._dynamo.config": {
                "automatic_dynamic_shapes": False,
                "assume_static_by_default": True,
            }
        },
        {"dynamic": False},
    ),
    "AOT cache off": Remedy(
        "torch._functorch.config.enable_autograd_cache = False",
        {"torch._functorch.config": {"enable_autograd_cache": False}},
    ),
    "aot_eager": Remedy('torch.compile(fn, backend="aot_eager")', compile={"backend": "aot_eager"}),
}


@contextmanager
def settings(changes: Mapping[str, Mapping[str, object]]) -> Iterator[None]:
    """Apply settings of torch for a while.

    Raises:
        AttributeError: This torch has no such setting.
    """
    with ExitStack() as stack:
        for path, values in changes.items():
            config: Any = torch
            for part in path.split(".")[1:]:
                config = getattr(config, part)
            stack.enter_context(config.patch(dict(values)))
        yield


def as_tensor(value: object, like: Tensor) -> Tensor:
    """Return the number as a 0-d tensor of ``like``'s dtype and device."""
    return torch.tensor(value, dtype=like.dtype, device=like.device)


def inside(function: Callable[..., Any], name: str | int, like: str | int) -> Callable[..., Any]:
    """Return ``function`` with one argument made a tensor first, inside the graph.

    Args:
        function: Eager.
        name: Position or keyword of the number.
        like: Position or keyword of a float tensor.
    """

    def with_tensor(*args: Any, **kwargs: Any) -> Any:
        positional, keywords = list(args), dict(kwargs)
        tensor = keywords[like] if isinstance(like, str) else positional[like]
        holder: Any = keywords if isinstance(name, str) else positional
        holder[name] = tensor.new_ones(()) * holder[name]
        return function(*positional, **keywords)

    return with_tensor


class Candidate:
    """The compiled function, with a remedy applied.

    Raises:
        ValueError: The remedy does not apply to this function or number.
    """

    def __init__(self, call: Call, scenario: Scenario, remedy: Remedy, *, compiled: bool) -> None:
        self.call, self.scenario, self.remedy = call, scenario, remedy
        function: Any = call.function
        if remedy.tensor == "graph":
            function = inside(original(function), self._position(), self._like(call))
            self.run = torch.compile(function, dynamic=scenario.dynamic)
        elif compiled:
            if "backend" in remedy.compile:
                raise ValueError("the function chooses its own backend")
            self.run = function
        else:
            settings: dict[str, Any] = {"dynamic": scenario.dynamic, **remedy.compile}
            self.run = torch.compile(_plain(function), **settings)

    def prepare(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments as the remedy passes them."""
        if self.remedy.tensor == "argument":
            position = self._position()
            holder: Any = kwargs if isinstance(position, str) else args
            like = self._like(Call(self.run, args, kwargs))
            tensor = (kwargs if isinstance(like, str) else args)[like]  # type: ignore[index]
            holder[position] = as_tensor(holder[position], tensor)
        return args, kwargs

    def _position(self) -> str | int:
        call, path = self.call, self.scenario.options[0].path
        if path in call.kwargs:
            return path
        for index in range(len(call.args)):
            if argument_name(call, index) == path:
                return index
        raise ValueError("the number is not an argument: the function itself must be edited")

    def _like(self, call: Call) -> str | int:
        items = [*enumerate(call.args), *call.kwargs.items()]
        for position, value in items:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return position  # type: ignore[return-value]  # int or str
        raise ValueError("no argument is a float tensor")


def _plain(function: Any) -> Any:
    """Return something that torch.compile takes for what it does not, such as a partial."""
    if isinstance(function, torch.nn.Module) or hasattr(function, "__code__"):
        return function
    if hasattr(function, "__func__"):
        return function

    def target(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return target
