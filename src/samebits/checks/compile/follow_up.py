"""After a wrong call: ways out, tried on the sequence that failed, and a reproducer that ran."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from samebits.checks.compile import process
from samebits.checks.compile.job import OUT_OF_BUDGET, Job, StepRecord
from samebits.checks.compile.process import Deadline, Tell, run_lanes
from samebits.checks.compile.record import Audit
from samebits.checks.compile.remedies import REMEDIES
from samebits.checks.compile.sequence import Scenario

# What a reproducer that shows its fault exits with, and prints; a traceback exits with 1, too.
_SHOWN, _STALE = 1, "STALE"
_RUN_SECONDS = 300.0


def follow_up(found: Audit, job: Job, deadline: Deadline, tell: Tell) -> None:
    """Add remedies and a reproducer to an audit with a wrong call.

    Args:
        found: The audit, changed in place.
        job: What its workers were told.
        deadline: When to stop; what was not tried says so.
        tell: Takes a line for each thing that begins.
    """
    fault = choose(found)
    scenario = next(s for s in found.scenarios if s.name == fault.scenario)
    tell("writing a reproducer")
    found.reproducer = reproduce(scenario, fault, job, deadline)
    tell("trying remedies")
    _try_remedies(found, scenario, fault, job, deadline, tell)


def choose(found: Audit) -> StepRecord:
    """Return the wrong call that is simplest to show: one process, no setting, one number."""
    scenarios = {scenario.name: scenario for scenario in found.scenarios}

    def effort(step: StepRecord) -> tuple[int, ...]:
        scenario = scenarios[step.scenario]
        settings = (step.phase == "warm", bool(scenario.dynamic), len(scenario.options))
        return (*settings, step.shape, scenario.gradient, step.index)

    return min(found.wrong, key=effort)


def _try_remedies(
    found: Audit, scenario: Scenario, fault: StepRecord, job: Job, deadline: Deadline, tell: Tell
) -> None:
    names = {f"{scenario.name}: {remedy}": remedy for remedy in REMEDIES}
    tries = [
        replace(scenario, name=name, remedy=remedy, shapes=fault.shape + 1)
        for name, remedy in names.items()
    ]
    job = replace(job, output=str(Path(job.folder) / "remedies"), timed=True)
    found.remedies = {remedy: [] for remedy in REMEDIES}
    for answer in run_lanes([tries[::2], tries[1::2]], job, deadline, tell=tell):
        for step in answer.steps:
            found.remedies[names[step.scenario]].append(step)
        for name, reason in answer.unfinished.items():
            found.remedies_not_tried[names[name]] = reason


def reproduce(
    scenario: Scenario, fault: StepRecord, job: Job, deadline: Deadline
) -> dict[str, Any]:
    """Write a script for a wrong call, run it, and return it with what it printed.

    The source of the function is copied into the script; where that cannot be done, or does not
    show the fault, the script imports the function.
    """
    reasons: list[str] = []
    for inline in (True, False):
        work = replace(
            job,
            kind="reproduce",
            scenarios=(scenario,),
            fault=fault,
            inline=inline,
            output=str(Path(job.folder) / f"reproducer-{inline}.json"),
        )
        written = process.ask(work, deadline)
        if "source" not in written:
            reasons.append(written.get("error") or OUT_OF_BUDGET)
            continue
        path = Path(job.folder) / f"reproducer_{'alone' if inline else 'imports'}.py"
        path.write_text(written["source"])
        code, said = _run(path, min(deadline.left, _RUN_SECONDS))
        if code == _SHOWN and _STALE in said:
            return {"source": written["source"], "self_contained": inline, "printed": said}
        reasons.append(f"the script ended with code {code}: {said[-300:]}")
    return {"source": None, "reasons": reasons}


def _run(path: Path, seconds: float) -> tuple[int | None, str]:
    if seconds <= 0:
        return None, OUT_OF_BUDGET
    run = subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env=process.environment(path.parent),
        start_new_session=True,
    )
    try:
        said, complaint = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, "it took too long"
    finally:  # also where an interrupt comes first
        if run.poll() is None:
            process.stop(run, leads=True)
    return run.returncode, (said or complaint).strip()
