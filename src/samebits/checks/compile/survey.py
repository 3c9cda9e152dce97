"""In a process of its own: find the numbers, and values of each that change the eager result.

The numbers are tried in copies of a process that has only imported the target, so that a launcher
that remembers its first value (helion#2793) shows itself: a copy that begins with another value
ends with another result for the same value. A copy is forked, or started afresh where a fork could
not use CUDA any more.
"""

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from samebits.checks.compile import discover, process
from samebits.checks.compile.compare import allowed_for, effect
from samebits.checks.compile.discover import Call
from samebits.checks.compile.evaluate import Wanted, attempt, evaluate, grown
from samebits.checks.compile.job import Job
from samebits.checks.compile.place import WANTED, Number, Place, candidates, kind_of
from samebits.checks.compile.process import Deadline
from samebits.checks.compile.target import (
    Factory,
    TargetError,
    knows_second_shape,
    load,
    make,
)
from samebits.checks.result import FOREIGN_ERRORS

Tensors = dict[str, torch.Tensor]
# Path and value of the number that a process begins with.
Begin = tuple[str, Number]
_POLL_SECONDS = 0.01
# Fresh processes beside each other; each imports torch.
_MOST_COPIES = 4


def survey(job: Job) -> dict[str, Any]:
    """Return what is known of a job's target before anything is compiled, as JSON values."""
    copies = _Copies(job)
    (found,) = copies.run([None])
    found["remembers"] = []
    if "error" in found:
        return found
    begins: list[Begin | None] = [None]
    begins += [(n["path"], first) for n in found["numbers"] for first in _firsts(n)]
    control, *answers = copies.run(begins, kind="begin")
    if "error" in control:
        return found | {"error": control["error"]}
    if control.get("effect", 1.0) > found["rounding"]:
        return found | {"error": "the eager function gives another result in another process"}
    remembers: dict[str, dict[str, Any]] = {}
    for begin, answer in zip(begins[1:], answers, strict=True):
        if begin is not None and answer.get("effect", 0.0) > found["rounding"]:
            remembers.setdefault(begin[0], {"path": begin[0], "first": begin[1]} | answer)
    found["remembers"] = list(remembers.values())
    return found


def copy_of(job: Job) -> dict[str, Any]:
    """Return what a copy of the survey is asked for, as JSON values."""
    function, factory = load(job.target)
    return _answer(job, function, factory)


def _answer(job: Job, function: Callable[..., Any], factory: Factory) -> dict[str, Any]:
    folder = Path(job.folder)
    if job.kind == "look":
        return _look(function, factory, folder)
    return _first(function, factory, folder, job.begin)


class _Copies:
    """Runs steps, each in a process that has imported the target and called nothing."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._function, self._factory = load(job.target)
        self._forks = hasattr(os, "fork") and not torch.cuda.is_initialized()
        self._count = 0

    def run(
        self, begins: Sequence[Begin | None], kind: Literal["look", "begin"] = "look"
    ) -> list[dict[str, Any]]:
        """Return the answers of copies, one for each of ``begins``."""
        answers: list[dict[str, Any]] = []
        jobs = [self._named(kind, begin) for begin in begins]
        for job in jobs:
            found = self._fork(job) if self._forks else None
            # A fork may fail at what a process of its own can do: use CUDA above all.
            if found is None or ("error" in found and torch.cuda._is_compiled()):
                self._forks = False
                break
            answers.append(found)
        with ThreadPoolExecutor(_MOST_COPIES) as pool:
            left = jobs[len(answers) :]
            answers += pool.map(lambda j: process.ask(j, Deadline(None), leads=False), left)
        return answers

    def _named(self, kind: Literal["look", "begin"], begin: Begin | None) -> Job:
        self._count += 1
        output = str(Path(self._job.folder) / f"copy-{self._count}.json")
        return replace(self._job, kind=kind, begin=begin, output=output)

    def _fork(self, job: Job) -> dict[str, Any] | None:
        """Return the answer of a forked copy, None where it gives none."""
        parent, child = os.getppid(), os.fork()
        if child == 0:
            code = 1
            try:
                if not torch.cuda._is_in_bad_fork():
                    found = guarded(lambda: _answer(job, self._function, self._factory))
                    Path(job.output).write_text(json.dumps(found))
                    code = 0
            finally:  # the copy must not go on as its parent does
                os._exit(code)
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if os.getppid() != parent:  # the audit is gone
                os.kill(child, signal.SIGKILL)
                os._exit(1)
            time.sleep(_POLL_SECONDS)
        if ended[1] != 0 or not Path(job.output).exists():
            return None
        answer: dict[str, Any] = json.loads(Path(job.output).read_text())
        return answer


def prepare(function: Callable[..., Any], factory: Factory, *, second_shape: bool = False) -> Call:
    """Return a call whose numbers can be set, from a fresh set of inputs."""
    args, kwargs = make(factory, second_shape=second_shape)
    call = Call(function, list(args), kwargs)
    discover.spell_out(call)
    return call


def second(call: Call, factory: Factory) -> Call:
    """Return the call in another shape: the factory's, or one with twice the rows."""
    if knows_second_shape(factory):
        return prepare(call.function, factory, second_shape=True)
    return grown(call)


