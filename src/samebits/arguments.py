"""What callers give: one check for each kind of argument, and canonical spellings read back."""

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import SymInt, Tensor

from samebits.errors import must, unknown


def require_type(argument: str, value: object, kind: type) -> None:
    """Raise ``TypeError`` unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOUaeiou" else "a"
        raise TypeError(must(argument, f"be {article} {kind.__name__}", type(value).__name__))


def require_int(argument: str, value: object, *, minimum: int | None = None) -> None:
    """Raise unless ``value`` is an int (a traced size is one, a bool is not) from ``minimum`` on.

    Raises:
        TypeError: It is no int.
        ValueError: It is less than ``minimum``.
    """
    if isinstance(value, bool) or not isinstance(value, (int, SymInt)):
        raise TypeError(must(argument, "be an int", repr(value)))
    if minimum is not None and value < minimum:
        raise ValueError(must(argument, f"be >= {minimum}", value))


def require_bool(argument: str, value: object) -> None:
    """Raise ``TypeError`` unless ``value`` is a bool: what is only truthy is a mistake."""
    if not isinstance(value, bool):
        raise TypeError(must(argument, "be a bool", repr(value)))


def require_name(what: str, value: object, expected: Iterable[str]) -> None:
    """Raise unless ``value`` is one of the names ``expected``.

    Raises:
        TypeError: It is no text.
        ValueError: It is another text; the message lists the names.
    """
    if not isinstance(value, str):
        raise TypeError(must(what, "be a str", repr(value)))
    names = list(expected)
    if value not in names:
        raise ValueError(unknown(what, value, names))


def require_number(
    argument: str,
    value: object,
    *,
    above: float | None = None,
    least: float | None = None,
    hint: str = "",
) -> float:
    """Return ``value`` as a float; raise unless it is a finite number in its range.

    A 0-d tensor is refused: it would be read once and go stale.

    Args:
        argument: Its name.
        value: An int or a float.
        above: It must be greater than this.
        least: It must be at least this.
        hint: What else the message says of the range.

    Raises:
        TypeError: It is no plain Python number.
        ValueError: It is not finite, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(must(argument, "be a plain Python number", repr(value)))
    bound = f" and > {above:g}" if above is not None else ""
    bound += f" and >= {least:g}" if least is not None else ""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    inside = (above is None or number > above) and (least is None or number >= least)
    # By comparisons, which torch.compile traces, and which NaN fails.
    if not (-math.inf < number < math.inf and inside):
        raise ValueError(must(argument, f"be finite{bound}{hint}", repr(value)))
    # -0.0 and 0.0 are one number and must have one spelling.
    return number + 0.0


def require_indices(argument: str, value: object) -> Tensor:
    """Return a tensor of integers as int32 or int64; a mask or fractions would lose their meaning.

    Raises:
        TypeError: It is no tensor, or one of bools, floats or complex numbers.

    Determinism: exact.
    """
    require_type(argument, value, Tensor)
    assert isinstance(value, Tensor)
    kind = value.dtype
    if kind == torch.bool or kind.is_floating_point or kind.is_complex:
        raise TypeError(must(argument, "hold integers", kind))
    return value if kind == torch.int32 else value.to(torch.int64)


def at_least_one(text: str) -> int:
    """Return the int >= 1 that a word of the command line spells; for ``argparse``."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(must("the number", "be an int >= 1", repr(text)))
    return int(text)


# What a canonical spelling may hold besides names.
_BOOLS = {"True": True, "False": False}
Reader = Callable[[str], Any]


def read_options(what: str, items: Iterable[str], readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Return the values that items of the form ``name=value`` spell, by name.

    Args:
        what: What the names are, for messages.
        items: The items.
        readers: For each name, what turns its text into a value: ``int``, ``float``, ``read_bool``,
            or anything that raises ``ValueError``.

    Raises:
        ValueError: A name is unknown or given twice, or a text spells no value.
    """
    found: dict[str, Any] = {}
    for item in items:
        name, _, text = item.partition("=")
        if name not in readers:
            raise ValueError(unknown(what, name, readers))
        if name in found:
            raise ValueError(must(name, "be given once", "twice"))
        reader = readers[name]
        try:
            found[name] = reader(text)
        except ValueError:
            if reader not in (int, float, read_bool):
                raise
            kind = {int: "an int", float: "a number", read_bool: "True or False"}[reader]
            raise ValueError(must(name, f"be {kind}", repr(text))) from None
    return found


def read_bool(text: str) -> bool:
    """Return the bool that ``text`` spells."""
    if text not in _BOOLS:
        raise ValueError(must("a bool", "be True or False", repr(text)))
    return _BOOLS[text]
