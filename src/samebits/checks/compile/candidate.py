"""The compiled side of a comparison: the target under torch.compile, with a remedy or without."""

from typing import Any

import torch

from samebits.checks.compile import remedies
from samebits.checks.compile.discover import Call, argument_name, original
from samebits.checks.compile.sequence import Scenario


class Candidate:
    """The compiled function, with a remedy applied.

    Raises:
        ValueError: The remedy does not apply to this function or number.
    """

    def __init__(
        self, call: Call, scenario: Scenario, remedy: remedies.Remedy, *, compiled: bool
    ) -> None:
        self.call, self.scenario, self.remedy = call, scenario, remedy
        function: Any = call.function
        if remedy.tensor == "graph":
            function = remedies.inside(original(function), self._position(), self._like(call))
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
            holder[position] = remedies.as_tensor(holder[position], tensor)
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
