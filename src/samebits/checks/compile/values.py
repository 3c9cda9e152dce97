"""Other values for a number: near the one it has, never 0 or 1, which compilers treat specially."""

from collections.abc import Iterator

from samebits.checks.compile.place import Kind, kind_of

Number = float | int | bool

# A sequence needs the value it has and three others; a bool has one other.
WANTED = 3

_FACTORS = (0.5, 2.0, 0.75, 1.5, 0.25, 1.25, 4.0, 0.9, 1.1)
_INSTEAD_OF_ZERO = (0.5, 0.25, 2.0, 0.125, 3.0, 1e-3)
_STEPS = (1, 2, 3, -1, 5, 4, 16, -2, 8)
_ORDINARY = 2


def candidates(value: Number) -> Iterator[Number]:
    """Yield values to try instead of ``value``, of the same kind, the likeliest first."""
    kind: Kind | None = kind_of(value)
    if kind == "bool":
        yield not value
    elif kind == "int":
        yield from (value + step for step in _STEPS)
        yield value * 2
    elif value == 0.0:
        yield from _INSTEAD_OF_ZERO
    else:
        scaled = (value * factor for factor in _FACTORS)
        yield from (other for other in scaled if other not in (0.0, 1.0))
