"""Send a callable that no name leads to (a lambda, a function in a test) to another process.

Functions that their module does not hold by name travel by value: code, defaults, closure cells and
the globals that they mention. Everything else is pickled as usual, by name. The receiving process
must run the same Python.
"""

import dis
import importlib
import importlib.util
import io
import marshal
import pickle
import sys
import types
from collections.abc import Callable
from pickle import PicklingError
from typing import Any


def pack(value: object) -> bytes:
    """Return ``value`` as bytes for ``unpack``.

    Raises:
        TypeError, pickle.PicklingError, AttributeError: Something in it can be sent neither by name
            nor by value, such as an object of a class defined inside a function.
    """
    stream = io.BytesIO()
    _Packer(stream).dump(value)
    return stream.getvalue()


def unpack(data: bytes) -> Any:
    """Return what ``pack`` packed; run it only on bytes of your own."""
    return pickle.loads(data)


def names_used(code: types.CodeType) -> set[str]:
    """Return the names of globals that ``code`` and the code inside it load."""
    used = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            used |= names_used(constant)
    return used


def by_name(function: types.FunctionType) -> bool:
    """Return whether a fresh process finds ``function`` by importing its module."""
    module = sys.modules.get(function.__module__)
    if module is None or module.__name__ == "__main__" or module.__spec__ is None:
        return False
    found: Any = module
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not function:
        return False
    try:
        return importlib.util.find_spec(module.__name__) is not None
    except (ImportError, ValueError):
        return False


class _Packer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, types.FunctionType) and not by_name(value):
            return _reduce_function(value)
        if isinstance(value, types.CellType):
            return _reduce_cell(value)
        return NotImplemented


def _reduce_function(function: types.FunctionType) -> tuple[Any, ...]:
    original = getattr(function, "_torchdynamo_orig_callable", None)
    if original is not None:
        message = "a function under torch.compile travels by name only; define it in a module"
        raise PicklingError(message)
    code = marshal.dumps(function.__code__)
    skeleton = (code, function.__module__, function.__name__, function.__qualname__)
    needed = names_used(function.__code__)
    state = {
        "globals": {k: v for k, v in function.__globals__.items() if k in needed},
        "defaults": function.__defaults__,
        "kwdefaults": function.__kwdefaults__,
        "annotations": _plain_annotations(function),
        "cells": function.__closure__ or (),
    }
    return _skeleton, skeleton, state, None, None, _fill


def _plain_annotations(function: types.FunctionType) -> dict[str, Any]:
    return {k: v for k, v in function.__annotations__.items() if isinstance(v, (type, str))}


def _skeleton(code: bytes, module: str, name: str, qualname: str) -> types.FunctionType:
    compiled = marshal.loads(code)
    cells = tuple(types.CellType() for _ in compiled.co_freevars)
    # One dictionary for each function: what one sets, another of the same module does not see.
    made = types.FunctionType(compiled, {"__builtins__": __builtins__}, name, None, cells)
    made.__module__, made.__qualname__ = module, qualname
    return made


def _fill(function: types.FunctionType, state: dict[str, Any]) -> None:
    function.__globals__.update(state["globals"])
    function.__globals__.setdefault("__name__", function.__module__)
    function.__defaults__ = state["defaults"]
    function.__kwdefaults__ = state["kwdefaults"]
    function.__annotations__ = state["annotations"]
    for cell, sent in zip(function.__closure__ or (), state["cells"], strict=True):
        if sent is not None:
            cell.cell_contents = sent.cell_contents


def _reduce_cell(cell: types.CellType) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    try:
        return _cell, (cell.cell_contents,)
    except ValueError:  # empty
        return _cell, ()


def _cell(*contents: Any) -> types.CellType:
    # Pickle finds the function by its name, not the type.
    return types.CellType(*contents)
