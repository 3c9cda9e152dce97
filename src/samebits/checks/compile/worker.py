"""The process that compiles: runs scenarios of a job, one line of JSON for each call, then ends.

Run as ``python -m samebits.checks.compile.worker JOB``; the job file names everything else. Every
scenario begins with an empty compiler and its own cache directory, which the fresh phase fills and
the warm phase finds filled. Kernels are compiled as scalar code, without the probes of vector
instructions: that halves the time and touches nothing that is cached or guarded.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import torch

from samebits import env
from samebits.checks.compile import remedies, reproducer, survey
from samebits.checks.compile.compare import Comparison, allowed_for, compare, distance
from samebits.checks.compile.detectors import Detectors, graphs
from samebits.checks.compile.discover import Call, leaves
from samebits.checks.compile.evaluate import Wanted, attempt, evaluate
from samebits.checks.compile.job import Job, StepRecord
from samebits.checks.compile.place import Place
from samebits.checks.compile.sequence import Scenario, Step
from samebits.checks.compile.target import load

Tensors = dict[str, torch.Tensor]
# A first call this many times past what rounding may do is a fault of another kind.
_GROSS = 100.0
_TIMED_CALLS = 30


class Session:
    """The loaded target with its calls, one for each shape, and where their numbers are."""

    def __init__(self, job: Job) -> None:
        self.function, self.factory = load(job.target)
        self.job = job
        self.calls = [survey.prepare(self.function, self.factory)]
        if job.shapes > 1:
            self.calls.append(survey.second(self.calls[0], self.factory))
        self.places = [{place.path: place for place in leaves(call)} for call in self.calls]

    def set(self, step: Step) -> Call:
        """Put the step's numbers in their places, and return the call that sees them."""
        for path, value in step.values.items():
            self._place(step.shape, path).set(value)
        return self.calls[step.shape]

    def _place(self, shape: int, path: str) -> Place:
        return self.places[shape][path]


# Jobs with one answer.
_ONCE: Mapping[str, Callable[[Job], dict[str, Any]]] = {
    "survey": survey.survey,
    "look": survey.copy_of,
    "begin": survey.copy_of,
    "reproduce": reproducer.write,
}


def main(arguments: list[str]) -> int:
    """Run the job in the file named first, and return 0; a target that cannot be used gives 2."""
    job = Job.read(Path(arguments[0]))
    torch.set_num_threads(1)
    if job.kind != "survey":
        # A survey forks: it must have no threads.
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    if action := _ONCE.get(job.kind):
        found = survey.guarded(lambda: action(job))
        Path(job.output).write_text(json.dumps(found))
        return 0
    _compile_quickly()
    detectors = Detectors()
    detectors.install()
    session = Session(job)
    with Path(job.output).open("a") as output:
        _write(output, {"missing": detectors.missing})
        for scenario in job.scenarios:
            run(session, scenario, detectors, lambda record: _write(output, record.to_json()))
    return 0


