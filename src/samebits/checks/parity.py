"""`samebits check parity`: Do output and every gradient match fp64, in every case?

Without TARGET, the backends of Samebits are judged. TARGET is ``module:function``: anyone's experts
function, called as ``samebits.experts`` is::

    function(x, routing, weights, activation, **options) -> Tensor

Its cases have dense weights unless others are named. ``options`` holds only what a case sets:
``placement``, ``expert_start``, ``out_dtype``, ``num_valid_tokens``. A function that has no such
parameter, or raises ``NotImplementedError``, is ``unsupported`` there; one that ignores what
``activation`` or ``weights`` asks for fails.
"""

import argparse
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from samebits import env
from samebits.arguments import at_least_one
from samebits.backends import BACKENDS
from samebits.checks.result import (
    FOREIGN_ERRORS,
    USAGE,
    Result,
    Verdict,
    exit_code,
    print_results,
    tracked,
)
from samebits.checks.target import resolve
from samebits.errors import must
from samebits.experts import experts
from samebits.problem import DTYPES, Problem
from samebits.testing.cases import CASES, QUANTIZED
from samebits.testing.inputs import (
    PER_EXPERT,
    Distribution,
    judge_all,
    make_inputs,
    options_of,
    run_function,
)
from samebits.testing.numerics import Judgement

ExpertsFunction = Callable[..., Tensor]

# The reference is what the others are measured against: it cannot fail.
DEFAULT_BACKENDS = [name for name in BACKENDS if name != "reference"]
_ALL = CASES | QUANTIZED
DISTRIBUTIONS: tuple[Distribution, ...] = ("uniform", "dropped")


class Subject(NamedTuple):
    """What is judged: its name, how it is called, and whether it refuses a problem beforehand."""

    name: str
    function: ExpertsFunction
    why_not: Callable[[Problem], str | None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``check parity`` to ``parser``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        (__doc__ or "").partition("`: ")[2].replace("::\n", ":\n").replace("``", "`")
    )
    add = parser.add_argument
    add("target", nargs="?", metavar="TARGET", help="module:function; default: our backends")
    add("--case", action="append", choices=sorted(_ALL), metavar="NAME", help=_CASE_HELP)
    add(
        "--backend",
        action="append",
        choices=list(BACKENDS),
        help="may be repeated; default: all but the reference, which the others are measured by",
    )
    add("--forward", action="store_true", help="judge the output alone, without gradients")
    add("--device", default=None, help="a torch device; default: cuda where there is one, else cpu")
    add("--tokens", type=at_least_one, default=7, metavar="T", help="of each case; default: 7")
    add("--json", action="store_true", help="one JSON object a line instead of the table")


_CASE_HELP = "a case of samebits.testing.cases; may be repeated; default: all"


def main(arguments: argparse.Namespace) -> int:
    """Run the check, print its results and return the exit code.

    Determinism: inputs have fixed seeds; results repeat where the judged function does.
    """
    try:
        device = env.default_device() if arguments.device is None else _device(arguments.device)
        subjects = _subjects(arguments.target, arguments.backend)
    except (TypeError, ValueError) as error:
        print(f"samebits check parity: {error}", file=sys.stderr)
        return USAGE
    with _one_thread():
        results = list(
            judge_cases(
                subjects,
                arguments.case or list(_ALL if arguments.target is None else CASES),
                device=device,
                tokens=arguments.tokens,
                forward=arguments.forward,
            )
        )
    print_results(results, as_json=arguments.json)
    return exit_code(result.verdict for result in results)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread of the CPU for a while: tiny products are slower on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def judge_cases(
    subjects: Sequence[Subject],
    cases: Iterable[str],
    *,
    device: torch.device,
    tokens: int = 7,
    forward: bool = False,
) -> Iterator[Result]:
    """Yield one result for each subject and case: its worst quantity under any routing.

    Args:
        subjects: What is judged.
        cases: Names of ``CASES`` or ``QUANTIZED``.
        device: Where it runs; the truth is computed on CPU in fp64.
        tokens: T of each case.
        forward: Judge the output alone.

    Determinism: inputs have fixed seeds.
    """
    pairs = [(subject, name) for subject in subjects for name in cases]
    for subject, name in tracked(pairs, "parity"):
        problem = replace(_ALL[name], device=env.architecture(device))
        if forward:
            problem = replace(problem, grad=False)
        yield judge_case(subject, name, problem, device, tokens)


