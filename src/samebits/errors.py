"""The one exception type that is ours, and the phrases every argument error is built from."""

from collections.abc import Iterable


class UnsupportedError(NotImplementedError):
    """A legal request that the chosen backend, or every backend, cannot serve; it says why."""


def must(argument: str, rule: str, actual: object) -> str:
    """Return ``<argument> must <rule>, got <actual>``, the form of every argument error."""
    return f"{argument} must {rule}, got {actual}"


def unknown(what: str, actual: object, expected: Iterable[str]) -> str:
    """Return ``unknown <what> <actual>; expected one of …``."""
    known = ", ".join(repr(e) for e in sorted(expected))
    return f"unknown {what} {actual!r}; expected one of {known}"
