"""`samebits explain`: which backends run a problem, why not the others, and what to do instead."""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from samebits import env
from samebits.backends import BACKENDS, explain
from samebits.checks.result import EXIT_CODES, NOTHING_RUN, PASSED, USAGE, print_table
from samebits.errors import UnsupportedError
from samebits.problem import Problem
from samebits.testing.cases import CASES, MODELS, QUANTIZED

# What a caller can change without changing the function that is computed, in the order in which it
# is proposed.
CHANGES: Mapping[str, Callable[[Problem], Problem]] = {
    "without gradients": lambda problem: replace(problem, grad=False),
    "in bf16": lambda problem: replace(problem, dtype="bf16", out_dtype=None),
    "on an NVIDIA GPU (sm_90)": lambda problem: replace(problem, device="sm_90"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``explain`` to ``parser``."""
    parser.epilog = EXIT_CODES
    what = parser.add_mutually_exclusive_group()
    names = [*CASES, *QUANTIZED, *MODELS]
    what.add_argument("--case", choices=names, metavar="NAME", help="a case; default: every case")
    what.add_argument("--problem", metavar="TEXT", help='str(problem), as in "H=64 F=96 E=8 K=2 …"')
    what.add_argument("--model", metavar="DIR", help="a folder with a transformers config.json")
    parser.add_argument("--grad", action="store_true", help="with gradients, as training needs")
    parser.add_argument("--device", help='"cpu", "sm_90" and so on; default: this machine\'s')


def main(arguments: argparse.Namespace) -> int:
    """Print the answer: 0 where some backend runs every problem, 3 where none does for one.

    Determinism: a function of the arguments and, without --device, of this machine.
    """
    try:
        problems = _problems(arguments)
    except ImportError as error:
        print(f"not_run: {error}\nhint: pip install 'samebits[transformers]'", file=sys.stderr)
        return NOTHING_RUN
    except UnsupportedError as error:
        print(f"unsupported: {error}", file=sys.stderr)
        return NOTHING_RUN
    except (OSError, ValueError) as error:
        print(f"samebits explain: {error}", file=sys.stderr)
        return USAGE
    if len(problems) == 1 or arguments.model is not None:
        for name, problem in problems.items():
            _print_one(name, problem)
    else:
        _print_all(problems)
    able = all(None in explain(problem).values() for problem in problems.values())
    return PASSED if able else NOTHING_RUN


def alternatives(problem: Problem, backend: str) -> Iterator[str]:
    """Yield what a caller could change so that ``backend`` runs ``problem``, fewest changes first.

    Determinism: pure function of its arguments.
    """
    found: list[tuple[str, ...]] = []
    for count in range(1, len(CHANGES) + 1):
        for names in combinations(CHANGES, count):
            changed = problem
            for name in names:
                changed = CHANGES[name](changed)
            wider = any(set(shorter) <= set(names) for shorter in found)
            if not wider and BACKENDS[backend].why_not(changed) is None:
                found.append(names)
                yield " ".join(names)


def _problems(arguments: argparse.Namespace) -> dict[str, Problem]:
    problems: dict[str, Problem] = {**CASES, **QUANTIZED, **MODELS}
    if arguments.case is not None:
        problems = {arguments.case: problems[arguments.case]}
    elif arguments.problem is not None:
        problems = {"problem": Problem.parse(arguments.problem)}
    elif arguments.model is not None:
        problems = _problems_of_model(Path(arguments.model))
    if arguments.grad:
        problems = {name: replace(problem, grad=True) for name, problem in problems.items()}
    if arguments.device is None and arguments.problem is not None:
        return problems
    device = arguments.device or env.architecture(env.default_device())
    return {name: replace(problem, device=device) for name, problem in problems.items()}


def _problems_of_model(folder: Path) -> dict[str, Problem]:
    # The one place where this command names a framework.
    from samebits.integrations.transformers.configuration import problems_of_folder

    return problems_of_folder(folder)


def _print_one(name: str, problem: Problem) -> None:
    print(f"{name}, on {problem.device}: {problem}")
    rows = []
    for backend, reason in explain(problem).items():
        note = BACKENDS[backend].notes(problem) if reason is None else reason
        rows.append([backend, "no" if reason else "yes", note or ""])
    print_table(["backend", "runs", "note"], rows)
    for backend, reason in explain(problem).items():
        if reason is not None:
            instead = " or ".join(alternatives(problem, backend)) or "nothing that keeps the result"
            print(f"{backend} instead: {instead}")
    able = [backend for backend, reason in explain(problem).items() if reason is None]
    print(f'backend="auto" takes {able[0]}' if able else "no backend runs it")


def _print_all(problems: Mapping[str, Problem]) -> None:
    reasons: dict[str, int] = {}
    rows = []
    for name, problem in problems.items():
        row = [name]
        for reason in explain(problem).values():
            number = 0 if reason is None else reasons.setdefault(reason, len(reasons) + 1)
            row.append(f"no ({number})" if number else "yes")
        rows.append(row)
    print_table(["case", *BACKENDS], rows)
    for reason, number in reasons.items():
        print(f"({number}) {reason}")
    print("hint: samebits explain --case NAME says what to do instead", file=sys.stderr)
