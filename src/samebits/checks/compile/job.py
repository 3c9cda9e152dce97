"""What a worker is told, and what it says of each call; files of JSON between processes."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from samebits.checks.compile.evaluate import Wanted
from samebits.checks.compile.place import Number
from samebits.checks.compile.sequence import Option, Phase, Scenario
from samebits.checks.compile.target import Target

OUT_OF_BUDGET = "the budget ran out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The work of one process."""

    # "look" and "begin" are steps of a survey in a process of their own.
    kind: Literal["survey", "look", "begin", "run", "reproduce"]
    target: Target
    # For files of this audit.
    folder: str
    # Where the answer goes.
    output: str
    scenarios: tuple[Scenario, ...] = ()
    phase: Phase = "fresh"
    # Facts of the survey.
    wanted: Wanted | None = None
    shapes: int = 1
    compiled: bool = False
    # Scenario -> tensor -> distance of the very first call.
    first: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # Of the kind "begin": path and value of the number that the process is to begin with.
    begin: tuple[str, Number] | None = None
    # Of the kind "reproduce": the wrong call, and whether the source is copied into the script.
    fault: "StepRecord | None" = None
    inline: bool = True
    # Whether calls of the compiled code are timed afterwards.
    timed: bool = False

    def cache_of(self, scenario: Scenario) -> str:
        """Return the cache directory that both phases of a scenario share."""
        # Names of numbers can be long, and differ in a character that no file name may have.
        named = hashlib.sha256(f"{scenario.name}\0{scenario.remedy}".encode()).hexdigest()
        return str(Path(self.folder) / "cache" / named[:16])

    def write(self, path: Path) -> None:
        """Write the job for ``read``."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> "Job":
        """Return the job that ``write`` wrote."""
        values: dict[str, Any] = json.loads(path.read_text())
        values["target"] = Target(**values["target"])
        values["scenarios"] = tuple(_scenario(s) for s in values["scenarios"])
        if values["begin"] is not None:
            values["begin"] = tuple(values["begin"])
        if values["fault"] is not None:
            values["fault"] = StepRecord(**values["fault"])
        return Job(**values)


def _scenario(values: dict[str, Any]) -> Scenario:
    options = tuple(Option(o["path"], tuple(o["values"])) for o in values.pop("options"))
    return Scenario(options=options, **values)


@dataclass(slots=True)
class StepRecord:
    """One compiled call: what it was given, whether it was right, what it cost."""

    scenario: str
    phase: Phase
    index: int
    values: dict[str, Any] = field(default_factory=dict)
    shape: int = 0
    # The call did not come about; the reason.
    error: str = ""
    wrong: bool = False
    # The worst tensor, its distance from the eager result, what was allowed.
    tensor: str = ""
    distance: float = 0.0
    allowed: float = 0.0
    # The element that is furthest off.
    actual: float | None = None
    expected: float | None = None
    # Of the first call only: distances by tensor.
    first: dict[str, float] = field(default_factory=dict)
    # Graphs captured; graphs that take a float and came from the cache; the key of each graph that
    # takes one -> guards that its entry forgets.
    graphs: int = 0
    reused: int = 0
    keys: dict[str, list[str]] = field(default_factory=dict)
    # Whether Python chose its way by a float while one of these was traced.
    branched: bool = False
    seconds: float = 0.0
    # Median of a compiled call, where it was asked for.
    microseconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return asdict(self)
