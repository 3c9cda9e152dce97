"""A place that holds a value, the places inside it, and other values for a number in it."""

import dataclasses
import enum
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

Kind = Literal["float", "int", "bool"]
Number = float | int | bool

# Longer sequences are data, not options.
_LONGEST = 16

# A sequence needs the value it has and three others; a bool has one other.
WANTED = 3

_FACTORS = (0.5, 2.0, 0.75, 1.5, 0.25, 1.25, 4.0, 0.9, 1.1)
# Instead of zero, infinity and NaN, which no factor changes.
_INSTEAD = (0.5, 0.25, 2.0, 0.125, 3.0, 1e-3)
_STEPS = (1, 2, 3, -1, 5, 4, 16, -2, 8)


def kind_of(value: object) -> Kind | None:
    """Return the kind of a Python number, None for everything else."""
    for kind in (bool, int, float):
        if type(value) is kind:
            return kind.__name__  # type: ignore[return-value]  # the three names of Kind
    return None


def candidates(value: Number) -> Iterator[Number]:
    """Yield values to try instead of ``value``, of the same kind, the likeliest first.

    Never 0 or 1, which compilers treat specially.
    """
    kind: Kind | None = kind_of(value)
    if kind == "bool":
        yield not value
    elif kind == "int":
        yield from (value + step for step in _STEPS)
        yield value * 2
    elif value == 0.0 or not math.isfinite(value):
        yield from (math.copysign(other, value) for other in _INSTEAD)
    else:
        scaled = (value * factor for factor in _FACTORS)
        yield from (other for other in scaled if other not in (0.0, 1.0))


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a value is: a readable path, and functions that read and write it."""

    path: str
    get: Callable[[], Any]
    set: Callable[[Any], None]

    @classmethod
    def of_item(cls, holder: Any, key: Any, path: str) -> "Place":
        """Return the place of ``holder[key]``."""

        def write(value: Any) -> None:
            holder[key] = value

        return cls(path, lambda: holder[key], write)

    @classmethod
    def of_attribute(cls, holder: Any, name: str, path: str) -> "Place":
        """Return the place of ``holder.name``; frozen objects are written to all the same."""

        def write(value: Any) -> None:
            try:
                setattr(holder, name, value)
            except dataclasses.FrozenInstanceError:
                object.__setattr__(holder, name, value)

        return cls(path, lambda: getattr(holder, name), write)


def children(place: Place, skip: frozenset[str] = frozenset()) -> Iterator[Place]:
    """Yield the places inside the value at ``place`` that could hold numbers.

    Args:
        place: Of a container, dataclass, module or other plain object.
        skip: Names of attributes to leave out.
    """
    value = place.get()
    if isinstance(value, dict):
        for key in list(value):
            yield Place.of_item(value, key, f"{place.path}[{key!r}]")
    elif isinstance(value, list):
        for index in range(min(len(value), _LONGEST)):
            yield Place.of_item(value, index, f"{place.path}[{index}]")
    elif isinstance(value, tuple):
        yield from _of_tuple(place, value)
    elif _open(value):
        yield from attributes(place, value, skip)


def _of_tuple(place: Place, value: tuple[Any, ...]) -> Iterator[Place]:
    names = getattr(value, "_fields", None)
    for index in range(min(len(value), _LONGEST)):

        def write(item: Any, index: int = index) -> None:
            items = list(place.get())
            items[index] = item
            place.set(type(value)(*items) if names else tuple(items))

        path = f"{place.path}.{names[index]}" if names else f"{place.path}[{index}]"
        yield Place(path, lambda index=index: place.get()[index], write)  # type: ignore[misc]


def attributes(place: Place, value: Any, skip: frozenset[str] = frozenset()) -> Iterator[Place]:
    """Yield the places of the attributes of an object: its own, and numbers of its class."""
    if isinstance(value, nn.Module):
        for name in value._modules:
            yield Place.of_attribute(value, name, f"{place.path}.{name}")
    names = [*getattr(value, "__dict__", {}), *_slots(value)]
    if dataclasses.is_dataclass(value):
        names = [*(f.name for f in dataclasses.fields(value)), *names]
    # Numbers of its class; another value is then one of the object.
    for owner in type(value).__mro__:
        if not of_torch(owner):
            names += [name for name, held in vars(owner).items() if kind_of(held)]
    for name in dict.fromkeys(names):
        if name not in skip and not name.startswith("__"):
            yield Place.of_attribute(value, name, f"{place.path}.{name}")


def holds_places(value: Any) -> bool:
    """Return whether numbers can be inside a value: a container, or an object with attributes."""
    return isinstance(value, (dict, list, tuple)) or _open(value)


def is_object(value: Any) -> bool:
    """Return whether a value is an object of a class in Python, also one that can be called."""
    if isinstance(value, (type, types.ModuleType)) or of_torch(type(value)):
        return False
    return not callable(value) or isinstance(type(value).__call__, types.FunctionType)


def _open(value: Any) -> bool:
    """Return whether ``value`` is an object whose attributes can be options."""
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, (enum.Enum, torch.Tensor, str, bytes)) or not is_object(value):
        return False
    return hasattr(value, "__dict__") or dataclasses.is_dataclass(value) or bool(_slots(value))


def _slots(value: Any) -> list[str]:
    """Return the slots that classes of its own give an object, those without a value left out."""
    names: list[str] = []
    for owner in type(value).__mro__:
        slots = vars(owner).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if hasattr(value, name)]


def of_torch(owner: type) -> bool:
    """Return whether a class is one of PyTorch's or Triton's."""
    return (owner.__module__ or "").partition(".")[0] in ("torch", "triton")
