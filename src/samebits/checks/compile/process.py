"""Start workers, follow what they say, stop them at the deadline, go on after one that died.

Sequences run in lanes beside each other, each lane in a fresh process and then in one on its cache.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from samebits import env
from samebits.checks.compile.job import OUT_OF_BUDGET, Job, StepRecord
from samebits.checks.compile.sequence import PHASES, Scenario

Tell = Callable[[str], None]

_POLL_SECONDS = 0.05
_WORKER = "samebits.checks.compile.worker"
_SOURCE = str(Path(__file__).resolve().parents[3])


class Deadline:
    """A moment that may never come."""

    def __init__(self, budget: float | None) -> None:
        self._end = None if budget is None else time.monotonic() + budget

    @property
    def left(self) -> float:
        """Seconds until then, infinite where there is no budget."""
        return float("inf") if self._end is None else self._end - time.monotonic()

    def be_now(self) -> None:
        """Let no time be left."""
        self._end = time.monotonic()


@dataclass
class Answer:
    """What the workers of one phase said, and why what is missing is missing."""

    steps: list[StepRecord] = field(default_factory=list)
    # Detector -> why it could not be set up.
    missing: dict[str, str] = field(default_factory=dict)
    # Scenario -> why it was not finished.
    unfinished: dict[str, str] = field(default_factory=dict)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a worker: this one's, single-threaded, able to import the same.

    Args:
        folder: Of the audit; kernels that a survey launches are kept there.
    """
    paths = [_SOURCE, *(path or "." for path in sys.path)]
    return env.for_child(
        TRITON_CACHE_DIR=str(folder / "triton"),
        OMP_NUM_THREADS="1",
        TORCHINDUCTOR_COMPILE_THREADS="1",
        PYTHONPATH=os.pathsep.join(dict.fromkeys(paths)),
        # Asks for devices in a way that leaves CUDA usable in forked processes.
        PYTORCH_NVML_BASED_CUDA_CHECK="1",
        TORCH_LOGS=None,
        TORCHINDUCTOR_FORCE_DISABLE_CACHES=None,
    )


def ask(job: Job, deadline: Deadline, *, leads: bool = True) -> dict[str, Any]:
    """Run a job with one answer, and return that, or ``{"error": …}``.

    Args:
        job: Of any kind but "run".
        deadline: The process is killed then.
        leads: With what it starts; a part of a survey ends with the survey instead.
    """
    process = _Process(job, leads=leads)
    if not process.wait(deadline):
        return {"error": "", "late": True}
    if not Path(job.output).exists():
        ended = f"ended with code {process.code}: {process.last_words()}"
        return {"error": f"the process that ran the eager function {ended}"}
    found: dict[str, Any] = json.loads(Path(job.output).read_text())
    return found


def run(job: Job, deadline: Deadline, *, stop_at_first: bool = False) -> Answer:
    """Run the scenarios of a job; where a worker dies, another one goes on after its scenario.

    Args:
        job: Of kind "run".
        deadline: Workers are killed then; what they have not finished is unfinished.
        stop_at_first: End the worker as soon as a call is wrong.
    """
    answer = Answer()
    left: Sequence[Scenario] = job.scenarios
    turn = 0
    while left:
        turn += 1
        part = replace(job, scenarios=tuple(left), output=f"{job.output}.{turn}")
        left = _run_part(part, deadline, stop_at_first, answer)
    return answer


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
        try:
            answers = list(pool.map(lane, range(len(lanes))))
        except BaseException:
            # Else an interrupt would wait for the other lanes, and these start further workers.
            deadline.be_now()
            raise
    return [answer for of_lane in answers for answer in of_lane]


def _phases(job: Job, deadline: Deadline, stop_at_first: bool, tell: Tell) -> Iterator[Answer]:
    first: dict[str, dict[str, float]] = {}
    for phase in PHASES:
        if not job.scenarios:
            return
        tell(f"{len(job.scenarios)} sequences, dynamic={job.scenarios[0].dynamic}, {phase} cache")
        output = Path(job.output)
        work = replace(
            job, phase=phase, first=first, output=str(output.with_name(f"{output.name}-{phase}"))
        )
        answer = run(work, deadline, stop_at_first=stop_at_first)
        yield answer
        if stop_at_first and any(step.wrong for step in answer.steps):
            return
        first = {step.scenario: step.first for step in answer.steps if step.first}


def _run_part(
    job: Job, deadline: Deadline, stop_at_first: bool, answer: Answer
) -> Sequence[Scenario]:
    """Run one worker, and return the scenarios that another one should go on with."""
    process = _Process(job)
    expected = {s.name: len(s.steps(job.phase)) for s in job.scenarios}
    done: dict[str, int] = dict.fromkeys(expected, 0)
    begun = False
    for line in process.lines(deadline):
        begun = True
        if "missing" in line:
            answer.missing |= line["missing"]
            continue
        record = StepRecord(**line)
        answer.steps.append(record)
        done[record.scenario] = expected[record.scenario] if record.error else record.index + 1
        if record.wrong and stop_at_first:
            process.kill()
            return ()
    open_ones = [s for s in job.scenarios if done[s.name] < expected[s.name]]
    if not open_ones:
        return ()
    if deadline.left <= 0:
        for scenario in open_ones:
            answer.unfinished[scenario.name] = OUT_OF_BUDGET
        return ()
    reason = f"the process ended with code {process.code}: {process.last_words()}"
    if not begun:
        # It could not load the target: neither will another one.
        answer.unfinished |= {scenario.name: reason for scenario in open_ones}
        return ()
    answer.unfinished[open_ones[0].name] = reason
    return open_ones[1:]


def stop(process: "subprocess.Popen[Any]", *, leads: bool) -> None:
    """Kill a process that runs; with all that it started where it ``leads`` a session."""
    if leads and hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


class _Process:
    """One worker, with its output in files."""

    def __init__(self, job: Job, *, leads: bool = True) -> None:
        self._output, self._leads = Path(job.output), leads
        stem = Path(job.folder) / self._output.name
        job.write(path := stem.with_suffix(stem.suffix + ".job"))
        self._words = stem.with_suffix(stem.suffix + ".log")
        with self._words.open("wb") as words:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _WORKER, str(path)],
                stdout=words,
                stderr=words,
                stdin=subprocess.DEVNULL,
                env=environment(Path(job.folder)),
                start_new_session=leads,
            )

    @property
    def code(self) -> int | None:
        return self._process.returncode

    def kill(self) -> None:
        if self._process.poll() is None:
            stop(self._process, leads=self._leads)

    def wait(self, deadline: Deadline) -> bool:
        """Wait for the end, and return whether it came before the deadline."""
        try:
            while self._process.poll() is None:
                if deadline.left <= 0:
                    return False
                time.sleep(_POLL_SECONDS)
            return True
        finally:  # also where an interrupt comes first
            self.kill()

    def lines(self, deadline: Deadline) -> Iterator[dict[str, Any]]:
        """Yield lines as they come, until the worker ends or the deadline ends it."""
        read = 0
        while True:
            ended = self._process.poll() is not None
            if self._output.exists():
                with self._output.open() as output:
                    output.seek(read)
                    while (line := output.readline()).endswith("\n"):
                        read = output.tell()
                        yield json.loads(line)
            if ended:
                return
            if deadline.left <= 0:
                self.kill()
            time.sleep(_POLL_SECONDS)

    def last_words(self) -> str:
        lines = [line for line in self._words.read_text(errors="replace").splitlines() if line]
        return lines[-1] if lines else "it said nothing"
