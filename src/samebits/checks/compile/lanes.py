"""Lanes of sequences beside each other, each in a fresh process and then in one on its cache."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from samebits.checks.compile import process
from samebits.checks.compile.job import Job
from samebits.checks.compile.process import Answer, Deadline
from samebits.checks.compile.sequence import Phase, Scenario

Tell = Callable[[str], None]


def run_lanes(
    lanes: Sequence[Sequence[Scenario]],
    job: Job,
    deadline: Deadline,
    *,
    stop_at_first: bool = False,
    tell: Tell,
) -> list[Answer]:
    """Return what the workers of every lane said, each lane in its own order.

    Args:
        lanes: Scenarios that share a process.
        job: What else the workers are told.
        deadline: Workers are killed then.
        stop_at_first: End a lane at its first wrong call.
        tell: Takes a line for each phase that begins.
    """

    def lane(index: int) -> list[Answer]:
        work = replace(job, scenarios=tuple(lanes[index]), output=f"{job.output}-{index}")
        return list(_phases(work, deadline, stop_at_first, tell))

    with ThreadPoolExecutor(max(1, len(lanes))) as pool:
        answers = list(pool.map(lane, range(len(lanes))))
    return [answer for of_lane in answers for answer in of_lane]


def _phases(job: Job, deadline: Deadline, stop_at_first: bool, tell: Tell) -> Iterator[Answer]:
    first: dict[str, dict[str, float]] = {}
    phases: tuple[Phase, ...] = ("fresh", "warm")
    for phase in phases:
        if not job.scenarios:
            return
        tell(f"{len(job.scenarios)} sequences, dynamic={job.scenarios[0].dynamic}, {phase} cache")
        output = Path(job.output)
        work = replace(
            job, phase=phase, first=first, output=str(output.with_name(f"{output.name}-{phase}"))
        )
        answer = process.run(work, deadline, stop_at_first=stop_at_first)
        yield answer
        if stop_at_first and any(step.wrong for step in answer.steps):
            return
        first = {step.scenario: step.first for step in answer.steps if step.first}
