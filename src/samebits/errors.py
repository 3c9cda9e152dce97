"""The one exception type that is ours, and the phrases every argument error is built from."""

from collections.abc import Iterable

from torch import SymInt


class UnsupportedError(NotImplementedError):
    """A legal request that the chosen backend, or every backend, cannot serve; it says why."""


def must(argument: str, rule: str, actual: object) -> str:
    """Return ``<argument> must <rule>, got <actual>``, the form of every argument error."""
    return f"{argument} must {rule}, got {actual}"


def require_int(argument: str, value: object) -> None:
    """Raise ``TypeError`` unless ``value`` is an int (a traced size is one, a bool is not)."""
    if isinstance(value, bool) or not isinstance(value, (int, SymInt)):
        raise TypeError(must(argument, "be an int", repr(value)))


def unknown(what: str, actual: object, expected: Iterable[str]) -> str:
    """Return ``unknown <what> <actual>; expected one of …``."""
    known = ", ".join(repr(e) for e in sorted(expected))
    return f"unknown {what} {actual!r}; expected one of {known}"
