"""The audit of one callable: survey, sequences in two lanes, remedies and a reproducer."""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from samebits import env
from samebits.checks.compile import process, transport
from samebits.checks.compile.job import Job, StepRecord
from samebits.checks.compile.process import Answer, Deadline
from samebits.checks.compile.sequence import Option, Phase, Scenario, plan
from samebits.checks.compile.target import Factory, Target, TargetError, guess_inputs
from samebits.errors import unknown

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Number:
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
    numbers: list[Number] = field(default_factory=list)
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
    def wrong(self) -> list[StepRecord]:
        """The calls with a wrong result."""
        return [step for step in self.steps if step.wrong]

    @property
    def latent(self) -> list[StepRecord]:
        """The calls that were right, although compiled code of another value may be reused."""
        return [step for step in self.steps if not step.wrong and (step.dropped or _reused(step))]


def _reused(step: StepRecord) -> bool:
    """Return whether a fresh process took code for a new value from the cache."""
    return step.phase == "fresh" and step.shape == 0 and step.index > 0 and step.reused > 0


def audit(
    target: Target,
    *,
    only: Sequence[str] = (),
    budget: float | None = None,
    stop_at_first: bool = False,
    folder: Path | None = None,
    tell: Tell = lambda line: None,
) -> Audit:
    """Audit a target; see ``samebits.checks.compile``.

    Args:
        target: Names of the callable and its inputs.
        only: Paths of numbers; empty takes all.
        budget: Seconds after which what is not finished stays so.
        stop_at_first: Stop at the first wrong call.
        folder: Kept, for reading on; None uses one that is removed.
        tell: Takes a line for each thing that begins.

    Raises:
        TargetError: The target or its inputs cannot be used, or a path in ``only`` is unknown.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="samebits-compile-") as made:
            return audit(
                target,
                only=only,
                budget=budget,
                stop_at_first=stop_at_first,
                folder=Path(made),
                tell=tell,
            )
    deadline = Deadline(budget)
    found = Audit(target.name, env.versions())
    tell("looking for numbers")
    job = Job(kind="survey", target=target, folder=str(folder), output=str(folder / "survey"))
    survey = process.ask(job, deadline)
    if survey.get("late"):
        found.unfinished["survey"] = "the budget ran out"
        return found
    if survey.get("error"):
        raise TargetError(survey["error"])
    _note_survey(found, survey, only)
    options = [Option(n.path, n.values) for n in found.numbers if not n.note]
    gradients = [False, True] if survey["wanted"] else [False]
    found.scenarios, left_out = plan(options, gradients=gradients, shapes=survey["shapes"])
    found.unfinished |= dict(left_out)
    job = replace(
        job,
        kind="run",
        wanted=survey["wanted"],
        shapes=survey["shapes"],
        compiled=survey["compiled"],
    )
    for answer in _lanes(found.scenarios, job, deadline, stop_at_first, tell):
        found.steps += answer.steps
        found.unfinished |= answer.unfinished
        found.missing |= answer.missing
    return found


def _note_survey(found: Audit, survey: Mapping[str, Any], only: Sequence[str]) -> None:
    numbers = [
        Number(n["path"], n["kind"], tuple(n["values"]), n["note"]) for n in survey["numbers"]
    ]
    paths = [number.path for number in numbers]
    for path in only:
        if path not in paths:
            raise TargetError(unknown("number", path, paths))
    found.numbers = [n for n in numbers if not only or n.path in only]
    found.remembers = {r["path"]: r for r in survey["remembers"]}
    if survey["no_gradient"]:
        found.unfinished["with gradient"] = survey["no_gradient"]
    if survey["no_second_shape"]:
        found.unfinished["second shape"] = survey["no_second_shape"]


def _lanes(
    scenarios: Sequence[Scenario], job: Job, deadline: Deadline, stop_at_first: bool, tell: Tell
) -> list[Answer]:
    """Run automatic and always-dynamic scenarios beside each other, each in two processes."""
    lanes = [[s for s in scenarios if s.dynamic is dynamic] for dynamic in (None, True)]

    def lane(index: int) -> list[Answer]:
        return list(_phases(lanes[index], index, job, deadline, stop_at_first, tell))

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lane, range(2)))
    return [answer for answers in both for answer in answers]


def _phases(
    scenarios: Sequence[Scenario],
    lane: int,
    job: Job,
    deadline: Deadline,
    stop_at_first: bool,
    tell: Tell,
) -> Iterator[Answer]:
    first: dict[str, dict[str, float]] = {}
    phases: tuple[Phase, ...] = ("fresh", "warm")
    for phase in phases:
        if not scenarios:
            return
        tell(f"{len(scenarios)} sequences, dynamic={scenarios[0].dynamic}, {phase} cache")
        work = replace(
            job,
            scenarios=tuple(scenarios),
            phase=phase,
            output=str(Path(job.folder) / f"{phase}-{lane}"),
            first=first,
        )
        answer = process.run(work, deadline, stop_at_first=stop_at_first)
        yield answer
        if stop_at_first and any(step.wrong for step in answer.steps):
            return
        first = {step.scenario: step.first for step in answer.steps if step.first}


def audit_compile(
    function: Callable[..., Any],
    make_inputs: Factory | None = None,
    *,
    only: Sequence[str] = (),
    budget: float | None = None,
    stop_at_first: bool = False,
) -> Audit:
    """Look for numbers of which compiled code keeps an old value.

    Args:
        function: Any callable: a function (of a test, too), one under ``torch.compile`` (its
            retained original is the truth), a module, a method, a partial.
        make_inputs: Returns ``(args, kwargs)``; called in other processes, from a fixed seed. With
            a parameter ``second_shape`` it is asked for another shape, too. None guesses by
            annotations.
        only: Paths of numbers to vary; empty takes all that are found.
        budget: Seconds; what is not finished then is "not_run".
        stop_at_first: Stop at the first wrong call.

    Returns:
        The audit; ``samebits.checks.compile.report.results`` turns it into verdicts.

    Raises:
        TargetError: The eager function raises, is not deterministic, or cannot be sent to another
            process.
    """
    factory = make_inputs or (lambda: guess_inputs(function))
    name = f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"
    with tempfile.TemporaryDirectory(prefix="samebits-compile-") as made:
        packed = Path(made) / "target.pickle"
        try:
            packed.write_bytes(transport.pack((function, factory)))
        except (TypeError, AttributeError, transport.PicklingError) as error:
            raise TargetError(f"{name} cannot be sent to another process: {error}") from error
        target = Target(name, packed=str(packed))
        return audit(
            target, only=only, budget=budget, stop_at_first=stop_at_first, folder=Path(made)
        )


def progress(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)
