"""Find the experts classes of the installed transformers, whatever they are called.

A class is found by the function that transformers' decorator ``use_experts_implementation`` puts in
place of its ``forward``: all decorated classes share that function's code object. There is no list
of names here, so a class that a new version (or a user's own module) adds is found too.
"""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType

import transformers.models
from torch import nn

from samebits.errors import UnsupportedError
from samebits.integrations.transformers.interface import load

_DECORATOR = "use_experts_implementation"
# What importing a model's module raises where one of its optional packages is missing or too old.
_IMPORT_ERRORS = (ImportError, AttributeError, RuntimeError, OSError)


@dataclass(frozen=True, slots=True)
class ExpertsClass:
    """One decorated class, not built."""

    # "<model>.<Class>", unique among those found.
    name: str
    experts: type[nn.Module]
    module: ModuleType


@dataclass(frozen=True, slots=True)
class BrokenModule:
    """A module that uses the decorator and cannot be imported here."""

    name: str
    reason: str


@cache
def decorated_code() -> CodeType:
    """Return the code object of the ``forward`` that the decorator puts into a class.

    Raises:
        UnsupportedError: This transformers decorates experts classes in another way.
    """
    decorate = getattr(load().moe, _DECORATOR)

    class Probe(nn.Module):
        def forward(self) -> None:
            """Stand for any experts class."""

    original = Probe.__dict__["forward"].__code__
    code: CodeType = decorate(Probe).forward.__code__
    if code is original:
        raise UnsupportedError(f"{_DECORATOR} does not replace forward here")
    return code


def is_decorated(experts: type) -> bool:
    """Return whether ``experts`` itself (not a parent) is dispatched by the experts interface.

    The FP8 twin of the interface uses the same decorator; its class is not the model's own code.
    """
    forward = experts.__dict__.get("forward")
    if forward is None or getattr(forward, "__code__", None) is not decorated_code():
        return False
    interface = inspect.getclosurevars(forward).nonlocals.get("experts_interface")
    return interface is None or interface is load().moe.ALL_EXPERTS_FUNCTIONS


def discover() -> list[ExpertsClass | BrokenModule]:
    """Return every decorated class of transformers' models and of any module already imported.

    Raises:
        UnsupportedError: See ``decorated_code``.

    Determinism: sorted by name.
    """
    decorated_code()
    found: dict[str, ExpertsClass | BrokenModule] = {}
    for name in _model_modules():
        try:
            importlib.import_module(name)
        except _IMPORT_ERRORS as error:
            model = name.split(".")[-2]
            found[model] = BrokenModule(model, f"{name} cannot be imported: {error}")
    for module in list(sys.modules.values()):
        for experts in _classes(module):
            name = f"{_model_name(module)}.{experts.__name__}"
            if name in found and isinstance(found[name], ExpertsClass):
                name = f"{module.__name__}.{experts.__name__}"
            found[name] = ExpertsClass(name, experts, module)
    return [found[name] for name in sorted(found)]


def _model_modules() -> Iterator[str]:
    """Yield the modules below ``transformers.models`` whose source mentions the decorator."""
    for package in pkgutil.iter_modules(transformers.models.__path__):
        spec = find_spec(f"transformers.models.{package.name}") if package.ispkg else None
        for folder in (spec and spec.submodule_search_locations) or ():
            for file in sorted(Path(folder).glob("modeling_*.py")):
                if _DECORATOR in file.read_text(encoding="utf-8"):
                    yield f"transformers.models.{package.name}.{file.stem}"


def _classes(module: ModuleType) -> list[type[nn.Module]]:
    # A module may have replaced itself in sys.modules by any object.
    if not issubclass(type(module), ModuleType):
        return []
    # type() asks no value for its __class__: some answer with a deprecation warning.
    classes = [value for value in list(vars(module).values()) if issubclass(type(value), type)]
    return [c for c in classes if c.__module__ == module.__name__ and is_decorated(c)]


def _model_name(module: ModuleType) -> str:
    parts = module.__name__.split(".")
    if parts[:2] == ["transformers", "models"] and len(parts) > 3:
        return parts[-2]
    return parts[-1].removeprefix("modeling_")
