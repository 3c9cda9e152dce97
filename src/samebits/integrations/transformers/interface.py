"""The parts of transformers that the plug-in rests on, found or refused by name.

Everything here changes with transformers, and nothing else in the package imports it.
"""

import importlib
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from samebits.errors import UnsupportedError

MINIMUM = "5.17"

# What each module of transformers must hold.
_NEEDED = {
    "transformers.integrations.moe": (
        "ExpertsInterface",
        "ALL_EXPERTS_FUNCTIONS",
        "use_experts_implementation",
    ),
    "transformers.integrations.finegrained_fp8": (
        "FP8ExpertsInterface",
        "ALL_FP8_EXPERTS_FUNCTIONS",
    ),
}


class Interface(NamedTuple):
    """The modules that define the experts interface and its FP8 twin."""

    moe: ModuleType
    fp8: ModuleType


def load() -> Interface:
    """Return transformers' experts interface.

    Raises:
        ImportError: transformers is absent, cannot be imported, or has no experts interface.
    """
    return Interface(*(_module(name, names) for name, names in _NEEDED.items()))


def _module(name: str, names: tuple[str, ...]) -> ModuleType:
    try:
        transformers = importlib.import_module("transformers")
        module = importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"samebits.integrations.transformers needs transformers >= {MINIMUM}: {error}\n"
            "hint: pip install 'samebits[transformers]'"
        ) from error
    missing = [n for n in names if not hasattr(module, n)]
    if missing:
        raise ImportError(
            f"samebits.integrations.transformers needs transformers >= {MINIMUM}: {name} of "
            f"transformers {transformers.__version__} has no {', '.join(missing)}"
        )
    return module


def is_decorated(module: nn.Module, interface: Interface) -> bool:
    """Return whether the interface decides which function runs as the forward of ``module``."""
    forward = type(module).forward
    code = getattr(forward, "__code__", None)
    return (
        code is not None
        and code.co_filename == interface.moe.__file__
        and hasattr(forward, "__wrapped__")
    )


def own_forward(module: nn.Module) -> Any:
    """Return the function that the class of ``module`` defined before it was decorated.

    Raises:
        UnsupportedError: The decorator does not keep it.
    """
    forward = getattr(type(module).forward, "__wrapped__", None)
    if forward is None:
        raise UnsupportedError(
            "this transformers does not keep the class's own forward to verify against"
        )
    return forward
