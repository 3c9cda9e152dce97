"""`samebits check compile`: its arguments, and what it prints and returns."""

import argparse
import json
import sys

from samebits.checks.compile import report
from samebits.checks.compile.audit import Audit, audit, progress
from samebits.checks.compile.target import Target, TargetError
from samebits.checks.result import EXIT_CODES, NOTHING_RUN, USAGE, exit_code, print_results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``check compile`` to ``parser``."""
    parser.epilog = EXIT_CODES
    add = parser.add_argument
    add(
        "target",
        nargs="?",
        metavar="TARGET",
        help="package.module:function, also a method, a "
        "module object, or a function under torch.compile",
    )
    add(
        "--inputs",
        metavar="MODULE:FACTORY",
        help="what returns (args, kwargs); default: "
        "make_inputs in the target's module, else guessed from annotations",
    )
    add(
        "--number",
        action="append",
        default=[],
        metavar="PATH",
        help="vary only this number; may be repeated; default: all that reach the target",
    )
    add("--list", action="store_true", help="list the numbers that reach the target, and stop")
    add("--budget", type=_seconds, metavar="SECONDS", help="stop then; the rest is not_run")
    add("--first", action="store_true", help="stop at the first wrong call")
    add("--no-remedies", action="store_true", help="do not try ways out, nor write a reproducer")
    add("--reproducer", metavar="FILE", help="where to write the reproducer; default: printed")
    add(
        "--self-test",
        action="store_true",
        help="audit programs that are known to be bad: can "
        "the audit still see the fault with this torch?",
    )
    add("--json", action="store_true", help="one JSON object")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"--budget must be greater than 0, got {text}")
    return seconds


def main(arguments: argparse.Namespace) -> int:
    """Run the audit, print what it found, and return the exit code."""
    if arguments.target is None:
        print("samebits check compile: TARGET is missing", file=sys.stderr)
        return USAGE
    target = Target(arguments.target, arguments.inputs)
    try:
        found = audit(
            target,
            only=arguments.number,
            budget=arguments.budget,
            stop_at_first=arguments.first,
            tell=progress,
        )
    except TargetError as error:
        print(f"samebits check compile: {error}", file=sys.stderr)
        return USAGE
    return _show(found, as_json=arguments.json)


def _show(found: Audit, *, as_json: bool) -> int:
    verdicts = report.results(found)
    if as_json:
        print(json.dumps(report.to_json(found)))
    else:
        print_results(verdicts, as_json=False)
    if not found.numbers:
        print("no number reaches the target: nothing can go stale", file=sys.stderr)
        return NOTHING_RUN
    return exit_code(result.verdict for result in verdicts)