def eager(call: Call, wanted: Wanted | None) -> Tensors:
    """Return what the uncompiled target gives; compiled functions that it calls run eagerly."""
    function = discover.original(call.function)
    with torch.compiler.set_stance("force_eager"):
        return evaluate(call, function, wanted)


def _look(function: Callable[..., Any], factory: Factory, folder: Path) -> dict[str, Any]:
    call = prepare(function, factory)
    plain, reason = attempt(lambda: eager(call, None))
    if reason:
        raise TargetError(f"the eager function raises {reason}")
    if not plain:
        advice = "let it return what it computes, or writes to"
        raise TargetError(f"the function returns no tensor and no number to compare: {advice}")
    wanted, no_gradient = _gradient(call)
    result, again = _twice(call, wanted)
    rounding = max(_rounding(result), 4 * again)
    if again > 1e-3:
        reason = f"two calls from one seed differ by {again:.0e}"
        raise TargetError(f"the eager function is not deterministic: {reason}")
    torch.save(plain, folder / "eager.pt")
    other, no_second_shape = attempt(lambda: eager(second(call, factory), None))
    return {
        "wanted": wanted,
        "no_gradient": no_gradient,
        "shapes": 1 if other is None else 2,
        "no_second_shape": no_second_shape,
        "compiled": discover.is_compiled(function),
        "rounding": rounding,
        "numbers": [_values(place, call, wanted, result) for place in discover.leaves(call)],
    }


def _twice(call: Call, wanted: Wanted | None) -> tuple[Tensors, float]:
    """Return the eager result, and how far the result of the same call again is from it."""
    results: list[Tensors] = []
    while len(results) < 2:
        result, reason = attempt(lambda: eager(call, wanted))
        if reason:
            raise TargetError(f"the eager function raises when it is called again: {reason}")
        results.append(result)
    return results[0], effect(*results)


def _gradient(call: Call) -> tuple[Wanted | None, str]:
    declared = any(isinstance(v, torch.Tensor) and v.requires_grad for v in call.args)
    tries: list[Wanted] = ["declared", "all"] if declared else ["all", "declared"]
    reasons = []
    for wanted in tries:
        _, reason = attempt(lambda w=wanted: eager(call, w))  # type: ignore[misc]
        if not reason:
            return wanted, ""
        reasons.append(reason)
    return None, reasons[0]


def _values(place: Place, call: Call, wanted: Wanted | None, result: Tensors) -> dict[str, Any]:
    """Return one number with the values that change the result, or the reason why there is none."""
    own: Number = place.get()
    others: list[Number] = []
    results, unchanged, refusal = [result], [], ""
    for value in candidates(own):
        _, reason = attempt(lambda v=value: place.set(v))  # type: ignore[misc]
        if not reason:
            got, reason = attempt(lambda: eager(call, wanted))
        if reason:
            refusal = reason
        elif _brings_nan(got, result):
            refusal = "the result is NaN"
        elif all(effect(got, known) > _rounding(got) for known in results):
            results.append(got)
            others.append(value)
        else:
            unchanged.append(value)
        if len(others) == WANTED:
            break
    attempt(lambda: place.set(own))
    note = ""
    if not others:
        note = "no other value changes the eager result of these inputs"
        note = note if unchanged else f"no other value is accepted ({refusal})"
    return {
        "path": place.path,
        "kind": kind_of(own),
        "values": [own, *others],
        "unchanged": unchanged[:1],
        "note": note,
    }


def _firsts(number: dict[str, Any]) -> list[Number]:
    """Return values that a process should begin with, to see whether it remembers them."""
    firsts = [
        *number["unchanged"],
        *([1] if number["kind"] == "int" else []),
        *number["values"][1:2],
    ]
    return [v for v in dict.fromkeys(firsts) if v != number["values"][0]][:2]


def _first(
    function: Callable[..., Any],
    factory: Factory,
    folder: Path,
    begin: tuple[str, Number] | None,
) -> dict[str, Any]:
    """Return how far the result for the own values is from the surveyed one, after ``begin``."""
    call = prepare(function, factory)
    for place in discover.leaves(call):
        if begin is not None and place.path == begin[0]:
            own = place.get()
            attempt(lambda p=place: p.set(begin[1]))  # type: ignore[misc]
            attempt(lambda: eager(call, None))
            place.set(own)
    return {"effect": effect(eager(call, None), torch.load(folder / "eager.pt"))}


def _rounding(result: Tensors) -> float:
    """Return the distance under which two results count as the same."""
    return max((allowed_for(t.dtype) / 10 for t in result.values()), default=0.0)


def _brings_nan(got: Tensors, result: Tensors) -> bool:
    return any(
        bool(tensor.isnan().any()) and not bool(result[name].isnan().any())
        for name, tensor in got.items()
        if name in result
    )


def guarded(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what ``action`` returns, or ``{"error": reason}`` where anyone's code raises."""
    try:
        return action()
    except TargetError as error:
        return {"error": str(error)}
    except FOREIGN_ERRORS:
        return {"error": traceback.format_exc(limit=-3).strip()}
