"""What TARGET names on the command line: an object of anyone's module."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from samebits.checks.result import FOREIGN_ERRORS
from samebits.errors import must


class TargetError(ValueError):
    """The target or its inputs cannot be used; the message says what is wrong with them."""


def resolve(name: str, argument: str) -> Any:
    """Return the object that ``module:attribute.attribute`` names.

    Raises:
        TargetError: The form is wrong, the module does not import, or has no such attribute.
    """
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise TargetError(must(argument, "look like package.module:function", repr(name)))
    value: Any = import_foreign(module_name, argument)
    for part in path.split("."):
        owner = value.__name__ if isinstance(value, ModuleType) else type(value).__name__
        try:
            value = getattr(value, part)
        except AttributeError:
            reason = f"{owner} has no attribute {part!r}"
            raise TargetError(f"{argument} {name!r}: {reason}") from None
        except FOREIGN_ERRORS as error:  # a module that imports its parts when they are asked for
            reason = f"{owner}.{part} raises {type(error).__name__}: {error}"
            raise TargetError(f"{argument} {name!r}: {reason}") from error
    return value


def import_foreign(name: str, argument: str) -> ModuleType:
    """Return a module of anyone's; the working directory is searched first.

    Raises:
        TargetError: It does not import, whatever it raises.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return import_module(name)
    except FOREIGN_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
        raise TargetError(f"{argument}: module {name!r} does not import: {reason}") from error
