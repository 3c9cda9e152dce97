"""Read the fields of a foreign configuration, and refuse options that nobody read."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from samebits.errors import UnsupportedError, must

# Fields whose names say that they change what an expert computes.
_OPTION = re.compile(
    r"swiglu|limit|softcap|situ|alpha|tanh|on_input|interleave|clamp|linear_offset", re.IGNORECASE
)
_ABSENT = object()


class Fields:
    """The fields of one configuration, and a record of those that were read.

    Args:
        values: Field → value.
        source: What messages call the configuration.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._read: set[str] = set()
        self.source = source

    def get(self, *names: str, default: Any = _ABSENT) -> Any:
        """Return the value of the first of ``names`` that is there; several are one field's names.

        Raises:
            ValueError: None of them is there and no default is given, or two of them disagree.
        """
        self._read.update(names)
        found = {name: self._values[name] for name in names if self._values.get(name) is not None}
        if not found:
            if default is _ABSENT:
                rule = f"hold {' or '.join(names)}"
                hint = "hint: pass the configuration object, which holds the defaults of its class"
                raise ValueError(must(self.source, rule, f"neither is there\n{hint}"))
            return default
        (first, value), *others = found.items()
        for name, other in others:
            if other != value:
                raise ValueError(must(name, f"be {first} = {value!r}", repr(other)))
        return value

    def limit(self, name: str, layer: int, layers: int) -> float | None:
        """Return a limit, or that of ``layer`` where it is a list of one for each layer.

        None is "off". In a list 0 is "off" too, as the models that have such lists say; alone it is
        returned, and no limit of an ``Activation``.

        Raises:
            ValueError: A list has fewer numbers than the model has layers.
        """
        value = self.get(name, default=None)
        if isinstance(value, (list, tuple)):
            if len(value) < layers:
                rule = f"hold one number for each of {layers} layers"
                raise ValueError(must(name, rule, f"{len(value)} numbers"))
            value = value[layer] or None
        return None if value is None else float(value)

    def elsewhere(self, *names: str) -> None:
        """Note that ``names`` say nothing about the experts (attention, rope, the output head)."""
        self._read.update(names)

    def refuse(self, name: str, reason: str) -> None:
        """Raise ``UnsupportedError`` where ``name`` is switched on."""
        value = self.get(name, default=None)
        if value:
            raise UnsupportedError(f"{self.source}: {name} = {value!r} {reason}")

    def refuse_unread(self) -> None:
        """Raise ``UnsupportedError`` that names every option of the experts that nobody read.

        None, False and an empty list ask for nothing; any other value does, 0 included: whether
        it means "off" depends on the model.
        """
        strange = {
            name: value
            for name, value in self._values.items()
            if _OPTION.search(name) and name not in self._read and not _asks_nothing(value)
        }
        if strange:
            named = ", ".join(f"{name} = {_short(value)}" for name, value in strange.items())
            raise UnsupportedError(
                f"{self.source} has options of experts that samebits does not read: {named}"
            )


def _asks_nothing(value: object) -> bool:
    return value is None or value is False or (isinstance(value, (list, tuple, dict)) and not value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def existing(layers: int, chosen: Iterable[int]) -> tuple[int, ...]:
    """Return the layers of ``chosen`` that a model of ``layers`` layers has, ascending."""
    return tuple(sorted(set(chosen) & set(range(layers))))