def _end_with_parent(parent: int) -> None:
    """End this process when the audit that started it is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _write(output: TextIO, line: Mapping[str, object]) -> None:
    output.write(json.dumps(line) + "\n")
    output.flush()


def _compile_quickly() -> None:
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.fallback_random = True
    torch._inductor.config.cpp.simdlen = 0
    from torch._inductor import cpu_vec_isa

    # Building these probes takes 10 s in each process.
    if hasattr(cpu_vec_isa, "valid_vec_isa_list"):
        cpu_vec_isa.valid_vec_isa_list = list  # type: ignore[assignment]  # of none
    # More variants than a sequence makes: past the limit Dynamo runs eagerly without a word.
    torch._dynamo.config.cache_size_limit = 256
    torch._dynamo.config.accumulated_cache_size_limit = 4096
    # Where compiled headers are kept is decided on import: once for all, outside the scenarios.
    import_module("torch._inductor.codecache")


def run(
    session: Session, scenario: Scenario, detectors: Detectors, emit: Callable[[StepRecord], None]
) -> None:
    """Run one scenario's calls of the job's phase, and emit a record of each.

    Args:
        session: The loaded target.
        scenario: What to call.
        detectors: Installed in this process.
        emit: Takes each record as soon as it is there.
    """
    job = session.job
    remedy = remedies.REMEDIES[scenario.remedy] if scenario.remedy else remedies.Remedy("")
    wanted: Wanted | None = job.wanted if scenario.gradient else None
    steps = scenario.steps(job.phase)
    with _empty_compiler(job.cache_of(scenario)), _dynamic(session, scenario):
        expected = _expected(session, steps, wanted)
        with remedies.settings(remedy.settings):
            make = partial(remedies.Candidate, session.calls[0], scenario, remedy)
            candidate, reason = attempt(lambda: make(compiled=job.compiled))
            if reason:
                emit(StepRecord(scenario.name, job.phase, 0, error=reason))
                return
            first = dict(job.first.get(scenario.name, {}))
            for index, step in enumerate(steps):
                record = StepRecord(scenario.name, job.phase, index)
                result = _call(candidate, session.set(step), step, wanted, detectors, record)
                if result is not None:
                    own = expected[_key(step)]
                    others = [
                        e
                        for key, e in expected.items()
                        if key != _key(step) and key[1] == step.shape
                    ]
                    if index == 0 and job.phase == "fresh":
                        first = {n: distance(t, own[n]) for n, t in result.items() if n in own}
                        record.first = first
                    judged = compare(result, own, others, first)
                    _judge(record, judged, index == 0 and job.phase == "fresh", own, result)
                emit(record)
                if record.error:
                    return
            _restore(session, scenario)
            if scenario.remedy or job.timed:
                record = StepRecord(scenario.name, job.phase, len(steps))
                record.microseconds = _time(candidate, session.set(steps[0]), wanted)
                emit(record)


def _call(
    candidate: remedies.Candidate,
    call: Call,
    step: Step,
    wanted: Wanted | None,
    detectors: Detectors,
    record: StepRecord,
) -> Tensors | None:
    """Make one compiled call, and note in the record what it cost and what the detectors saw."""
    record.values, record.shape = dict(step.values), step.shape
    detectors.begin()
    start = time.perf_counter()
    result, record.error = attempt(lambda: evaluate(call, candidate.run, wanted, candidate.prepare))
    record.seconds = time.perf_counter() - start
    record.graphs = detectors.graphs()
    record.reused = detectors.reused()
    record.keys, record.branched = detectors.keys, detectors.branched
    if record.index == 0 and not record.error and graphs() == 0:
        record.error = "nothing was compiled (is torch.compile disabled?)"
        return None
    found: Tensors | None = result
    return found


def _judge(
    record: StepRecord, judged: Comparison, first: bool, own: Tensors, result: Tensors
) -> None:
    record.tensor, record.distance, record.allowed = judged.tensor, judged.distance, judged.allowed
    record.wrong = judged.wrong
    if first:
        tensor = own.get(judged.tensor)
        limit = _GROSS * allowed_for(tensor.dtype) if tensor is not None else 0.0
        record.allowed = limit
        record.wrong = judged.distance > record.allowed
    if record.wrong and judged.tensor in own and judged.tensor in result:
        a, e = result[judged.tensor].double(), own[judged.tensor].double()
        if a.shape == e.shape and a.numel():
            at = int((a - e).abs().nan_to_num(float("inf")).flatten().argmax())
            record.actual, record.expected = float(a.flatten()[at]), float(e.flatten()[at])


def _key(step: Step) -> tuple[tuple[tuple[str, Any], ...], int]:
    return tuple(sorted(step.values.items())), step.shape


def _expected(session: Session, steps: list[Step], wanted: Wanted | None) -> dict[Any, Tensors]:
    """Return the eager results of all steps, each computed once, before anything is compiled."""
    found: dict[Any, Tensors] = {}
    for step in steps:
        if _key(step) not in found:
            found[_key(step)] = survey.eager(session.set(step), wanted)
    return found


def _restore(session: Session, scenario: Scenario) -> None:
    for shape in range(len(session.calls)):
        session.set(Step({option.path: option.values[0] for option in scenario.options}, shape))


def _time(candidate: remedies.Candidate, call: Call, wanted: Wanted | None) -> float:
    """Return the median time of a call with its graph already compiled, in microseconds."""
    times = []
    for _ in range(_TIMED_CALLS):
        start = time.perf_counter()
        evaluate(call, candidate.run, wanted, candidate.prepare)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] * 1e6


@contextmanager
def _empty_compiler(cache: str) -> Iterator[None]:
    changes = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    with env.changed(**changes):
        torch._dynamo.reset()
        _clear()
        yield
    torch._dynamo.reset()


def _clear() -> None:
    from torch._inductor import utils

    utils.clear_caches()


@contextmanager
def _dynamic(session: Session, scenario: Scenario) -> Iterator[None]:
    """Make compiled functions inside the target behave as under ``dynamic=True``."""
    changes: dict[str, object] = {}
    if session.job.compiled and scenario.dynamic:
        changes = {"assume_static_by_default": False}
    with remedies.settings({"torch._dynamo.config": changes} if changes else {}):
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