def judge_case(
    subject: Subject, case: str, problem: Problem, device: torch.device, tokens: int
) -> Result:
    """Return the verdict on one subject and problem.

    Determinism: inputs have fixed seeds.
    """
    about = partial(Result, check="parity", case=case, problem=str(problem), backend=subject.name)
    reason = subject.why_not(problem)
    if reason is not None:
        return about(verdict="unsupported", note=reason)
    worst: Place | None = None
    for distribution in DISTRIBUTIONS:
        live = max(tokens - 2, 1)
        inputs = make_inputs(
            problem, tokens, distribution=distribution, device=device, valid_tokens=live
        )
        try:
            results = run_function(problem, inputs, subject.function)
            _check_results(problem, results)
            judgements = judge_all(problem, inputs, results)
        except (NotImplementedError, ImportError) as error:
            verdict: Verdict = "not_run" if isinstance(error, ImportError) else "unsupported"
            return about(verdict=verdict, note=_spell(error))
        except FOREIGN_ERRORS as error:
            return about(verdict="fail", note=f"{distribution}: {_spell(error)}")
        place = _worst(judgements, distribution)
        worst = place if worst is None else max(worst, place)
    assert worst is not None
    return about(
        verdict="pass" if worst.passed else "fail",
        measured=worst.measured,
        allowed=worst.allowed,
        note=worst.where,
    )


class Place(NamedTuple):
    """Where a run was nearest to its budget or furthest over; places compare by how far."""

    # measured / allowed.
    share: float
    passed: bool
    measured: float
    allowed: float
    where: str


def _worst(judgements: dict[str, Judgement], distribution: str) -> Place:
    places = []
    for name, judged in judgements.items():
        row = "expert" if name in PER_EXPERT else "row"
        for measured, allowed, where in (
            (judged.measured, judged.allowed, "whole"),
            (judged.worst_row, judged.worst_allowed, f"{row} {judged.row}"),
        ):
            share = measured / allowed if allowed else 0.0
            within = share <= 1
            places.append(
                Place(share, within, measured, allowed, f"{name}, {where}, {distribution}")
            )
    return max(places)


def _check_results(problem: Problem, results: dict[str, Tensor]) -> None:
    expected = DTYPES[problem.result_dtype]
    if results["out"].dtype != expected:
        raise TypeError(must("the output", f"have dtype {expected}", results["out"].dtype))
    if problem.grad and len(results) == 1:
        rule = "carry gradients (--forward judges it alone)"
        raise TypeError(must("the output", rule, "requires_grad=False"))


def _subjects(target: str | None, backends: Sequence[str] | None) -> list[Subject]:
    if target is None:
        return [_backend(name) for name in backends or DEFAULT_BACKENDS]
    if backends:
        raise ValueError("--backend and TARGET exclude each other")
    function = load(target)
    return [Subject(target, function, partial(_unbindable, function))]


def _backend(name: str) -> Subject:
    return Subject(name, partial(experts, backend=name), BACKENDS[name].why_not)


def load(target: str) -> ExpertsFunction:
    """Return the function that ``module:function`` names; the working directory is searched first.

    Raises:
        TargetError: ``target`` has another form, names nothing, or its module does not import.
        TypeError: What it names cannot be called.
    """
    found = resolve(target, "TARGET")
    if not callable(found):
        raise TypeError(must("TARGET", "name a function", f"a {type(found).__name__}"))
    function: ExpertsFunction = found
    return function


def _unbindable(function: ExpertsFunction, problem: Problem) -> str | None:
    """Return why ``function`` cannot be called with the options of ``problem``, or None."""
    counted = torch.empty(1, device="meta") if problem.counted else None
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin tells nothing about itself
        return None
    try:
        signature.bind("x", "routing", "weights", "activation", **options_of(problem, counted))
    except TypeError as error:
        return f"its signature does not fit: {error}"
    return None


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        message = str(error).partition("\n")[0]
        raise ValueError(must("--device", "be a torch device", f"{name!r} ({message})")) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(must("--device", "exist here", name))
    return device


def _spell(error: BaseException) -> str:
    text = str(error).partition("\n")[0][:400]
    return text if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {text}"
