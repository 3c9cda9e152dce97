"""The audit of one callable: survey, sequences in two lanes, remedies and a reproducer."""

import functools
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pickle import PicklingError
from typing import Any

from samebits import env
from samebits.arguments import require_number
from samebits.checks.compile import process, transport
from samebits.checks.compile.discover import original
from samebits.checks.compile.follow_up import follow_up
from samebits.checks.compile.job import OUT_OF_BUDGET, Job
from samebits.checks.compile.process import Deadline, Tell, run_lanes
from samebits.checks.compile.record import Audit, Surveyed
from samebits.checks.compile.sequence import Option, plan
from samebits.checks.compile.target import (
    Factory,
    Target,
    TargetError,
    guess_inputs,
    require_callable,
)
from samebits.errors import must, unknown


def silence(line: str) -> None:
    """Tell nobody."""
    del line


@contextmanager
def folder_of_caches() -> Iterator[Path]:
    """Give a folder for the jobs and caches of one audit, removed afterwards.

    Raises:
        TargetError: Neither it nor the compile cache of the user can be written to.
    """
    if kept := env.variables().get("TORCHINDUCTOR_CACHE_DIR"):
        # The compiled headers of torch are kept there; everything else goes into the folder.
        try:
            Path(kept).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=kept).close()
        except OSError as error:
            rule = must("TORCHINDUCTOR_CACHE_DIR", "be a folder that can be written to", repr(kept))
            raise TargetError(f"{rule} ({error})") from error
    try:
        made = tempfile.mkdtemp(prefix="samebits-compile-")
    except OSError as error:
        raise TargetError(f"no folder for the caches of the audit: {error}") from error
    try:
        yield Path(made)
    finally:
        # A worker that was killed may leave a compiler that still writes.
        shutil.rmtree(made, ignore_errors=True)


def audit(
    target: Target,
    *,
    only: Sequence[str] = (),
    deadline: Deadline | None = None,
    stop_at_first: bool = False,
    remedies: bool = True,
    folder: Path | None = None,
    tell: Tell = silence,
) -> Audit:
    """Audit a target; see ``samebits.checks.compile``.

    Args:
        target: Names of the callable and its inputs.
        only: Paths of numbers; empty takes all.
        deadline: What is not finished then stays so; None waits for everything.
        stop_at_first: Stop at the first wrong call.
        remedies: Where a call is wrong, try ways out, and write and run a reproducer.
        folder: Kept, for reading on; None uses one that is removed.
        tell: Takes a line for each thing that begins.

    Raises:
        TargetError: The target or its inputs cannot be used, or a path in ``only`` is unknown.
    """
    if folder is None:
        with folder_of_caches() as made:
            return audit(
                target,
                only=only,
                deadline=deadline,
                stop_at_first=stop_at_first,
                remedies=remedies,
                folder=made,
                tell=tell,
            )
    deadline = deadline or Deadline(None)
    found = Audit(target.name, env.versions())
    tell("looking for numbers")
    job = Job(kind="survey", target=target, folder=str(folder), output=str(folder / "survey"))
    survey = process.ask(job, deadline)
    if survey.get("late"):
        found.unfinished["survey"] = OUT_OF_BUDGET
        return found
    if survey.get("error"):
        raise TargetError(survey["error"])
    _note_survey(found, survey, only)
    options = [Option(n.path, n.values) for n in found.numbers if not n.note]
    paths = ", ".join(option.path for option in options)
    tell(f"numbers that vary: {paths or 'none'}")
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
    lanes = [[s for s in found.scenarios if s.dynamic is dynamic] for dynamic in (None, True)]
    for answer in run_lanes(lanes, job, deadline, stop_at_first=stop_at_first, tell=tell):
        found.steps += answer.steps
        found.unfinished |= answer.unfinished
        found.missing |= answer.missing
    if remedies and found.wrong:
        follow_up(found, job, deadline, tell)
    return found


def _note_survey(found: Audit, survey: Mapping[str, Any], only: Sequence[str]) -> None:
    numbers = [
        Surveyed(n["path"], n["kind"], tuple(n["values"]), n["note"]) for n in survey["numbers"]
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


def audit_compile(
    function: Callable[..., Any],
    make_inputs: Factory | None = None,
    *,
    only: Sequence[str] = (),
    budget: float | None = None,
    stop_at_first: bool = False,
    remedies: bool = False,
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
        remedies: Where a call is wrong, try ways out, and write and run a reproducer.

    Returns:
        The audit; ``samebits.checks.compile.report.results`` turns it into verdicts.

    Raises:
        TypeError: Something is not callable, or ``only`` or ``budget`` is of another type.
        ValueError: ``budget`` is not greater than 0.
        TargetError: The eager function raises, is not deterministic, or cannot be sent to another
            process.
    """
    require_callable("function", function)
    if make_inputs is not None:
        require_callable("make_inputs", make_inputs)
    if isinstance(only, str):
        raise TypeError(must("only", "be a sequence of paths", repr(only)))
    if budget is not None:
        require_number("budget", budget, above=0.0)
    factory = make_inputs or (lambda: guess_inputs(function))
    name = _name(function)
    with folder_of_caches() as made:
        packed = made / "target.pickle"
        try:
            packed.write_bytes(transport.pack((function, factory)))
        except (TypeError, AttributeError, PicklingError) as error:
            raise TargetError(f"{name} cannot be sent to another process: {error}") from error
        target = Target(name, packed=str(packed))
        return audit(
            target,
            only=only,
            deadline=Deadline(budget),
            stop_at_first=stop_at_first,
            remedies=remedies,
            folder=made,
        )


def _name(function: Any) -> str:
    inner = original(function)
    while isinstance(inner, functools.partial):
        inner = inner.func
    if not hasattr(inner, "__qualname__"):
        inner = type(inner)
    return f"{inner.__module__ or 'builtins'}:{inner.__qualname__}"


def progress(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)
