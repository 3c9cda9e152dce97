"""What an audit found out, before it is put into words."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from samebits.checks.compile.job import OUT_OF_BUDGET, StepRecord
from samebits.checks.compile.sequence import Scenario


@dataclass(frozen=True, slots=True)
class Surveyed:
    """A number that reaches the callable, and what the survey says of it."""

    path: str
    kind: str
    values: tuple[Any, ...]
    # Why it cannot be judged; empty where it can.
    note: str


@dataclass
class Audit:
    """Everything that was found out about one callable."""

    target: str
    versions: Mapping[str, str | None]
    numbers: list[Surveyed] = field(default_factory=list)
    scenarios: list[Scenario] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    # Scenario -> why it was not finished; pairs left out and shapes or gradients not tried, too.
    unfinished: dict[str, str] = field(default_factory=dict)
    # Detector -> why it was not checked.
    missing: dict[str, str] = field(default_factory=dict)
    # Numbers that the eager function itself remembers: path -> what it was first called with.
    remembers: dict[str, Any] = field(default_factory=dict)
    # Scenario -> steps of each remedy tried on it.
    remedies: dict[str, list[StepRecord]] = field(default_factory=dict)
    remedies_not_tried: dict[str, str] = field(default_factory=dict)
    reproducer: Any = None

    def of(self, scenario: str) -> list[StepRecord]:
        """Return the calls of one scenario, those of the fresh process first."""
        return [step for step in self.steps if step.scenario == scenario]

    @property
    def late(self) -> bool:
        """Whether the budget ran out before everything was judged."""
        return OUT_OF_BUDGET in self.unfinished.values()

    @property
    def wrong(self) -> list[StepRecord]:
        """The calls with a wrong result."""
        return [step for step in self.steps if step.wrong]

    @property
    def latent(self) -> list[StepRecord]:
        """The calls that were right, although compiled code of another value may be reused."""
        return [s for s in self.steps if not s.wrong and (self.forgotten(s) or _reused(s))]

    def forgotten(self, step: StepRecord) -> list[str]:
        """Return the guards that what is saved for a call forgets, and its key does not tell.

        A key that other values were looked up without tells them apart, whatever was forgotten.
        """
        others = [s for s in self.of(step.scenario) if s.keys and _all_differ(s, step)]
        return sorted(
            guard
            for key, guards in step.keys.items()
            if not others or any(key in other.keys for other in others)
            for guard in guards
        )


def _all_differ(a: StepRecord, b: StepRecord) -> bool:
    """Return whether every number that is varied has another value in the other call."""
    return all(value != b.values[path] for path, value in a.values.items())


def _reused(step: StepRecord) -> bool:
    """Return whether a fresh process took code for a new value from the cache.

    Code that chooses its way by the number may come to the same graph for two values, and rightly.
    """
    later = step.phase == "fresh" and step.shape == 0 and step.index > 0
    return later and step.reused > 0 and not step.branched
