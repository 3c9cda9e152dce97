"""`samebits check compile`: its arguments, and what it prints and returns."""

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from samebits.checks.compile import report
from samebits.checks.compile.audit import audit, progress
from samebits.checks.compile.process import Deadline
from samebits.checks.compile.record import Audit
from samebits.checks.compile.self_test import self_test
from samebits.checks.compile.target import Target, TargetError
from samebits.checks.result import EXIT_CODES, NOTHING_RUN, USAGE, exit_code, print_results
from samebits.errors import must


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``check compile`` to ``parser``."""
    parser.epilog = EXIT_CODES
    add = parser.add_argument
    add(
        "target",
        nargs="?",
        metavar="TARGET",
        help="package.module:function, also a method, a module object, or a function under "
        "torch.compile",
    )
    add(
        "--inputs",
        metavar="MODULE:FACTORY",
        help="what returns (args, kwargs); default: make_inputs in the target's module, else "
        "guessed from annotations",
    )
    add(
        "--number",
        action="append",
        default=[],
        metavar="PATH",
        help="vary only this number; may be repeated; default: all that reach the target",
    )
    add("--budget", type=seconds, metavar="SECONDS", help="stop then; the rest is not_run")
    add("--first", action="store_true", help="stop at the first wrong call")
    add("--no-remedies", action="store_true", help="try no ways out, and write no reproducer")
    add("--reproducer", metavar="FILE", help="where to write the reproducer; default: printed")
    add(
        "--self-test",
        action="store_true",
        help="audit programs that are known to be bad: does the audit see them with this torch?",
    )
    add("--json", action="store_true", help="one JSON object (with --self-test one a line)")


def seconds(text: str) -> float:
    """Return the number of seconds that ``text`` says."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be greater than 0, got {text}")
    return value


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Take SIGTERM as Ctrl-C: a CI's time limit must leave no workers and no caches behind."""

    def interrupt(*_: object) -> NoReturn:
        # `timeout` sends it twice: the second one must not stop the tidying up.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@_terminated_as_interrupted()
def main(arguments: argparse.Namespace) -> int:
    """Run the audit, print what it found, and return the exit code."""
    if refusal := _refusal(arguments):
        print(f"samebits check compile: {refusal}", file=sys.stderr)
        return USAGE
    try:
        if arguments.self_test:
            verdicts = self_test(budget=arguments.budget, tell=progress)
            print_results(verdicts, as_json=arguments.json)
            return exit_code(result.verdict for result in verdicts)
        found = audit(
            Target(arguments.target, arguments.inputs),
            only=arguments.number,
            deadline=Deadline(arguments.budget),
            stop_at_first=arguments.first,
            remedies=not arguments.no_remedies,
            tell=progress,
        )
    except TargetError as error:
        print(f"samebits check compile: {error}", file=sys.stderr)
        return USAGE
    return _show(found, arguments)


def _refusal(arguments: argparse.Namespace) -> str:
    """Return what is wrong with the arguments together; nothing is accepted and ignored."""
    if arguments.self_test == (arguments.target is not None):
        return "give either TARGET or --self-test"
    alone = ("inputs", "number", "first", "no_remedies", "reproducer")
    if arguments.self_test and (given := [name for name in alone if getattr(arguments, name)]):
        return f"--{given[0].replace('_', '-')} has no effect with --self-test"
    path = arguments.reproducer
    if path is None:
        return ""
    if arguments.no_remedies:
        return "--reproducer has no effect with --no-remedies, which writes none"
    # An audit takes minutes: its report must not be lost at the end.
    if Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
        return must("--reproducer", "name a file in a folder that exists", repr(path))
    return ""


def _show(found: Audit, arguments: argparse.Namespace) -> int:
    verdicts = report.results(found)
    source = (found.reproducer or {}).get("source")
    if arguments.reproducer and source:
        Path(arguments.reproducer).write_text(source)
    if arguments.json:
        print(json.dumps(report.to_json(found)))
    else:
        print_results(verdicts, as_json=False)
        print(report.text(found, reproducer=arguments.reproducer))
    if not found.numbers and "survey" not in found.unfinished:
        print("no float, int or bool was found that reaches the target", file=sys.stderr)
        return NOTHING_RUN
    return exit_code(result.verdict for result in verdicts)
