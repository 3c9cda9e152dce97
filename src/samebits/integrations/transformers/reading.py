"""Record what the code of a class reads of the module it runs on."""

import types
from functools import partial
from typing import Any

from torch import Tensor, nn

from samebits.errors import UnsupportedError
from samebits.integrations.transformers.translation import Fact, read

_PLAIN = (bool, str, type(None))
# Sizes: taken from the parameters themselves, which sharding may change.
_SIZES = ("num_experts", "hidden_", "intermediate_")


class Record:
    """What was read, by path from the module."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], Any] = {}

    def add(self, path: tuple[str, ...], value: Any) -> None:
        """Note that ``value`` was read at ``path``; of a submodule, note all that it holds."""
        self.values[path] = value
        if not isinstance(value, nn.Module):
            return
        for name, held in vars(value).items():
            if not name.startswith("_") and name != "training":
                self.add((*path, name), held)
        for name, held in (
            *value.named_parameters(recurse=False),
            *value.named_buffers(recurse=False),
        ):
            self.add((*path, name), held)
        for name, child in value.named_children():
            self.add((*path, name), child)

    def numbers(self, *, but: tuple[str, ...]) -> list[float]:
        """Return the numbers that were read, except sizes and those below the names ``but``."""
        return [
            float(value)
            for path, value in self.values.items()
            if _is_number(value) and not path[-1].startswith(_SIZES) and path[0] not in but
        ]

    def refuse_strange(self, tensors: set[str]) -> None:
        """Raise ``UnsupportedError`` for a read that a translation cannot describe."""
        for path, value in self.values.items():
            name = ".".join(path)
            if isinstance(value, Tensor) and name not in tensors:
                raise UnsupportedError(f"its code reads the tensor {name}")
            if path[-1] == "training":
                raise UnsupportedError("its code depends on train() and eval()")
            if isinstance(value, nn.modules.dropout._DropoutNd) and value.p > 0:
                raise UnsupportedError(f"its code applies dropout ({name})")
            known = (Tensor, nn.Module, int, float, *_PLAIN)
            if not isinstance(value, known) and not callable(value):
                raise UnsupportedError(f"its code reads {name}, a {type(value).__name__}")

    def facts(self, module: nn.Module) -> list[Fact]:
        """Return what was read, with the values that ``module`` has."""
        facts = []
        for path in self.values:
            value = read(module, path)
            if isinstance(value, Tensor) or path[-1].startswith(_SIZES):
                continue
            facts.append(_fact(path, value))
        return facts


def _fact(path: tuple[str, ...], value: Any) -> Fact:
    if _is_number(value):
        return Fact(path, "number", repr(float(value)))
    if isinstance(value, _PLAIN):
        return Fact(path, "plain", value)
    if isinstance(value, nn.Module):
        return Fact(path, "type", type(value))
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return Fact(path, "function", value)
    if isinstance(value, types.MethodType):
        return Fact(path, "method", value.__func__)
    if isinstance(value, partial):
        return Fact(path, "partial", (value.func, value.args, tuple(value.keywords.items())))
    return Fact(path, "object", value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Reader:
    """Stand in for a module as ``self`` of its class's code, and record what is read."""

    def __init__(self, target: Any, record: Record, path: tuple[str, ...] = ()) -> None:
        self.__dict__["_reader"] = (target, record, path)

    def __getattr__(self, name: str) -> Any:
        target, record, path = self.__dict__["_reader"]
        value = getattr(target, name)
        method = getattr(type(target), name, None)
        if isinstance(method, types.FunctionType) and name not in vars(target):
            # A method runs on the reader too, so that its reads are recorded.
            return types.MethodType(method, self)
        if name == "config":
            return Reader(value, record, (*path, name))
        record.add((*path, name), value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        raise UnsupportedError(f"its code sets {name} while it runs")
