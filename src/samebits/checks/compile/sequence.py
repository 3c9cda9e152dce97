"""The calls that show a stale number: which values, in which order, under which settings.

A compiler makes a number dynamic at its second value, and reuses what it saved at the third; so a
sequence has four values and comes back to the second. The second process, on the warm cache, sees
the values in another order, and first one that no graph was compiled for statically.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from samebits.checks.compile.place import Number

Phase = Literal["fresh", "warm"]
PHASES: tuple[Phase, ...] = ("fresh", "warm")

# Indices of values. With two values (a bool), higher ones alternate between the two.
_FIRST_SHAPE: Mapping[Phase, tuple[int, ...]] = {"fresh": (0, 1, 2, 3, 1), "warm": (2, 3, 0, 1, 3)}
_SECOND_SHAPE: Mapping[Phase, tuple[int, ...]] = {"fresh": (2, 0), "warm": (1, 3)}
# Two numbers: the second moves with the first, then alone, then stands still.
_PARTNER: Mapping[Phase, tuple[int, ...]] = {"fresh": (0, 1, 1, 2, 1), "warm": (3, 2, 2, 0, 1)}
_MOST_PAIRS = 6


@dataclass(frozen=True, slots=True)
class Option:
    """A number that reaches the callable, and the values it takes: its own first."""

    path: str
    values: tuple[Number, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One call: the number that each path has, the shape of the tensors (0 or 1)."""

    values: Mapping[str, Number]
    shape: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """A sequence of calls from an empty compiler, in one cache directory."""

    name: str
    options: tuple[Option, ...]
    gradient: bool
    # As for torch.compile: None lets it find out, True takes every number as dynamic at once.
    dynamic: bool | None
    shapes: int
    # One of remedies.REMEDIES, or None.
    remedy: str | None = None

    def steps(self, phase: Phase) -> list[Step]:
        """Return the calls that one process makes.

        Determinism: pure function of the scenario.
        """
        orders = [(_FIRST_SHAPE[phase], 0)]
        if self.shapes > 1:
            orders.append((_SECOND_SHAPE[phase], 1))
        made: list[Step] = []
        for order, shape in orders:
            for position, index in enumerate(order):
                chosen = [index, _PARTNER[phase][position]]
                made.append(Step(self._choose(chosen), shape))
        return made

    def _choose(self, indices: Sequence[int]) -> dict[str, Number]:
        pairs = zip(self.options, indices, strict=False)
        return {option.path: option.values[i % len(option.values)] for option, i in pairs}


def plan(
    options: Sequence[Option], *, gradients: Sequence[bool], shapes: int
) -> tuple[list[Scenario], list[tuple[str, str]]]:
    """Return the scenarios: every option alone, then pairs; and pairs left out, with the reason.

    Args:
        options: Numbers with at least two values each.
        gradients: Which of False (no gradient) and True can be run.
        shapes: 1 or 2.

    Determinism: pure function of its arguments.
    """
    # Floats are what goes stale; the budget may not reach the rest.
    options = sorted(options, key=lambda option: not isinstance(option.values[0], float))
    pairs = list(itertools.combinations(options, 2))
    groups: list[tuple[Option, ...]] = [(option,) for option in options]
    groups += pairs[:_MOST_PAIRS]
    left_out = [
        (f"{a.path}, {b.path}", f"more than {_MOST_PAIRS} pairs") for a, b in pairs[_MOST_PAIRS:]
    ]
    scenarios = []
    for group in groups:
        for dynamic, gradient in itertools.product((None, True), gradients):
            name = ", ".join(option.path for option in group)
            name += " with gradient" if gradient else " without gradient"
            name += f", dynamic={dynamic}"
            scenarios.append(Scenario(name, group, gradient, dynamic, shapes))
    return scenarios, left_out
